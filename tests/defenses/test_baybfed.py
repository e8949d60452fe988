"""BayBFed: rejects clients whose weight distribution diverges from the clusters seen so far."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from baybfed_oracle import Oracle, VectorizedOracle, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.defenses._baybfed import (
    capped_mean,
    histogram_points,
    log_base_probabilities,
    outside_upper_group,
)
from fedbench.testing import DefenseContract

BayBFed: Any = DEFENSES.get("baybfed")

IDS = (3, 7, 0, 42, 11, 5)  # clients that may take part
LARGEST = math.sqrt(math.log(2)) * (1 + 1e-15)  # maximum distance of two distributions


def view_of(
    global_params: Tensor, initial: Tensor, ids: Sequence[int], index: int = 0, seed: int = 0
) -> ServerView:
    rng = torch.Generator().manual_seed(seed)
    layers = {"w": slice(0, len(initial))}
    return ServerView(index, torch.tensor(ids), global_params, initial, layers, rng)


def start(defense: Defense, initial: Tensor, concentration: Mapping[int, float]) -> Any:
    """State before round 0, with the given c of each client."""
    state = defense.init()
    for client_id, c in concentration.items():
        state["posterior"][client_id] = (float(c), float(initial.double().mean()))
    return state


def same_c(n: int, c: float = 5.0) -> dict[int, float]:
    return dict.fromkeys(range(n), c)


def first_round(
    updates: Tensor,
    global_params: Tensor,
    initial: Tensor,
    concentration: Mapping[int, float] | None = None,
    **options: Any,
) -> tuple[Aggregate, Any]:
    """First round of clients 0, 1, ..., all with c = 5 by default."""
    defense = BayBFed(**options)
    known = same_c(len(updates)) if concentration is None else concentration
    state = start(defense, initial, known)
    view = view_of(global_params, initial, range(len(updates)))
    outcome: tuple[Aggregate, Any] = defense.aggregate(updates, state, view)
    return outcome


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def scores_of(outcome: Aggregate) -> list[float]:
    assert outcome.scores is not None
    return [float(score) for score in outcome.scores]


def kept_by(outcome: Aggregate) -> list[int]:
    assert outcome.accepted is not None
    return [i for i, kept in enumerate(outcome.accepted.tolist()) if kept]


def doubles(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Two global models, [3 4 0 0] and [1 0 0 0], each with the models of three clients.
INITIAL_1, GLOBAL_1 = doubles([0.02, -0.02, 0.02, -0.02])[0], doubles([3, 4, 0, 0])[0]
MODELS_1 = doubles([3, 4, 0.3, 0], [3.1, 4, -0.2, 0.1], [2, 4.5, 2, -2])
INITIAL_2, GLOBAL_2 = doubles([0.5, -0.5, 0.5, -0.5])[0], doubles([1, 0, 0, 0])[0]
MODELS_2 = doubles([1.1, 0.1, 0, 0], [1.1, -0.1, 0.1, 0], [0.5, 1, -1, 0.5])


# Expected scores and kept rows, with c = 5 at first: of the first round by cold_start (COLD), and
# of the same round again (WARM).
BY_HAND = {
    "first": (MODELS_1, GLOBAL_1, INITIAL_1),
    "p is not uniform": (MODELS_2, GLOBAL_2, INITIAL_2),
    "two of a kind": (MODELS_1[[0, 2, 2]], GLOBAL_1, INITIAL_1),
}
COLD_BY_HAND = {
    ("first", "seat"): ([0.164232, 0.081407, 0.532290], [0, 1]),
    ("first", "score"): ([0.005783, 0.003385, 0.028238], [0, 1]),
    ("p is not uniform", "seat"): ([0.210857, 0.316160, 0.589430], [0, 1]),
    ("p is not uniform", "score"): ([0.045926, 0.060004, 0.019613], [2]),
    ("two of a kind", "seat"): ([0.003694, 0.036058, 0.036058], [0]),
    ("two of a kind", "score"): ([0.003694, 0.028238, 0.028238], [0]),
}
WARM_BY_HAND = {
    "first": ([0.164232, 0.081407, 0.532300], [0, 1]),
    "p is not uniform": ([0.210546, 0.316316, 0.589430], [0, 1]),
}


def repeated(
    models: Tensor, global_params: Tensor, initial: Tensor, **options: Any
) -> Iterator[tuple[Aggregate, Tensor]]:
    """Repeat the same round, with c = 5 at first: its outcome, and the clusters after it."""
    defense = BayBFed(**options)
    state = start(defense, initial, same_c(len(models)))
    view = view_of(global_params, initial, range(len(models)))
    while True:
        outcome, state = defense.aggregate(models - global_params, state, view)
        yield outcome, state["clusters"]


@pytest.mark.parametrize("options", [{}, {"cold_start": "seat"}, {"cold_start": "score"}], ids=str)
def test_by_hand(options: dict[str, str]) -> None:
    # D 1 .755051 1.065760, m 1.075 .755051 .940760, e .09 .045 10.506553 (.045: half the median).
    # Client 0 opens (0, 9.09): z = 1/.09 + 1/9 = 11.2222, mu = 1.075/.09/z, s2 = 1/z + .09.
    updates = MODELS_1 - GLOBAL_1
    rounds = repeated(MODELS_1, GLOBAL_1, INITIAL_1, **options)
    outcome, clusters = next(rounds)
    expected_scores, kept = COLD_BY_HAND["first", options.get("cold_start", "seat")]
    assert scores_of(outcome) == pytest.approx(expected_scores, abs=1e-6)
    assert kept_by(outcome) == kept == [0, 1]
    assert outcome.weights.tolist() == [0.5, 0.5, 0]
    assert torch.allclose(outcome.update, updates[:2].mean(dim=0), rtol=1e-12)
    assert outcome.details["cluster"].tolist() == [0, 1, 2]
    assert outcome.details["base_measure"].tolist() == pytest.approx([0.015, 0, -0.025], abs=1e-15)
    expected = doubles(
        [1.064356, 0.179109, 1, 0], [0.751295, 0.089776, 1, 1], [0.434051, 15.354102, 1, 2]
    )
    assert torch.allclose(clusters, expected, rtol=0, atol=1e-6)

    outcome, clusters = next(rounds)
    assert scores_of(outcome) == pytest.approx([0.164232, 0.081407, 0.532300], abs=1e-6)
    assert kept_by(outcome) == [0, 1]
    assert outcome.details["cluster"].tolist() == [1, 0, 0]
    expected = doubles(
        [0.677229, 13.027685, 3, 0], [1.069652, 0.134776, 2, 1], [0.434051, 15.354102, 1, 2]
    )
    assert torch.allclose(clusters, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("example", "cold_start"), COLD_BY_HAND)
def test_two_rounds_by_hand(example: str, cold_start: str) -> None:
    """Against the prior alone, the second example keeps the outlier and rejects the others."""
    models, global_params, initial = BY_HAND[example]
    rounds = repeated(models, global_params, initial, cold_start=cold_start)
    expected = [COLD_BY_HAND[example, cold_start]]
    expected += [WARM_BY_HAND[example]] if example in WARM_BY_HAND else []
    for (scores, kept), (outcome, _) in zip(expected, rounds, strict=False):
        assert scores_of(outcome) == pytest.approx(scores, abs=1e-6)
        assert kept_by(outcome) == kept


@pytest.mark.parametrize(("example", "cold_start"), COLD_BY_HAND)
def test_the_oracle_by_hand(example: str, cold_start: str) -> None:
    models, global_params, initial = BY_HAND[example]
    oracle = Oracle(initial.tolist(), same_c(3), cold_start=cold_start)
    expected = [COLD_BY_HAND[example, cold_start]]
    expected += [WARM_BY_HAND[example]] if example in WARM_BY_HAND else []
    for scores, kept in expected:
        verdict = oracle.round((models - global_params).tolist(), range(3), global_params.tolist())
        assert verdict.scores == pytest.approx(scores, abs=1e-6)
        assert verdict.kept == [i in kept for i in range(3)]
        assert not verdict.unsure


FAR = doubles([99.9, 100.1, 99.9, 100.1])[0]  # initial model, so far away that p is uniform


def test_divergence_of_two_known_distributions() -> None:
    """p is uniform; q is a standard normal at points where it is proportional to .4 .3 .2 .1."""
    q = doubles([0.4, 0.3, 0.2, 0.1])[0]
    deviation = 0.1
    update = (2 * (q[0] / q).log()).sqrt() - deviation
    aside = torch.linalg.qr(torch.stack([update, FAR]).T).Q[:, 1]
    global_params = 0.9 * update / update.norm() + math.sqrt(1 - 0.9**2) * aside
    sigma0_sq = 1 - (float(update.norm()) * deviation) ** 2
    options: dict[str, Any] = {"cold_start": "score", "sigma0_sq": sigma0_sq}
    for score, expected in (("divergence", 0.027865613), ("distance", 0.166929966)):
        outcome, _ = first_round(update[None], global_params, FAR, score=score, **options)
        assert scores_of(outcome) == pytest.approx([expected], abs=1e-9)


@pytest.mark.parametrize("length", [1e-2, 1e-4, 1e-6])
def test_small_divergences_are_accurate(length: float) -> None:
    """Down to 1e-17, where the sum of p log p - p log q has lost all digits."""
    direction = doubles([0.8, -0.6, 0, 0])
    options: dict[str, Any] = {"score": "divergence", "cold_start": "score"}
    outcome, _ = first_round(length * direction, GLOBAL_2, FAR, **options)
    oracle = Oracle(FAR.tolist(), same_c(1), **options)
    verdict = oracle.round((length * direction).tolist(), [0], GLOBAL_2.tolist())
    assert scores_of(outcome) == pytest.approx(verdict.scores, rel=1e-6, abs=0)
    assert 0 < verdict.scores[0] < length**2


def test_a_divergence_below_1e_20_is_zero() -> None:
    direction = doubles([0.8, -0.6, 0, 0], [0.6, -0.8, 0, 0])
    outcome, _ = first_round(1e-9 * direction, GLOBAL_2, FAR, cold_start="score")
    assert scores_of(outcome) == [0, 0]
    assert kept_by(outcome) == []


def test_a_cluster_by_hand() -> None:
    """Orthogonal to the global model, D = 1, m = 1 + mean and e = the sum of squares."""
    global_params = doubles([0, 0, 0, 1])[0]
    first = doubles([-0.4, math.sqrt(0.17), -math.sqrt(0.17), 0])  # m = .9, e = .5
    second = doubles([0.4, math.sqrt(0.045), -math.sqrt(0.045), 0])  # m = 1.1, e = .25
    defense = BayBFed()
    state = start(defense, FAR, same_c(2))
    _, state = defense.aggregate(first, state, view_of(global_params, FAR, [0]))
    assert state["clusters"].tolist() == [pytest.approx([0.852632, 0.973684, 1, 0], abs=1e-6)]
    _, state = defense.aggregate(second, state, view_of(global_params, FAR, [1]))
    assert state["clusters"].tolist() == [pytest.approx([1.084932, 0.373288, 2, 0], abs=1e-6)]


def update_of_score(target: float, options: Mapping[str, Any]) -> Tensor:
    """Found by bisection: orthogonal to G, the score grows with the norm."""
    short, long = 0.0, 0.8
    direction = doubles([0.8, -0.6, 0, 0])
    for _ in range(60):
        length = (short + long) / 2
        outcome, _ = first_round(length * direction, doubles([0, 0, 0, 1])[0], FAR, **options)
        short, long = (length, long) if scores_of(outcome)[0] < target else (short, length)
    return long * direction[0]


@pytest.mark.parametrize(
    ("wanted", "text", "pseudocode"),
    [
        ([1, 2, 3, 4], [0, 1], [0, 1, 2, 3]),
        ([1, 1, 3.00001, 7], [], [0, 1, 2, 3]),  # the third is just above the mean
        ([4, 4, 1, 1.5], [2, 3], [2, 3]),
        ([1, 1 + 1e-8, 4], [0, 1], [0, 1, 2]),
        ([1, 1 + 1e-10, 4], [], [0, 1, 2]),
        ([4, 4 - 1e-9, 1], [2], [2]),  # a relative difference of 2.5e-10
        ([4, 4 - 1e-7, 1], [2], [0, 1, 2]),
    ],
)
def test_filter(wanted: list[float], text: list[int], pseudocode: list[int]) -> None:
    options: dict[str, Any] = {"cold_start": "score", "sigma0_sq": 1.0, "error_floor": 0.0}
    updates = torch.stack([update_of_score(0.005 * score, options) for score in wanted])
    for option, expected in (("text", text), ("pseudocode", pseudocode)):
        outcome, _ = first_round(updates, doubles([0, 0, 0, 1])[0], FAR, filter=option, **options)
        assert [200 * s for s in scores_of(outcome)] == pytest.approx(wanted, rel=1e-11)
        assert kept_by(outcome) == expected
        mean = sum(scores_of(outcome)) / len(wanted)
        assert outcome.threshold == (pytest.approx(mean) if option == "text" else None)
        total = updates[expected].mean(dim=0) if expected else torch.zeros(4).double()
        assert torch.allclose(outcome.update, total, rtol=1e-12)


def kept_by_groups(scores: Sequence[float], separation: float, spread: float) -> list[bool]:
    """threshold=groups by its definition, trying every split."""
    logs = [math.log(max(score, 1e-10)) for score in scores]
    n, ordered = len(logs), sorted(logs)

    def squares(values: Sequence[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.fsum((value - mean) ** 2 for value in values)

    if n > 3:
        within, n_lower = min((squares(ordered[:k]) + squares(ordered[k:]), k) for k in range(1, n))
        explained = 1 - (within / (n - 3)) / (squares(ordered) / (n - 1))
        low, high = ordered[:n_lower], ordered[n_lower:]
        apart = math.fsum(high) / len(high) - math.fsum(low) / len(low)
        if explained >= separation and apart > spread:
            return [value <= ordered[n_lower - 1] for value in logs]
    if math.sqrt(squares(logs) / n) <= spread:
        return [True] * n
    return [score < math.fsum(scores) / n for score in scores]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        # Logs 0 0 0 3 3: sum of squares between groups 10.8 of 10.8. Two groups.
        ([1, 1.001, 0.999, 20, 20.001], [0, 1, 2]),
        ([1, 1.001, 0.999, 1.9, 1.901], [0, 1, 2, 3, 4]),  # log 1.9 = .64: too close for two groups
        # Logs 0 .2 .4 .6 .8 1: between .54 of .7, adjusted 1 - .23 * 5 / 3 = .62; std .34.
        (list(np.exp(np.arange(6) / 5)), [0, 1, 2, 3, 4, 5]),
        # Logs 0 1 2 3 4 5: the same, five times as wide, std 1.7. Mean e^5 (1.58) / 6 = 39.
        (list(np.exp(np.arange(6))), [0, 1, 2, 3]),
        ([1, 1.1, 50], [0, 1]),  # too few for two groups, too wide for one: below the mean
        ([1, 1.1, 1.2], [0, 1, 2]),
        ([5], [0]),
        ([0, 2e-11, 5e-11, 1e-10, 1, 1.1], [0, 1, 2, 3]),  # scores below 1e-10 count as 1e-10
    ],
)
def test_groups_by_hand(scores: list[float], kept: list[int]) -> None:
    found = outside_upper_group(doubles(scores)[0], 0.8, 0.7)
    assert found.nonzero()[:, 0].tolist() == kept
    assert kept_by_groups(scores, 0.8, 0.7) == found.tolist()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_low=st.integers(1, 20),
    n_high=st.integers(0, 20),
    apart=st.floats(0, 6),
    separation=st.floats(0.5, 0.95),
    spread=st.floats(0.1, 2),
)
def test_groups_against_the_definition(
    seed: int, n_low: int, n_high: int, apart: float, separation: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    logs = np.concatenate([rng.normal(-9, 0.5, n_low), rng.normal(-9 + apart, 0.5, n_high)])
    scores = np.exp(rng.permutation(logs))
    found = outside_upper_group(torch.tensor(scores), separation, spread)
    assert found.tolist() == kept_by_groups(scores.tolist(), separation, spread)
    scaled = outside_upper_group(torch.tensor(1000 * scores), separation, spread)
    assert torch.equal(scaled, found)  # only ratios count


def test_groups_are_formed_by_unique_scores() -> None:
    """Tied clients are rejected and do not form a group."""
    options = {"threshold": "groups", "sigma0_sq": 1.0, "error_floor": 0.0, "cold_start": "score"}
    wanted = [0.001, 0.001, 4, 4.1, 4.2, 4.3, 4.4]
    rows = [update_of_score(0.005 * score, options) for score in wanted]
    across = doubles([0, 0, 0, 1])[0]
    outcome, _ = first_round(torch.stack(rows), across, FAR, **options)
    assert kept_by(outcome) == [2, 3, 4, 5, 6]
    outcome, _ = first_round(torch.stack(rows[:2]), across, FAR, **options)
    assert kept_by(outcome) == []  # no client is left to form a group
    outcome, _ = first_round(torch.stack(rows), across, FAR, filter="pseudocode", **options)
    assert kept_by(outcome) == [2, 3, 4, 5, 6]


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "weights": st.sampled_from(["update", "model"]),
    "cosine": st.sampled_from(["distance", "angular", "similarity"]),
    "scoring": st.sampled_from(["round", "sequential"]),
    "cold_start": st.sampled_from(["seat", "score"]),
    "tau": st.sampled_from(["client", "cluster"]),
    "assign": st.sampled_from(["max", "min"]),
    "persist": st.booleans(),
    "score": st.sampled_from(["distance", "divergence"]),
    "mu0": st.sampled_from([0.0, 0.5, -1.0]),
    "sigma0_sq": st.sampled_from([9.0, 0.25, "auto"]),
    "error_floor": st.sampled_from([0.5, 0.0, 1.5]),
    "max_clusters": st.sampled_from([None, 1, 2, 5]),
    "filter": st.sampled_from(["text", "pseudocode"]),
}


def federation(seed: int, p: int, n_rounds: int) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """The initial model, and for each round ids in random order, updates and the global model.

    Clients vary between rounds; some copy another one, some send zeros, some scale their update.
    """
    rng = np.random.default_rng(seed)
    size = rng.choice([1, 0.3, 0.05])
    initial = rng.choice([1, 0.3, 0.05]) * rng.standard_normal(p)
    rounds = []
    for _ in range(n_rounds):
        ids = rng.permutation(IDS)[: rng.integers(1, len(IDS) + 1)].tolist()
        updates = size * rng.standard_normal((len(ids), p))
        updates[rng.random(len(ids)) < 0.2] *= 4
        updates[rng.random(len(ids)) < 0.1] = 0
        updates[-1] = updates[rng.integers(len(ids))]
        rounds.append((ids, torch.tensor(updates), torch.tensor(rng.standard_normal(p))))
    return torch.tensor(initial), rounds


def assert_agrees(outcome: Aggregate, state: Any, verdict: Verdict, updates: Tensor) -> None:
    scores = scores_of(outcome)
    assert scores == pytest.approx(verdict.scores, rel=1e-7, abs=1e-9)
    assert all(0 <= score <= LARGEST for score in scores)
    assert outcome.details["cluster"].tolist() == verdict.numbers
    assert outcome.details["cluster"].dtype == torch.long
    assert outcome.details["base_measure"].tolist() == pytest.approx(
        verdict.bases, rel=1e-12, abs=1e-14
    )
    assert outcome.details["base_measure"].dtype == torch.float64
    assert outcome.accepted is not None
    assert outcome.accepted.tolist() == verdict.kept
    kept = updates[outcome.accepted]
    mean = kept.double().mean(dim=0) if len(kept) else torch.zeros(updates.shape[1]).double()
    assert torch.allclose(outcome.update.double(), mean, rtol=1e-6, atol=1e-7)
    shares = [keep / max(len(kept), 1) for keep in verdict.kept]
    assert outcome.weights.tolist() == pytest.approx(shares, rel=1e-6)
    clusters = state["clusters"]
    assert (clusters[:, 1] > 0).all()
    assert clusters.tolist() == [pytest.approx(c, rel=1e-7, abs=1e-9) for c in verdict.clusters]


def assert_follows_the_definition(
    seed: int,
    p: int,
    n_rounds: int,
    options: dict[str, Any],
    concentration: dict[int, float],
    dtype: torch.dtype,
) -> None:
    """Compare up to the first round in which rounding could change a decision."""
    initial, rounds = federation(seed, p, n_rounds)
    initial = initial.to(dtype)
    defense = BayBFed(norm_range=None, score_cap=None, **options)  # as in the paper
    oracle = Oracle(initial.tolist(), concentration, **options)
    state = start(defense, initial, concentration)
    for index, (ids, updates, global_params) in enumerate(rounds):
        updates, global_params = updates.to(dtype), global_params.to(dtype)
        verdict = oracle.round(updates.tolist(), ids, global_params.tolist())
        view = view_of(global_params, initial, ids, index)
        outcome, state = defense.aggregate(updates, state, view)
        if verdict.unsure:
            return
        if not options.get("persist", True):
            verdict.clusters = [tuple(row) for row in state["clusters"].tolist()]
        assert_agrees(outcome, state, verdict, updates)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    p=st.integers(2, 12),
    n_rounds=st.integers(1, 4),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    concentration=st.one_of(
        st.just(dict.fromkeys(IDS, 5.0)), st.fixed_dictionaries(dict.fromkeys(IDS, st.floats(1, 9)))
    ),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition(
    seed: int,
    p: int,
    n_rounds: int,
    options: dict[str, Any],
    concentration: dict[int, float],
    dtype: torch.dtype,
) -> None:
    assert_follows_the_definition(seed, p, n_rounds, options, concentration, dtype)


@pytest.mark.parametrize("assign", ["max", "min"])
@pytest.mark.parametrize("max_clusters", [1, 2])
def test_a_client_opens_a_new_cluster_if_its_own_was_dropped(
    max_clusters: int, assign: str
) -> None:
    """Dropped in the same round, for a cluster that an earlier client opened."""
    options = {"max_clusters": max_clusters, "assign": assign}
    for seed in range(12):
        concentration = dict.fromkeys(IDS, 5.0)
        assert_follows_the_definition(seed, 4, 4, options, concentration, torch.float64)


@pytest.mark.parametrize("p", [*range(2, 10), 61, 400])
@pytest.mark.parametrize("size", [0.3, 1e-2, 1e-4])
def test_a_client_joins_the_oldest_of_equal_clusters(size: float, p: int) -> None:
    """Equal updates open clusters of equal mean and variance, hence of equal divergence."""
    global_params, initial = normal(p, seed=1), 0.3 * normal(p, seed=2)
    for n in range(2, 10):
        defense = BayBFed(sigma0_sq=0.25)
        state = start(defense, initial, same_c(n))
        row = size * normal(p, seed=n)
        for index, updates in enumerate([row.expand(n, -1), size * normal(n, p, seed=50 + n)]):
            view = view_of(global_params, initial, range(n), index)
            outcome, state = defense.aggregate(updates, state, view)
            if index == 0:
                assert outcome.details["cluster"].tolist() == [*range(n)]
        numbers = outcome.details["cluster"].tolist()
        assert all(number == 0 or number >= n for number in numbers), numbers


@pytest.mark.parametrize("cosine", ["distance", "angular", "similarity"])
def test_updates_parallel_to_the_global_model(cosine: str) -> None:
    """Rounding may give them a cosine above 1."""
    for seed in range(30):
        global_params = normal(7, seed=seed)
        updates = doubles([0.1], [-0.3], [0.7], [1.1], [-1.3]) * global_params
        outcome, state = first_round(
            updates, global_params, 0.3 * normal(7, seed=100), cosine=cosine
        )
        assert all(0 <= score <= LARGEST for score in scores_of(outcome))
        assert state["clusters"].isfinite().all()


@pytest.mark.parametrize("bins", [2048, 16])
def test_order_of_coordinates_has_no_effect(bins: int) -> None:
    p, n = 60, 6
    initial, global_params = 0.3 * normal(p, seed=1), normal(p, seed=2)
    order = torch.randperm(p, generator=torch.Generator().manual_seed(3))
    defense = BayBFed(bins=bins)
    plain = shuffled = start(defense, initial, same_c(n))
    for index in range(3):
        updates = normal(n, p, seed=10 + index)
        view = view_of(global_params, initial, range(n), index)
        there, plain = defense.aggregate(updates, plain, view)
        view = view_of(global_params[order], initial[order], range(n), index)
        here, shuffled = defense.aggregate(updates[:, order], shuffled, view)
        assert scores_of(here) == pytest.approx(scores_of(there), rel=0, abs=1e-12)
        assert torch.equal(here.details["cluster"], there.details["cluster"])
        assert torch.allclose(here.update, there.update[order], rtol=0, atol=1e-12)
        assert torch.allclose(shuffled["clusters"], plain["clusters"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_rounds_before", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"cold_start": "score"}, {"persist": False}, {"max_clusters": 6}], ids=str
)
def test_scores_do_not_depend_on_the_order_of_clients(
    options: dict[str, Any], n_rounds_before: int
) -> None:
    """With equal c, any assignment of updates to ids; in the first round and in a later one."""
    p, n = 20, 6
    initial, global_params = 0.3 * normal(p, seed=1), normal(p, seed=2)
    defense = BayBFed(**options)
    newcomers = range(10, 10 + n)
    state = start(defense, initial, dict.fromkeys([*range(n), *newcomers], 5.0))
    for index in range(n_rounds_before):
        view = view_of(global_params, initial, range(n), index)
        _, state = defense.aggregate(normal(n, p, seed=4), state, view)
    updates = normal(n, p, seed=5)
    view = view_of(global_params, initial, newcomers, n_rounds_before)
    plain, _ = defense.aggregate(updates, state, view)
    for seed in range(5):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        shuffled, _ = defense.aggregate(updates[order], state, view)
        expected = [scores_of(plain)[i] for i in order.tolist()]
        assert scores_of(shuffled) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scoring", ["round", "sequential"])
def test_a_random_order_is_that_of_clients_with_shuffled_ids(scoring: str) -> None:
    """With equal c. The server's generator has seed 0; only sequential scoring sees the order."""
    updates, global_params, initial, _ = cold_federation()
    n = len(updates)
    shuffled, _ = first_round(updates, global_params, initial, scoring=scoring, order="random")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert order.tolist() != [*range(n)]
    same, _ = first_round(updates[order], global_params, initial, scoring=scoring)
    expected = [scores_of(shuffled)[i] for i in order.tolist()]
    assert scores_of(same) == pytest.approx(expected, rel=1e-12)
    plain, _ = first_round(updates, global_params, initial, scoring=scoring)
    matters = scores_of(plain) != pytest.approx(scores_of(shuffled), rel=1e-6)
    assert matters is (scoring == "sequential")


