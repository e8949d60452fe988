"""FLAME: the first majority by cosine distance, clipped to the median norm, plus noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.cluster import HDBSCAN  # type: ignore[import-untyped]
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, ServerView
from fedbench.testing import DefenseContract

Flame: Any = DEFENSES.get("flame")

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def flame(
    updates: Tensor, global_params: Tensor | None = None, noise: float = 0.0, seed: int = 0
) -> Aggregate:
    n, p = updates.shape
    if global_params is None:
        global_params = torch.zeros(p)
    start = global_params.to(updates.dtype)
    rng = torch.Generator().manual_seed(seed)
    view = ServerView(0, torch.arange(n), start, start, {"w": slice(0, p)}, rng)
    outcome: Aggregate = Flame(noise=noise).aggregate(updates, None, view)[0]
    return outcome


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept_by(outcome: Aggregate) -> list[int]:
    assert outcome.accepted is not None
    return outcome.accepted.nonzero().flatten().tolist()


def scores_of(outcome: Aggregate) -> list[float]:
    assert outcome.scores is not None
    assert outcome.scores.dtype == torch.float64
    return outcome.scores.tolist()


def models_of(updates: Tensor, global_params: Tensor) -> np.ndarray:
    return (global_params.to(updates.dtype).double() + updates.double()).numpy()


def exact_distances(models: np.ndarray) -> np.ndarray:
    """1 - cos from integers, rounded once.

    1 - a.b / (|a||b|) = (1 - r) / (1 + sqrt r) with r = (a.b)^2 / (a.a b.b) a fraction.
    """
    n = len(models)
    ratios = [[value.as_integer_ratio() for value in row] for row in models.tolist()]
    scale = max(below for row in ratios for _, below in row)  # all denominators are powers of two
    rows = [[above * (scale // below) for above, below in row] for row in ratios]
    gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in rows] for x in rows]
    distances = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            squares = gram[i][i] * gram[j][j]
            if rows[i] == rows[j]:
                distances[i, j] = 0
            elif not squares:
                distances[i, j] = 1
            else:
                ratio = Fraction(gram[i][j] ** 2, squares)
                root = math.sqrt(ratio)
                distances[i, j] = (
                    float(1 - ratio) / (1 + root) if gram[i][j] >= 0 else 1 + math.sqrt(ratio)
                )
    return distances


def components(distances: np.ndarray, height: float) -> list[list[int]]:
    """Components of the graph of all pairs at most `height` apart, by breadth-first search."""
    left, found = set(range(len(distances))), []
    while left:
        queue = [left.pop()]
        for i in queue:
            near = {j for j in left if distances[i, j] <= height}
            left -= near
            queue += near
        found.append(sorted(queue))
    return found


@dataclass(frozen=True)
class Verdict:
    kept: list[int]
    scores: list[float]
    sure: bool  # rounding errors up to `tolerance` do not change `kept`


def verdict_by_definition(distances: np.ndarray, tolerance: float = 0.0) -> Verdict:
    """Clients at the smallest height with a component of n // 2 + 1, and all heights as scores."""
    n = len(distances)
    scores = [math.inf] * n
    kept: list[int] = []
    for height in sorted({0.0, *distances.flatten().tolist()}):
        for members in components(distances, height):
            if len(members) >= n // 2 + 1:
                kept = kept or members
                scores = [min(scores[i], height if i in members else math.inf) for i in range(n)]
    bound = scores[kept[0]]
    below, above = (components(distances, bound + side * tolerance) for side in (-1, 1))
    alone = len(below) - len(above) <= 1  # a single merge, whose order cannot change
    return Verdict(kept, scores, alone and kept in above)


def kept_by_hdbscan(distances: np.ndarray) -> list[int]:
    """Members of the largest cluster."""
    clustering = HDBSCAN(
        min_cluster_size=len(distances) // 2 + 1,
        min_samples=1,
        allow_single_cluster=True,
        metric="precomputed",
        copy=True,
    )
    labels = clustering.fit(distances).labels_
    sizes = np.bincount(labels[labels >= 0])
    return np.flatnonzero(labels == sizes.argmax()).tolist()