# Cold start: a round that starts without clusters.


COLD: list[dict[str, Any]] = [
    {},
    {"assign": "min"},
    {"tau": "cluster", "sigma0_sq": "auto"},
    {"weights": "model", "cosine": "similarity"},
    {"score": "divergence", "error_floor": 0.0, "mu0": 0.5},
    {"max_clusters": 2},
    {"max_clusters": 1, "filter": "pseudocode"},
    {"bins": 16},
]


def cold_federation(n: int = 6, p: int = 40) -> tuple[Tensor, Tensor, Tensor, dict[int, float]]:
    """Updates, the global model, the initial model, and c by id."""
    concentration = {i: 1.0 + i for i in range(n)}
    return 0.3 * normal(n, p, seed=3), normal(p, seed=2), 0.3 * normal(p, seed=1), concentration


@pytest.mark.parametrize("options", COLD, ids=str)
def test_a_cold_start_scores_against_the_clusters_it_opens(options: dict[str, Any]) -> None:
    """Same scores as a repetition of the round with the old posteriors."""
    updates, global_params, initial, concentration = cold_federation()
    defense = BayBFed(**options)
    before = start(defense, initial, concentration)
    view = view_of(global_params, initial, range(len(updates)))
    first, after = defense.aggregate(updates, before, view)
    with_old_posteriors = {
        **after,
        "posterior": start(defense, initial, concentration)["posterior"],
    }
    again, _ = defense.aggregate(updates, with_old_posteriors, view)
    assert scores_of(first) == pytest.approx(scores_of(again), rel=1e-12)
    assert kept_by(first) == kept_by(again)


@pytest.mark.parametrize("options", COLD, ids=str)
def test_seat_changes_only_the_scores(options: dict[str, Any]) -> None:
    """Clusters, numbers and posteriors are those of a single pass; Eq. 1 is applied once."""
    updates, global_params, initial, concentration = cold_federation()
    n, p = updates.shape
    seat, after_seat = first_round(updates, global_params, initial, concentration, **options)
    score, after_score = first_round(
        updates, global_params, initial, concentration, cold_start="score", **options
    )
    assert torch.equal(seat.details["cluster"], score.details["cluster"])
    assert torch.equal(seat.details["base_measure"], score.details["base_measure"])
    assert torch.equal(after_seat["clusters"], after_score["clusters"])
    assert after_seat["opened"] == after_score["opened"] == n
    assert after_seat["posterior"] == after_score["posterior"]
    rows = updates + global_params if options.get("weights") == "model" else updates
    for i, c in concentration.items():
        h = c / (c + p) * float(initial.mean()) + float(rows[i].mean()) / c
        assert after_seat["posterior"][i] == pytest.approx((c + p, h), rel=1e-9, abs=1e-12)
    # Both variants compare with a new cluster.
    pairs = [*zip(scores_of(seat), scores_of(score), strict=True)]
    assert all(seated >= alone * (1 - 1e-12) for seated, alone in pairs)
    assert any(seated > alone * 1.01 for seated, alone in pairs)