def median_norm(rows: Sequence[Sequence[float]]) -> float:
    norms = sorted(math.hypot(*row) for row in rows)
    return (norms[(len(norms) - 1) // 2] + norms[len(norms) // 2]) / 2


def mean_by_definition(rows: Sequence[Sequence[float]], kept: Sequence[int]) -> list[float]:
    """Mean of the kept rows, each clipped to the median norm of all rows."""
    bound = median_norm(rows)
    clipped = []
    for i in kept:
        length = math.hypot(*rows[i])
        clipped.append([value * bound / length if length > bound else value for value in rows[i]])
    return [math.fsum(column) / len(kept) for column in zip(*clipped, strict=True)]


def test_by_hand() -> None:
    # G = (1, 0), so the models are (1, 0), (1, 1), (-1, 3), (5, 0), (-1, 0): 3 of 5 are needed.
    # Distances: 0-3: 0;  0-1 and 3-1: 1 - 1/sqrt 2 = .2929;  1-2: 1 - 2/sqrt 20 = .5528;
    #   2-4: 1 - 1/sqrt 10 = .6838; all others are above 1. So 0, 3 and then 1 form a majority.
    # Norms 0, 1, sqrt 13, 4, 2: S = 2 (over the kept only it would be 1), so the norm 4 is halved.
    # The update is the mean of (0, 0), (0, 1), (2, 0).
    rows = torch.tensor([[0.0, 0.0], [0.0, 1.0], [-2.0, 3.0], [4.0, 0.0], [-2.0, 0.0]])
    start = torch.tensor([1.0, 0.0])
    outcome = flame(rows, start)
    assert kept_by(outcome) == [0, 1, 3]
    assert scores_of(outcome) == pytest.approx([0.292893, 0.292893, 0.552786, 0.292893, 0.683772])
    assert outcome.threshold == pytest.approx(0.292893)
    assert outcome.update.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert outcome.weights.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0])
    # Without the third, 3 of 4 are needed: the same ones. Norms 0, 1, 4, 2: S = (1 + 2) / 2.
    # The update is the mean of (0, 0), (0, 1), (1.5, 0). Model (-1, 0) joins last, at 1 + 1/sqrt 2
    # from (1, 1).
    outcome = flame(rows[[0, 1, 3, 4]], start)
    assert kept_by(outcome) == [0, 1, 2]
    assert scores_of(outcome) == pytest.approx([0.292893, 0.292893, 0.292893, 1.707107])
    assert outcome.update.tolist() == pytest.approx([0.5, 1 / 3])


def test_few_clients() -> None:
    # One client is kept unchanged. Two are both kept, at any distance; S = (1 + 3) / 2.
    alone = flame(torch.tensor([[3.0, 4.0]]))
    assert (kept_by(alone), scores_of(alone), alone.update.tolist()) == ([0], [0], [3, 4])
    pair = flame(torch.tensor([[1.0, 0.0], [0.0, -3.0]]))
    assert (kept_by(pair), scores_of(pair), pair.update.tolist()) == ([0, 1], [1, 1], [0.5, -1])
    opposed = flame(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert (kept_by(opposed), scores_of(opposed)) == ([0, 1], [2, 2])
    # Of three, the closest two are kept.
    three = flame(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 3.0]]))
    assert kept_by(three) == [1, 2]
    assert scores_of(three) == pytest.approx([0.683772, 0.051317, 0.051317], abs=1e-6)


def test_keeps_all_clients_that_join_at_the_same_height() -> None:
    """Pairs at exactly that height are linked."""
    right_angles = flame(torch.eye(6))
    assert kept_by(right_angles) == list(range(6))
    assert scores_of(right_angles) == [1] * 6
    rows = torch.eye(7)[[0, 0, 0, 0, 1, 1, 2]]
    outcome = flame(rows)
    assert kept_by(outcome) == [0, 1, 2, 3]
    assert scores_of(outcome) == [0, 0, 0, 0, 1, 1, 1]


def test_a_model_of_zeros_has_distance_one_to_all_others() -> None:
    start = torch.tensor([1.0, 2.0, 0.0])
    rows = torch.tensor([[0.0, 0, 0], [0.0, 0, 0.1], [0.0, 0, -0.1], [-1.0, -2, 0], [-1.0, -2, 0]])
    outcome = flame(rows, start)
    assert kept_by(outcome) == [0, 1, 2]
    assert scores_of(outcome)[3:] == [1, 1]
    zeros = flame(rows[[0, 3, 4, 3, 4]], start)
    assert kept_by(zeros) == [1, 2, 3, 4]
    assert scores_of(zeros) == [1, 0, 0, 0, 0]


def test_compares_models_and_not_updates() -> None:
    """Three updates with the same direction but different norms, and four of equal small norm."""
    start = torch.tensor([10.0, 0.0, 0.0])
    aligned = torch.tensor([[0.0, 4.0, 0.0], [0.0, 20.0, 0.0], [0.0, 100.0, 0.0]])
    small = 0.1 * torch.eye(3)[[0, 1, 1, 2]]
    outcome = flame(torch.cat([aligned, small]), start)
    assert kept_by(outcome) == [3, 4, 5, 6]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Updates and a global model; rows may repeat, be zero or cancel the model."""
    n, p = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    whole, fractions = st.integers(-3, 3).map(float), st.integers(-64, 64).map(lambda k: k / 16)
    elements = draw(st.sampled_from([whole, fractions]))
    start = draw(st.one_of(st.just(np.zeros(p)), hnp.arrays(np.float64, p, elements=elements)))
    pool = draw(hnp.arrays(np.float64, (draw(st.integers(1, 9)), p), elements=elements))
    pool = np.concatenate([pool, np.zeros((1, p)), -start[None]])
    picks = draw(st.lists(st.integers(0, len(pool) - 1), min_size=n, max_size=n))
    return pool[picks], start


@settings(derandomize=True, deadline=None, max_examples=300)
@given(rounds(), st.sampled_from([torch.float32, torch.float64]))
def test_against_hdbscan_and_the_definition(
    round_: tuple[np.ndarray, np.ndarray], dtype: torch.dtype
) -> None:
    updates, start = (torch.tensor(values, dtype=dtype) for values in round_)
    distances = exact_distances(models_of(updates, start))
    expected = verdict_by_definition(distances, tolerance=1e-9)
    n = len(updates)
    if n >= 2:
        assert kept_by_hdbscan(distances) == expected.kept
    outcome = flame(updates, start)
    kept = kept_by(outcome)
    assert scores_of(outcome) == pytest.approx(expected.scores, rel=0, abs=1e-9)
    if expected.sure:
        assert kept == expected.kept
    else:  # rounding may break ties between equal distances
        bound = max(expected.scores[i] for i in expected.kept) + 1e-9
        assert len(kept) > n // 2
        assert any(set(kept) <= set(members) for members in components(distances, bound))
    rows = updates.double().tolist()
    tolerance = 8 * torch.finfo(dtype).eps * max(abs(value) for row in rows for value in row)
    update = mean_by_definition(rows, kept)
    assert outcome.update.tolist() == pytest.approx(update, rel=0, abs=tolerance)
    share = [(i in kept) / len(kept) for i in range(n)]
    assert outcome.weights.tolist() == pytest.approx(share)


@both_dtypes
@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 29, 30])
def test_against_hdbscan_on_realistic_updates(n: int, dtype: torch.dtype) -> None:
    for seed in range(6):
        start = randn(50, seed=seed)
        updates = (0.1 * (randn(50, seed=seed + 100) + randn(n, 50, seed=seed + 200))).to(dtype)
        updates[: n // 4] *= -1
        distances = exact_distances(models_of(updates, start))
        expected = verdict_by_definition(distances)
        outcome = flame(updates, start)
        assert kept_by(outcome) == expected.kept == kept_by_hdbscan(distances)
        assert scores_of(outcome) == pytest.approx(expected.scores, rel=1e-10, abs=0)
        update = mean_by_definition(updates.double().tolist(), expected.kept)
        assert outcome.update.tolist() == pytest.approx(update, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("length", [1e2, 1.0, 1e-2], ids="{:g}_of_the_model".format)
@pytest.mark.parametrize(
    ("relative", "dtype"), [(1e-2, torch.float32), (1e-4, torch.float32), (1e-6, torch.float64)]
)
def test_keeps_the_right_clients_among_nearly_equal_ones(
    relative: float, dtype: torch.dtype, length: float
) -> None:
    """Down to distances of 1e-12, which float32 arithmetic would turn into zeros or noise."""
    for seed in range(8):
        start = randn(200, seed=seed).to(dtype)
        common = randn(200, seed=seed + 100).to(dtype)
        own = randn(20, 200, seed=seed + 200).to(dtype)
        updates = length * common * (1 + relative * own)
        expected = verdict_by_definition(exact_distances(models_of(updates, start)))
        outcome = flame(updates, start)
        assert kept_by(outcome) == expected.kept
        assert scores_of(outcome) == pytest.approx(expected.scores, rel=1e-3, abs=0)


def test_a_distant_minority_of_equal_norm_does_not_affect_the_majority() -> None:
    """Distances in the majority are 1e-8 of the others, whichever row is the reference."""
    for seed in range(8):
        start, common = randn(200, seed=seed), randn(200, seed=seed + 100)
        updates = common * (1 + 1e-4 * randn(15, 200, seed=seed + 200))
        others = randn(200, seed=seed + 300) + randn(7, 200, seed=seed + 400)
        updates[::2][:7] = others * common.norm() / others.norm(dim=1, keepdim=True)
        expected = verdict_by_definition(exact_distances(models_of(updates, start)))
        outcome = flame(updates, start)
        assert kept_by(outcome) == expected.kept
        assert scores_of(outcome) == pytest.approx(expected.scores, rel=1e-6, abs=0)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("n_scaled", [1, 4, 5, 6, 9])
def test_long_updates_do_not_affect_distances_of_short_ones(n_scaled: int, scale: float) -> None:
    for seed in range(8):
        start, common = randn(30, seed=seed), randn(30, seed=seed + 100)
        updates = 0.3 * (common + randn(10, 30, seed=seed + 200))
        updates[:n_scaled] *= scale
        expected = verdict_by_definition(exact_distances(models_of(updates, start)))
        outcome = flame(updates, start)
        assert kept_by(outcome) == expected.kept
        assert scores_of(outcome) == pytest.approx(expected.scores, rel=1e-3)


@both_dtypes
@pytest.mark.parametrize("n_params", [7, 1000, 70_000])
@pytest.mark.parametrize("length", [1.0, 1e-3])
def test_equal_rows_have_distance_zero(n_params: int, length: float, dtype: torch.dtype) -> None:
    """Without rounding error from their norms: a majority of equal rows joins at height 0."""
    start = randn(n_params)
    updates = length * randn(11, n_params, seed=1).to(dtype)
    updates[::2] = updates[0].clone()
    updates[1] = updates[3]
    outcome = flame(updates, start)
    assert kept_by(outcome) == [0, 2, 4, 6, 8, 10]
    scores = scores_of(outcome)
    assert scores[::2] == [0] * 6
    assert all(score > 0 for score in scores[1::2])
    assert scores[1] == scores[3]  # to the last bit
    same = flame(updates[:1].expand(8, -1).clone(), start)
    assert scores_of(same) == [0] * 8
    torch.testing.assert_close(same.update, updates[0])


def poisoned(n: int, n_malicious: int, kind: str) -> tuple[Tensor, Tensor]:
    """Updates and G. Honest updates are similar; malicious ones come first."""
    start, common = randn(300), randn(300, seed=1)
    updates = 0.1 * (common + 0.2 * randn(n, 300, seed=2))
    malicious = updates[:n_malicious]
    if kind == "scaled":
        updates[:n_malicious] = 10 * malicious
    elif kind == "reversed":
        updates[:n_malicious] = -malicious
    else:
        updates[:n_malicious] = 0.1 * (randn(300, seed=3) + 0.2 * randn(n_malicious, 300, seed=4))
    return updates, start


@pytest.mark.parametrize("kind", ["scaled", "reversed", "elsewhere"])
@pytest.mark.parametrize(("n", "n_malicious"), [(5, 2), (10, 1), (10, 4), (30, 6), (30, 14)])
def test_rejects_a_minority(n: int, n_malicious: int, kind: str) -> None:
    updates, start = poisoned(n, n_malicious, kind)
    outcome = flame(updates, start)
    assert min(kept_by(outcome)) >= n_malicious
    scores = scores_of(outcome)
    assert min(scores[:n_malicious]) > max(scores[n_malicious:])
    assert outcome.weights[:n_malicious].tolist() == [0] * n_malicious


@pytest.mark.parametrize("kind", ["scaled", "reversed", "elsewhere"])
@pytest.mark.parametrize(("n", "n_malicious"), [(5, 3), (10, 6), (30, 16), (30, 24)])
def test_a_colluding_majority_wins(n: int, n_malicious: int, kind: str) -> None:
    updates, start = poisoned(n, n_malicious, kind)
    updates[:n_malicious] = updates[0].clone()
    outcome = flame(updates, start)
    assert kept_by(outcome) == list(range(n_malicious))
    bound = median_norm(updates.double().tolist())
    alone = updates[0] * min(1, bound / float(updates[0].double().norm()))
    torch.testing.assert_close(outcome.update, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [10, 30, 31])
def test_rejects_honest_clients_without_an_attack(n: int) -> None:
    """Diverse clients join one by one, so the first majority is little more than half."""
    kept = [
        len(kept_by(flame(0.1 * randn(n, 300, seed=seed), randn(300, seed=seed + 100))))
        for seed in range(10)
    ]
    assert min(kept) == n // 2 + 1
    assert max(kept) <= 0.7 * n + 1
    assert sum(kept) / len(kept) <= 0.6 * n + 1


@both_dtypes
@pytest.mark.parametrize("length", [2.0, 1e3, 1e30, 1e37])
def test_a_kept_update_contributes_at_most_the_median_norm(
    length: float, dtype: torch.dtype
) -> None:
    """A backdoor in the direction of the honest models is kept at any norm, but clipped."""
    start = torch.zeros(40)
    honest = randn(40, seed=1) + 0.1 * randn(9, 40, seed=2)
    direction = honest.mean(dim=0) / honest.mean(dim=0).norm()
    updates = torch.cat([length * direction[None] * honest.norm(), honest]).to(dtype)
    outcome = flame(updates, start)
    kept = kept_by(outcome)
    assert 0 in kept
    rows = updates.double().tolist()
    bound = median_norm(rows)
    assert float(outcome.update.double().norm()) <= bound * (1 + 1e-6)
    update = mean_by_definition(rows, kept)
    assert outcome.update.tolist() == pytest.approx(update, rel=1e-5, abs=1e-6)
    others = [i for i in kept if i > 0]
    shortened = torch.tensor(
        [[value * min(1, bound / math.hypot(*rows[i])) for value in rows[i]] for i in others],
        dtype=torch.float64,
    )
    share = outcome.update.double() - shortened.sum(dim=0) / len(kept)
    assert float(share.norm()) == pytest.approx(bound / len(kept), rel=1e-4)


@both_dtypes
def test_tiny_updates_keep_their_norm(dtype: torch.dtype) -> None:
    """Their squares underflow float32."""
    updates = (1e-30 * (randn(20, seed=1) + 0.1 * randn(5, 20, seed=2))).to(dtype)
    outcome = flame(updates)
    expected = mean_by_definition(updates.double().tolist(), kept_by(outcome))
    assert outcome.update.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-36)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_median_norm_beyond_float32_is_no_error(n: int, noise: float) -> None:
    """Every value fits float32 but the norm does not: nothing may become NaN or infinite."""
    updates = 1e38 * (1 + 0.1 * randn(n, 100).clamp(-3, 3))
    outcome = flame(updates, noise=noise)
    assert outcome.update.isfinite().all()
    expected = mean_by_definition(updates.double().tolist(), kept_by(outcome))
    assert outcome.update.tolist() == pytest.approx(expected, rel=0.02 if noise else 1e-5)


def test_the_bound_is_the_median_norm_of_all_clients() -> None:
    """Rejected clients count too, whether their updates are longer or shorter."""
    start = 10 * randn(50)
    similar = randn(50, seed=1) + 0.01 * randn(5, 50, seed=2)
    for factor in (0.01, 3.0):
        updates = torch.cat([similar, factor * randn(4, 50, seed=3)])
        outcome = flame(updates, start)
        kept = kept_by(outcome)
        assert set(kept) == set(range(5))
        norms = updates.double().norm(dim=1)
        bound = float(norms.sort().values[4])
        assert float(outcome.update.double().norm()) == pytest.approx(
            min(bound, float(norms[:5].mean())), rel=1e-3
        )
        update = mean_by_definition(updates.double().tolist(), kept)
        assert outcome.update.tolist() == pytest.approx(update, rel=1e-5, abs=1e-6)


def noise_of(updates: Tensor, start: Tensor, noise: float, seed: int = 0) -> Tensor:
    exact = flame(updates, start, seed=seed)
    noisy = flame(updates, start, noise, seed=seed)
    assert kept_by(noisy) == kept_by(exact)
    assert scores_of(noisy) == scores_of(exact)
    assert noisy.update.dtype == updates.dtype
    return noisy.update.double() - exact.update.double()


@both_dtypes
@pytest.mark.parametrize("lambda_", [0.001, 0.01, 0.5])
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_noise_is_proportional_to_the_median_norm(
    scale: float, lambda_: float, dtype: torch.dtype
) -> None:
    """N(0, (lambda S)^2) on each coordinate. Norms double from client to client."""
    n_params = 50_000
    start = randn(n_params)
    lengths = scale * 2.0 ** torch.arange(6)[:, None]
    rows = randn(6, n_params, seed=1)
    updates = (lengths * rows / rows.norm(dim=1, keepdim=True)).to(dtype)
    deviation = lambda_ * scale * (4 + 8) / 2
    noise = noise_of(updates, start, lambda_) / deviation
    assert float(noise.mean()) == pytest.approx(0, abs=5 / math.sqrt(n_params))
    assert float(noise.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * n_params))
    beyond = float((noise.abs() > 2).double().mean())
    assert beyond == pytest.approx(math.erfc(math.sqrt(2)), abs=0.006)


def test_noise_depends_on_the_seed_only() -> None:
    start, updates = randn(100), randn(7, 100, seed=1)
    first = flame(updates, start, 0.1, seed=3).update
    assert torch.equal(flame(updates, start, 0.1, seed=3).update, first)
    other = flame(updates, start, 0.1, seed=4).update
    assert ((first - other).abs() > 1e-6).float().mean() > 0.9
    exact = flame(updates, start, seed=3).update
    assert torch.equal(flame(updates, start, seed=4).update, exact)


def test_no_noise_if_the_median_norm_is_zero() -> None:
    """Most clients send zeros, so S = 0."""
    updates = torch.zeros(7, 20)
    updates[:3] = randn(3, 20)
    assert flame(updates, randn(20, seed=1), noise=0.5).update.tolist() == [0] * 20


@pytest.mark.parametrize("value", [-0.001, -1.0, math.nan, math.inf, -math.inf])
def test_rejects_noise_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match=rf"^noise must be .+, got {value}$"):
        Flame(noise=value)


def test_default_noise_is_the_value_of_the_paper_for_images_and_words() -> None:
    assert Flame().noise == 0.001
    assert Flame(noise=0.0).noise == 0


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = ({"name": "flame", "noise": 0.0},)
    invalid: ClassVar[Any] = {"noise": [-0.1, math.nan, math.inf, -math.inf]}