@pytest.mark.parametrize("options", COLD, ids=str)
def test_every_client_of_a_cold_start_opens_a_cluster(options: dict[str, Any]) -> None:
    """In order of id, independent of rows; above max_clusters the oldest are dropped."""
    updates, global_params, initial, concentration = cold_federation()
    n, ids = len(updates), [4, 1, 5, 0, 2, 3]
    defense = BayBFed(**options)
    view = view_of(global_params, initial, ids)
    state = start(defense, initial, concentration)
    outcome, state = defense.aggregate(updates[ids], state, view)
    assert outcome.details["cluster"].tolist() == ids
    left = range(max(0, n - options.get("max_clusters", n)), n)
    assert state["clusters"][:, 3].tolist() == [*left]
    assert state["clusters"][:, 2].tolist() == [1] * len(left)
    unlimited = options | {"max_clusters": None}
    _, with_all = first_round(updates, global_params, initial, concentration, **unlimited)
    expected = with_all["clusters"][left.start :]
    assert torch.allclose(state["clusters"], expected, rtol=1e-9, atol=1e-12)
    in_order, _ = first_round(updates, global_params, initial, concentration, **options)
    assert scores_of(outcome) == pytest.approx([scores_of(in_order)[i] for i in ids], rel=1e-9)


@pytest.mark.parametrize("max_clusters", [None, 1, 2, 5, 6, 7])
@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("cold_start", ["seat", "score"])
def test_a_cold_start_against_the_definition(
    cold_start: str, persist: bool, max_clusters: int | None
) -> None:
    """Three rounds with any limit of clusters, in which no decision depends on rounding."""
    options = {"cold_start": cold_start, "persist": persist, "max_clusters": max_clusters}
    updates, global_params, initial, concentration = cold_federation(p=8)
    defense = BayBFed(**options)
    oracle = Oracle(initial.tolist(), concentration, **options)
    state = start(defense, initial, concentration)
    ids = [4, 1, 5, 0, 2, 3]
    for index in range(3):
        rows = (1 + index) * updates.roll(index, dims=1)
        verdict = oracle.round(rows.tolist(), ids, global_params.tolist())
        view = view_of(global_params, initial, ids, index)
        outcome, state = defense.aggregate(rows, state, view)
        assert not verdict.unsure
        assert_agrees(outcome, state, verdict, rows)


@pytest.mark.parametrize("options", COLD, ids=str)
def test_a_round_is_a_cold_start_only_without_clusters(options: dict[str, Any]) -> None:
    """Independent of its index, and also after a checkpoint."""
    updates, global_params, initial, concentration = cold_federation()
    seat, score = BayBFed(**options), BayBFed(**options, cold_start="score")
    empty = start(seat, initial, concentration)

    def scored(defense: Defense, rows: Tensor, state: Any, index: int) -> tuple[list[float], Any]:
        view = view_of(global_params, initial, range(len(rows)), index)
        outcome, state = defense.aggregate(rows, state, view)
        return scores_of(outcome), state

    first, state = scored(seat, updates, empty, 0)
    assert scored(seat, updates, empty, 7)[0] == first
    assert scored(score, updates, empty, 7)[0] != first
    for index, rows in enumerate([-updates, 2 * updates], start=1):
        resumed = through_a_file(state)
        scores, after = scored(seat, rows, state, index)
        assert scored(seat, rows, resumed, index)[0] == scores
        assert scored(seat, rows, resumed, 0)[0] == scores
        assert scored(score, rows, resumed, index)[0] == scores
        assert torch.equal(after["clusters"], scored(score, rows, state, index)[1]["clusters"])
        state = after


@pytest.mark.parametrize("cold_start", ["seat", "score"])
def test_without_persist_every_round_is_a_cold_start(cold_start: str) -> None:
    """Same scores as a first round with the current posteriors."""
    updates, global_params, initial, concentration = cold_federation()
    defense = BayBFed(persist=False, cold_start=cold_start)
    n = len(updates)
    state = start(defense, initial, concentration)
    seen = []
    for index in range(3):
        view = view_of(global_params, initial, range(n), index)
        new = {**defense.init(), "posterior": dict(state["posterior"])}
        expected, _ = defense.aggregate(updates, new, view)
        outcome, state = defense.aggregate(updates, state, view)
        assert scores_of(outcome) == scores_of(expected)
        assert kept_by(outcome) == kept_by(expected)
        assert state["clusters"][:, 2].tolist() == [1] * n
        seen.append(scores_of(outcome))
    assert seen[0] != seen[1] != seen[2]  # because H has changed


@pytest.mark.parametrize(
    "options", [{"persist": False}, {"persist": False, "cold_start": "score"}], ids=str
)
def test_without_persist_equal_rounds_have_equal_scores_if_p_is_uniform(
    options: dict[str, Any],
) -> None:
    """The posteriors, which persist, then have no effect."""
    rounds = repeated(MODELS_1, GLOBAL_1, FAR, **options)
    first, *later = [next(rounds)[0] for _ in range(4)]
    for outcome in later:
        assert scores_of(outcome) == pytest.approx(scores_of(first), rel=1e-9)
        assert kept_by(outcome) == kept_by(first)


def test_with_persist_the_second_round_has_the_scores_of_the_first_if_p_is_uniform() -> None:
    """It starts with the clusters that the first round, a cold start, was scored against."""
    rounds = repeated(MODELS_1, GLOBAL_1, FAR)
    first, second = next(rounds)[0], next(rounds)[0]
    assert scores_of(second) == pytest.approx(scores_of(first), rel=1e-9)
    assert kept_by(second) == kept_by(first)


@pytest.mark.parametrize("options", [{}, {"persist": False}, {"max_clusters": 1}], ids=str)
def test_cold_start_has_no_effect_on_sequential_scoring(options: dict[str, Any]) -> None:
    """Algorithm 1 always assigns its first client before scoring it."""
    updates, global_params, initial, concentration = cold_federation()
    seat, score = (
        BayBFed(scoring="sequential", cold_start=cold_start, **options)
        for cold_start in ("seat", "score")
    )
    state = other_state = start(seat, initial, concentration)
    for index in range(3):
        view = view_of(global_params, initial, range(len(updates)), index)
        outcome, state = seat.aggregate(updates, state, view)
        other, other_state = score.aggregate(updates, other_state, view)
        assert scores_of(outcome) == scores_of(other)
        assert torch.equal(outcome.details["cluster"], other.details["cluster"])
        assert torch.equal(state["clusters"], other_state["clusters"])
        assert state["posterior"] == other_state["posterior"]


def test_a_cold_start_of_one_client_rejects_it() -> None:
    """It is scored against its own cluster and a new one, and its score is the mean."""
    update = MODELS_1[:1] - GLOBAL_1
    rounds = repeated(MODELS_1[:1], GLOBAL_1, INITIAL_1, persist=False)
    oracle = Oracle(INITIAL_1.tolist(), same_c(1), persist=False)
    for _ in range(3):
        outcome, clusters = next(rounds)
        verdict = oracle.round(update.tolist(), [0], GLOBAL_1.tolist())
        assert scores_of(outcome) == pytest.approx(verdict.scores, rel=1e-9)
        assert scores_of(outcome)[0] > 0
        assert kept_by(outcome) == []
        assert outcome.update.tolist() == [0] * 4
        assert len(clusters) == 1


@pytest.mark.parametrize("error_floor", [0.5, 0.0])
@pytest.mark.parametrize(("n_zeros", "kept"), [(1, True), (2, False)])
def test_a_cold_start_with_clients_that_send_zeros(
    n_zeros: int, kept: bool, error_floor: float
) -> None:
    """p and q are uniform over a constant x, so the score is 0. One such client is kept, two tie.

    Without a floor their clusters are spikes, and all other clients have high scores.
    """
    updates, global_params, initial, _ = cold_federation()
    updates[:n_zeros] = 0
    outcome, state = first_round(
        updates, global_params, initial, error_floor=error_floor, norm_range=None
    )
    scores = scores_of(outcome)
    assert scores[:n_zeros] == [0] * n_zeros
    assert all(0 < score <= LARGEST for score in scores[n_zeros:])
    assert [i in kept_by(outcome) for i in range(n_zeros)] == [kept] * n_zeros
    assert outcome.update.isfinite().all()
    assert state["clusters"].isfinite().all()
    assert (state["clusters"][:, 1] > 0).all()
    if error_floor == 0:
        assert min(scores[n_zeros:]) > 0.75


@pytest.mark.parametrize("options", [{}, {"error_floor": 0.0}, {"weights": "model"}], ids=str)
@pytest.mark.parametrize("bins", [2048, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "hostile", ["huge", "along", "against", "one coordinate", "tiny", "global model of zeros"]
)
def test_a_cold_start_survives_hostile_rows(
    hostile: str, dtype: torch.dtype, bins: int, options: dict[str, Any]
) -> None:
    """In two rounds, without keeping clusters between them."""
    updates, global_params, initial, _ = cold_federation()
    if hostile == "huge":
        updates[2] = 3e38 * updates[2].sign()
    elif hostile in ("along", "against"):
        updates[2] = (1e6 if hostile == "along" else -1e6) * global_params
    elif hostile == "one coordinate":
        updates[2, 7] = 3e38
    elif hostile == "tiny":
        updates[2] = 1e-38
    else:
        global_params = torch.zeros_like(global_params)
    defense = BayBFed(norm_range=None, persist=False, bins=bins, **options)
    state = defense.init()
    for index in range(2):
        view = view_of(global_params.to(dtype), initial.to(dtype), range(len(updates)), index)
        outcome, state = defense.aggregate(updates.to(dtype), state, view)
        assert all(0 <= score <= LARGEST for score in scores_of(outcome))
        assert len(kept_by(outcome)) < len(updates)
        assert outcome.update.isfinite().all()
        assert outcome.details["base_measure"].isfinite().all()
        assert state["clusters"].isfinite().all()
        assert (state["clusters"][:, 1] > 0).all()
        assert len(state["clusters"]) == len(updates)


@pytest.mark.parametrize("n", [2, 3, 10])
@pytest.mark.parametrize("options", [{}, {"cold_start": "score"}, {"max_clusters": 2}], ids=str)
def test_rejects_all_identical_clients(options: dict[str, Any], n: int) -> None:
    """In a cold start and in the next round."""
    rounds = repeated(MODELS_1[2].expand(n, -1), GLOBAL_1, INITIAL_1, **options)
    for _ in range(2):
        outcome, clusters = next(rounds)
        assert scores_of(outcome) == pytest.approx([scores_of(outcome)[0]] * n, rel=1e-12)
        assert 0 < scores_of(outcome)[0] <= LARGEST
        assert kept_by(outcome) == []
        assert outcome.update.tolist() == [0] * 4
        assert outcome.weights.tolist() == [0] * n
        assert clusters.isfinite().all()


def test_identical_clients_with_different_c_have_different_scores() -> None:
    updates = (MODELS_2[0] - GLOBAL_2).expand(3, -1)
    outcome, _ = first_round(updates, GLOBAL_2, INITIAL_2, {0: 1, 1: 5, 2: 9})
    assert len(set(scores_of(outcome))) == 3
    assert 0 < len(kept_by(outcome)) < 3


@pytest.mark.parametrize("p", [1, 4, 40])
@pytest.mark.parametrize("bins", [2048, 8])
@pytest.mark.parametrize("initial", [0.0, 1.0], ids=["constant", "random"])
def test_zero_updates_have_no_divergence(p: int, bins: int, initial: float) -> None:
    """x is 1 everywhere, so p and q are uniform, even with a constant initial model."""
    outcome, state = first_round(
        torch.zeros(3, p).double(), normal(p, seed=1), 0.5 + initial * normal(p, seed=2), bins=bins
    )
    assert scores_of(outcome) == [0, 0, 0]
    assert kept_by(outcome) == []
    assert state["clusters"].isfinite().all()
    assert (state["clusters"][:, 1] > 0).all()


@pytest.mark.parametrize("base", [0.0, 1e3, 1e20, -1e30])
def test_the_base_measure_does_not_affect_a_uniform_p(base: float) -> None:
    """With a distant initial model, g is H at every coordinate."""
    updates = MODELS_1 - GLOBAL_1
    defense = BayBFed()
    state = defense.init()
    for client_id in range(3):
        state["posterior"][client_id] = (5.0, base)
    outcome, _ = defense.aggregate(updates, state, view_of(GLOBAL_1, FAR, range(3)))
    expected, _ = first_round(updates, GLOBAL_1, FAR)
    assert scores_of(outcome) == pytest.approx(scores_of(expected), rel=1e-9)


def test_rejects_a_single_client() -> None:
    for updates in (MODELS_1[:1] - GLOBAL_1, torch.zeros(1, 4).double()):
        outcome, _ = first_round(updates, GLOBAL_1, INITIAL_1)
        assert kept_by(outcome) == []
        assert outcome.update.tolist() == [0] * 4


# Many coordinates: histograms against the exact scores.


def heavy_tailed(n: int, p: int, seed: int) -> np.ndarray:
    """Like trained updates: a common and an individual part, and 30 % of the weights unchanged."""
    rng = np.random.default_rng(seed)
    updates = 0.004 * (rng.standard_t(3, p) + rng.standard_t(3, (n, p)))
    updates[:, rng.random(p) < 0.3] = 0
    updates[: n // 4] *= 4
    return updates


def worst_error(
    rounds: Sequence[np.ndarray], spread: float, dtype: torch.dtype, **options: Any
) -> float:
    """Largest error of a score. Decisions and clusters must agree exactly."""
    rng = np.random.default_rng(99)
    n, p = rounds[0].shape
    initial = torch.tensor(spread * rng.standard_normal(p), dtype=dtype)
    global_params = torch.tensor(0.05 * rng.standard_normal(p) + 0.005, dtype=dtype)
    concentration = {i: 1.0 + rng.poisson(5) for i in range(n)}
    exact_options = {name: value for name, value in options.items() if name != "bins"}
    oracle = VectorizedOracle(initial.tolist(), concentration, **exact_options)
    defense = BayBFed(norm_range=None, score_cap=None, **options)  # as in the paper
    state = start(defense, initial, concentration)
    errors = []
    for index, rows in enumerate(rounds):
        updates = torch.tensor(rows, dtype=dtype)
        verdict = oracle.round(updates.double().numpy(), range(n), global_params.double().numpy())
        view = view_of(global_params, initial, range(n), index)
        outcome, state = defense.aggregate(updates, state, view)
        assert not verdict.unsure
        assert kept_by(outcome) == [i for i, kept in enumerate(verdict.kept) if kept]
        assert outcome.details["cluster"].tolist() == verdict.numbers
        errors += [abs(a - b) for a, b in zip(scores_of(outcome), verdict.scores, strict=True)]
    return max(errors)


@pytest.mark.parametrize("spread", [0.02, 0.5])  # p uniform, p not uniform
@pytest.mark.parametrize("options", [{}, {"weights": "model", "cosine": "similarity"}], ids=str)
def test_histograms_of_many_coordinates(options: dict[str, str], spread: float) -> None:
    rounds = [heavy_tailed(8, 20_000, seed) for seed in (1, 2)]
    assert worst_error(rounds, spread, torch.float32, **options) < 5e-4


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_histograms_with_one_huge_coordinate(spread: float) -> None:
    rounds = [heavy_tailed(8, 20_000, seed) for seed in (3, 4)]
    for rows in rounds:
        rows[5, 123] = 1e4 * np.abs(rows[5]).max()
    assert worst_error(rounds, spread, torch.float32) < 1e-3


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_histograms_of_two_distant_values(spread: float) -> None:
    rng = np.random.default_rng(0)
    rounds = [
        rng.uniform(-0.5, 0.5, (5, 1)) + (rng.random((5, 3000)) < rng.uniform(0.1, 0.9, (5, 1)))
        for _ in range(2)
    ]
    assert worst_error(rounds, spread, torch.float64) < 1e-5


@pytest.mark.parametrize("cold_start", ["seat", "score"])
@pytest.mark.parametrize("cosine", ["distance", "angular"])
def test_models_are_scored_on_every_coordinate(cosine: str, cold_start: str) -> None:
    """Because p sits on few of them."""
    rounds = [heavy_tailed(6, 2500, seed=5)]
    options = {"weights": "model", "cosine": cosine, "cold_start": cold_start, "bins": 64}
    assert worst_error(rounds, 0.05, torch.float64, **options) < 1e-9


# The paper's claim in miniature, and its limits.


def campaign(
    seed: int, n_malicious: int, cosine: float, norm: float, n_rounds: int = 3, **options: Any
) -> list[Aggregate]:
    """Outcomes of rounds with malicious clients first; round 0 is a cold start.

    Honest updates have norm 1 and cosine -.1 to the global model, both within a few percent, and a
    common direction. Malicious updates have another direction and the given norm and cosine.
    """
    n, p = 20, 100
    rng = np.random.default_rng(seed)

    def across(v: np.ndarray) -> np.ndarray:
        v = v - v @ along * along
        return np.asarray(v / np.linalg.norm(v))

    initial = 0.1 * rng.standard_normal(p)
    global_params = initial + 0.1 * rng.standard_normal(p)
    along = global_params / np.linalg.norm(global_params)
    defense = BayBFed(**options)
    state, outcomes = defense.init(), []
    for index in range(n_rounds):
        aims = [across(rng.standard_normal(p)) for _ in range(2)]
        rows = []
        for i in range(n):
            malicious = i < n_malicious
            cos = (cosine if malicious else -0.1) + 0.02 * rng.standard_normal()
            length = (norm if malicious else 1) * (1 + 0.03 * rng.standard_normal())
            side = across(aims[malicious] + 0.3 * across(rng.standard_normal(p)))
            rows.append(length * (cos * along + math.sqrt(1 - cos**2) * side))
        updates = torch.tensor(np.stack(rows), dtype=torch.float32)
        view = view_of(
            torch.tensor(global_params), torch.tensor(initial), range(n), index, 10 * seed + index
        )
        outcome, state = defense.aggregate(updates, state, view)
        outcomes.append(outcome)
    return outcomes


def kept_shares(outcomes: Sequence[Aggregate], n_malicious: int) -> tuple[float, float]:
    """Share of malicious and of honest clients that were kept, over all rounds."""
    kept = np.array([outcome.accepted for outcome in outcomes])  # [rounds, N]
    malicious, honest = kept[:, :n_malicious], kept[:, n_malicious:]
    return malicious.sum() / max(malicious.size, 1), honest.mean()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("cosine", "n_malicious"), [(0.3, 4), (-0.1, 4), (-0.4, 4), (0.3, 6), (-0.4, 8)]
)
def test_rejects_scaled_updates(cosine: float, n_malicious: int, seed: int) -> None:
    """From the first round on."""
    outcomes = campaign(seed, n_malicious, cosine, norm=3)
    assert kept_shares(outcomes, n_malicious) == (0, 1)


def test_some_of_many_attackers_are_below_the_mean() -> None:
    """8 of 20, with the honest cosine: all score above honest clients, some below the mean."""
    outcomes = [outcome for seed in range(8) for outcome in campaign(seed, 8, -0.1, norm=3)]
    for outcome in outcomes:
        scores = scores_of(outcome)
        assert min(scores[:8]) > max(scores[8:])
    malicious_kept, honest_kept = kept_shares(outcomes, 8)
    assert 0 < malicious_kept < 0.05
    assert honest_kept == 1


def test_groups_reject_all_attackers_where_the_mean_does_not() -> None:
    for seed in range(8):
        assert kept_shares(campaign(seed, 8, -0.1, 3, threshold="groups"), 8) == (0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_groups_keep_all_clients_without_an_attack(seed: int) -> None:
    assert kept_shares(campaign(seed, 0, 0, 1, threshold="groups"), 0) == (0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_rejects_honest_clients_without_an_attack(seed: int) -> None:
    """Some scores are always above the mean."""
    _, honest_kept = kept_shares(campaign(seed, 0, 0, 1), 0)
    assert 0.3 < honest_kept < 0.7


def test_keeps_attackers_with_honest_norm_and_cosine_as_often_as_honest_clients() -> None:
    outcomes = [outcome for seed in range(8) for outcome in campaign(seed, 6, -0.1, 1)]
    malicious_kept, honest_kept = kept_shares(outcomes, 6)
    assert malicious_kept > 0.3
    assert malicious_kept == pytest.approx(honest_kept, abs=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_keeps_attackers_close_to_the_global_model_instead_of_honest_clients(seed: int) -> None:
    """With an honest norm and a larger cosine to G, attackers have the lowest scores."""
    malicious_kept, honest_kept = kept_shares(campaign(seed, 4, 0.3, 1), 4)
    assert malicious_kept == 1
    assert honest_kept < 0.1


def with_a_decoy(decoy: bool, **options: Any) -> list[tuple[int, int]]:
    """Number of the 6 malicious and 24 honest clients kept in each round; attack from round 3."""
    n, p = 30, 3000
    rng = torch.Generator().manual_seed(0)
    global_params = 0.05 * torch.randn(p, generator=rng) + 0.01
    initial = 0.05 * torch.randn(p, generator=rng)
    aim, other_aim = torch.randn(2, p, generator=rng)
    defense = BayBFed(**options)
    state, kept = defense.init(), []
    for index in range(7):
        updates = 0.01 * (0.5 * aim + torch.randn(n, p, generator=rng))
        if index >= 3:
            updates[:6] = 0.05 * (other_aim + 0.2 * torch.randn(6, p, generator=rng))
            updates[0] = 1e6 * global_params if decoy else updates[0]
        view = view_of(global_params, initial, range(n), index, index)
        outcome, state = defense.aggregate(updates, state, view)
        rows = kept_by(outcome)
        kept.append((sum(row < 6 for row in rows), sum(row >= 6 for row in rows)))
    return kept


@pytest.mark.parametrize("threshold", ["mean", "groups"])
def test_a_decoy_admits_its_accomplices_and_then_excludes_honest_clients(threshold: str) -> None:
    """In the paper's rule. It raises the mean; parallel to G it has no error: a spike."""
    literal: dict[str, Any] = {"threshold": threshold, "norm_range": None, "score_cap": None}
    assert with_a_decoy(False, **literal)[3:] == [(0, 24)] * 4
    first, *later = with_a_decoy(True, **literal)[3:]
    assert first == (5, 24)
    assert all(honest <= 4 for _, honest in later)


@pytest.mark.parametrize("threshold", ["mean", "groups"])
def test_a_decoy_has_no_effect_out_of_the_range_of_norms(threshold: str) -> None:
    assert with_a_decoy(True, threshold=threshold)[3:] == [(0, 24)] * 4


@pytest.mark.parametrize("value", [1e-45, 1e-42, 1e-38, 1e30, 3e38])
@pytest.mark.parametrize("everywhere", [True, False])
def test_histograms_of_the_smallest_and_largest_numbers(value: float, everywhere: bool) -> None:
    updates = 0.1 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    updates[2] = 0
    updates[2, None if everywhere else 7] = value
    global_params, initial = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    scores = {}
    for bins in (2048, 5000):
        defense = BayBFed(bins=bins)
        view = view_of(global_params, initial, range(6))
        outcome, _ = defense.aggregate(updates, start(defense, initial, same_c(6)), view)
        scores[bins] = scores_of(outcome)
    assert scores[2048] == pytest.approx(scores[5000], abs=1e-4)


# Concentration and base measure.


def drawn(ids: Sequence[int], seed: int, **options: Any) -> tuple[dict[int, float], Any]:
    """c of new clients, inferred from H = c / (c + 2) * 2 for zero updates, and the state."""
    defense = BayBFed(cold_start="score", **options)  # faster with hundreds of clients
    initial = torch.tensor([1.0, 3.0])
    view = view_of(torch.ones(2), initial, ids, seed=seed)
    outcome, state = defense.aggregate(torch.zeros(len(ids), 2), defense.init(), view)
    h = outcome.details["base_measure"]
    return dict(zip(ids, (2 * h / (2 - h)).tolist(), strict=True)), state


def test_concentration_is_poisson_and_at_least_one() -> None:
    found = np.array([c for seed in range(8) for c in drawn(range(250), seed)[0].values()])
    whole = found.round()
    assert found == pytest.approx(whole, rel=1e-9)
    assert whole.min() == 1
    for k in range(1, 13):
        share = math.exp(-5) * 5**k / math.factorial(k) + (math.exp(-5) if k == 1 else 0)
        tolerance = 4.5 * math.sqrt(share * (1 - share) / len(whole))
        assert (whole == k).mean() == pytest.approx(share, abs=tolerance)


def test_concentration_follows_the_setting() -> None:
    found = np.array([*drawn(range(250), 0, c=50.0)[0].values()])
    assert found.mean() == pytest.approx(50, abs=4.5 * math.sqrt(50 / 250))
    assert found.var() == pytest.approx(50, rel=0.5)
    assert set(np.round([*drawn(range(250), 0, c=1e-3)[0].values()])) == {1}


def test_concentration_depends_only_on_seed_and_id() -> None:
    ids = [3, 7, 0, 42, 11, 5, 100, 2]
    first = drawn(ids, 1)[0]
    torch.manual_seed(123)
    np.random.seed(123)
    assert drawn(ids, 1)[0] == first
    assert drawn(sorted(ids), 1)[0] == first
    assert drawn(ids[::-1], 1)[0] == first
    assert drawn(ids, 2)[0] != first
    assert len(set(first.values())) > 1


def test_base_measure_follows_equation_1() -> None:
    """By id: clients change rows, and one misses a round."""
    length, mu_p = 2, 2.0
    concentration, state = drawn([4, 1, 9, 6], seed=3)
    posterior = {i: (c + length, c / (c + length) * mu_p) for i, c in concentration.items()}
    for index, ids in enumerate([(9, 4, 6), (1, 6, 9, 4), (6, 1, 9, 4)], start=1):
        updates = normal(len(ids), length, seed=index)
        view = view_of(torch.ones(2), torch.tensor([1.0, 3.0]), ids, index, seed=50 + index)
        outcome, state = BayBFed().aggregate(updates, state, view)
        for row, i in enumerate(ids):
            c, h = posterior[i]
            h = c / (c + length) * h + float(updates[row].mean()) / c
            posterior[i] = (c + length, h)
            assert float(outcome.details["base_measure"][row]) == pytest.approx(h, rel=1e-12)


def test_draws_nothing_for_known_clients() -> None:
    ids = [4, 1, 9, 6]
    _, state = drawn(ids, seed=3)
    updates = normal(4, 2, seed=0)
    outcomes = []
    for seed in (5, 6):
        view = view_of(torch.ones(2), torch.tensor([1.0, 3.0]), ids, 1, seed)
        before = view.rng.get_state()
        outcomes.append(BayBFed().aggregate(updates, state, view)[0])
        assert torch.equal(view.rng.get_state(), before)
    assert torch.equal(outcomes[0].details["base_measure"], outcomes[1].details["base_measure"])
    assert scores_of(outcomes[0]) == scores_of(outcomes[1])


@pytest.mark.parametrize("scoring", ["round", "sequential"])
@pytest.mark.parametrize("max_clusters", [None, 3])
def test_a_cluster_keeps_its_number(scoring: str, max_clusters: int | None) -> None:
    """n counts the members; numbers grow with each new cluster and are not reused."""
    p, n = 12, 5
    initial, global_params = 0.5 * normal(p, seed=1), normal(p, seed=2)
    defense = BayBFed(scoring=scoring, max_clusters=max_clusters)
    state = start(defense, initial, same_c(n))
    joined: list[int] = []
    for index in range(6):
        updates = (1 + index % 3) * normal(n, p, seed=10 + index)
        view = view_of(global_params, initial, range(n), index)
        outcome, state = defense.aggregate(updates, state, view)
        joined += outcome.details["cluster"].tolist()
        assert set(joined) == set(range(max(joined) + 1))
        numbers = state["clusters"][:, 3].long().tolist()
        assert numbers == sorted(set(numbers))
        assert state["clusters"][:, 2].tolist() == [joined.count(number) for number in numbers]
        newest = list(range(max(joined) + 1))
        assert numbers == (newest if max_clusters is None else newest[-max_clusters:])


@pytest.mark.parametrize(
    "options",
    [{}, {"cold_start": "score"}, {"persist": False}, {"scoring": "sequential", "max_clusters": 2}],
    ids=str,
)
def test_state_survives_a_checkpoint(options: dict[str, Any]) -> None:
    defense = BayBFed(**options)
    kept, restored = defense.init(), defense.init()
    for index in range(3):
        restored = through_a_file(restored)
        updates = normal(3, 4, seed=index)
        there, kept = defense.aggregate(
            updates, kept, view_of(GLOBAL_2, INITIAL_2, [5, index, 9], index, index)
        )
        back, restored = defense.aggregate(
            updates, restored, view_of(GLOBAL_2, INITIAL_2, [5, index, 9], index, index)
        )
        assert scores_of(back) == scores_of(there)
        assert torch.equal(back.details["base_measure"], there.details["base_measure"])
        assert torch.equal(back.details["cluster"], there.details["cluster"])
        assert torch.equal(restored["clusters"], kept["clusters"])


# Hostile rows and invalid settings.


@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("bins", [2048, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cold_start": "score"},
        {"scoring": "sequential"},
        {"weights": "model"},
        {"cosine": "similarity", "sigma0_sq": "auto"},
        {"cosine": "angular", "tau": "cluster"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_survives_a_huge_row(
    size: float, bins: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    p, n = 60, 6
    initial, global_params = 0.3 * normal(p, seed=1).to(dtype), normal(p, seed=2).to(dtype)
    defense = BayBFed(bins=bins, **options)
    state = defense.init()
    for index in range(3):
        updates = 0.1 * normal(n, p, seed=10 + index)
        if index == 0:
            updates[2] = size * updates[2].sign()
        view = view_of(global_params, initial, range(n), index, index)
        outcome, state = defense.aggregate(updates.to(dtype), state, view)
        assert outcome.update.isfinite().all()
        assert all(0 <= score <= LARGEST for score in scores_of(outcome))
        assert outcome.details["base_measure"].isfinite().all()
        assert state["clusters"].isfinite().all()
        assert (state["clusters"][:, 1] > 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "other"),
        ("cosine", "other"),
        ("scoring", "other"),
        ("cold_start", "other"),
        ("tau", "other"),
        ("assign", "other"),
        ("score", "other"),
        ("filter", "other"),
        ("threshold", "other"),
        ("separation", 0.0),
        ("separation", 1.0),
        ("separation", math.nan),
        ("spread", -0.1),
        ("spread", math.nan),
        ("spread", math.inf),
        ("sigma0_sq", "other"),
        ("sigma0_sq", 0.0),
        ("sigma0_sq", -9.0),
        ("sigma0_sq", math.nan),
        ("sigma0_sq", math.inf),
        ("mu0", math.nan),
        ("mu0", -math.inf),
        ("error_floor", -0.1),
        ("error_floor", math.nan),
        ("error_floor", math.inf),
        ("max_clusters", 0),
        ("max_clusters", -1),
        ("c", 0.0),
        ("c", -5.0),
        ("c", math.nan),
        ("c", math.inf),
        ("bins", 1),
        ("bins", 0),
    ],
)
def test_rejects_invalid_settings(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .+, got {re.escape(str(value))}$"):
        BayBFed(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("error_floor", 0.0),
        ("max_clusters", 1),
        ("c", 0.1),
        ("bins", 2),
        ("sigma0_sq", "auto"),
        ("spread", 0.0),
        ("threshold", "groups"),
    ],
)
def test_accepts_settings_at_their_limits(name: str, value: Any) -> None:
    defense = BayBFed(**{name: value})
    view = view_of(GLOBAL_2, INITIAL_2, range(3))
    outcome, _ = defense.aggregate(MODELS_2 - GLOBAL_2, defense.init(), view)
    assert all(math.isfinite(score) for score in scores_of(outcome))


@pytest.mark.parametrize("factor", [0, 1e-30, 1e-9, 1e-4, 1e4, 1e9])
def test_rejects_updates_of_another_order_unjudged(factor: float) -> None:
    """Two of eight: the others are judged as if they were alone."""
    updates, global_params, initial, concentration = cold_federation(n=8)
    updates[:2] *= factor
    outcome, state = first_round(updates, global_params, initial, concentration)
    alone, expected = first_round(updates[2:], global_params, initial, dict(concentration))
    assert outcome.accepted is not None
    assert not outcome.accepted[:2].any()
    assert scores_of(outcome)[:2] == [math.sqrt(math.log(2))] * 2
    assert outcome.details["cluster"].tolist() == [-1, -1, *range(6)]
    assert len(state["clusters"]) == len(expected["clusters"]) == 6
    assert 0 < len(kept_by(outcome)) < 6
    counted = scores_of(outcome)[2:]
    assert outcome.threshold == pytest.approx(sum(counted) / 6)
    assert len(kept_by(alone)) > 0


def test_norm_range_and_score_cap_can_be_switched_off() -> None:
    updates, global_params, initial, concentration = cold_federation(n=8)
    updates[:2] = 0
    options: dict[str, Any] = {"norm_range": None, "score_cap": None}
    outcome, _ = first_round(updates, global_params, initial, concentration, **options)
    assert scores_of(outcome)[:2] == [0, 0]
    assert outcome.threshold == pytest.approx(sum(scores_of(outcome)) / 8)


def test_a_score_counts_in_the_mean_as_at_most_a_hundred_medians() -> None:
    scores = doubles([1, 2, 3, 1e6])[0]  # median 2.5
    assert capped_mean(scores, 100) == pytest.approx((1 + 2 + 3 + 250) / 4)
    assert capped_mean(scores, None) == pytest.approx((6 + 1e6) / 4)


@pytest.mark.parametrize("base", [0.0, 1e3, -1e14, 1e16, -1e18])
def test_a_large_base_measure_loses_no_digits(base: float) -> None:
    """Against ln N(f + H; 1, v), normalized, in exact fractions up to the exponential."""
    density, variance = [0.0, 0.5, 2.0, 2.25], max(abs(base), 1.0) * 4
    squares = [(Fraction(f) + Fraction(base) - 1) ** 2 / (2 * Fraction(variance)) for f in density]
    expected = [float(min(squares) - square) for square in squares]
    total = math.log(math.fsum(map(math.exp, expected)))
    found = log_base_probabilities(doubles(density)[0], base, variance, torch.zeros(4).double())
    assert found.tolist() == pytest.approx([e - total for e in expected], rel=1e-12)


def test_coordinates_in_the_tails_are_not_binned() -> None:
    values = torch.cat([torch.full((5000,), 0.1), torch.tensor([7.3, -9.1])])
    points = histogram_points(values, 2048, 1.0)
    assert points.x.tolist()[-2:] == values.double().tolist()[-2:]
    assert points.log_counts.exp().sum() == pytest.approx(5002)


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = (
        {"name": "baybfed", "weights": "model"},
        {"name": "baybfed", "scoring": "sequential", "max_clusters": 2},
        {"name": "baybfed", "cosine": "angular", "tau": "cluster", "assign": "min"},
        {"name": "baybfed", "cosine": "similarity", "sigma0_sq": "auto", "persist": False},
        {"name": "baybfed", "filter": "pseudocode", "score": "divergence", "bins": 16},
        {"name": "baybfed", "weights": "model", "scoring": "sequential", "error_floor": 0.0},
        {"name": "baybfed", "cold_start": "score"},
        {"name": "baybfed", "threshold": "groups"},
    )
    checks = ("warning", "memory", "checkpoint", "later_rounds")
    invalid: ClassVar[Any] = {
        "weights": ["updates", ""],
        "cosine": ["sine", ""],
        "scoring": ["rounds", ""],
        "cold_start": ["stand", ""],
        "tau": ["server", ""],
        "assign": ["mean", ""],
        "persist": ["sometimes"],
        "score": ["loss", ""],
        "mu0": [math.nan, math.inf, -math.inf],
        "sigma0_sq": [0.0, -9.0, "best", math.nan, math.inf, -math.inf],
        "error_floor": [-0.5, math.nan, math.inf, -math.inf],
        "max_clusters": [0, -1],
        "filter": ["none", ""],
        "threshold": ["median", ""],
        "norm_range": [1.0, 0.0, -1000.0, math.nan, math.inf, -math.inf],
        "score_cap": [1.0, 0.0, -100.0, math.nan, math.inf, -math.inf],
        "separation": [0.0, 1.0, math.nan, math.inf, -math.inf],
        "spread": [-0.1, math.nan, math.inf, -math.inf],
        "c": [0.0, -5.0, math.nan, math.inf, -math.inf],
        "bins": [0, -1],
    }
