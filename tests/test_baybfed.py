"""baybfed: a client whose weights are unlikely under the clusters seen so far is left out."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from baybfed_oracle import Oracle, Vectorised, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView

BayBFed: Any = DEFENSES.get("baybfed")

IDS = (3, 7, 0, 42, 11, 5)  # whoever may take part
LARGEST = math.sqrt(math.log(2)) * (1 + 1e-15)  # distance of two distributions


def view_of(
    global_params: Tensor, initial: Tensor, ids: Sequence[int], index: int = 0, seed: int = 0
) -> ServerView:
    rng = torch.Generator().manual_seed(seed)
    layers = {"w": slice(0, len(initial))}
    return ServerView(index, torch.tensor(ids), global_params, initial, layers, rng)


def start(defense: Defense, initial: Tensor, concentration: Mapping[int, float]) -> Any:
    """The state before round 0, with c of each client as given."""
    state = defense.init()
    for who, c in concentration.items():
        state["posterior"][who] = (float(c), float(initial.double().mean()))
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
    """Of clients 0, 1, ..., all with c = 5 unless told otherwise."""
    defense = BayBFed(**options)
    known = same_c(len(updates)) if concentration is None else concentration
    state = start(defense, initial, known)
    view = view_of(global_params, initial, range(len(updates)))
    outcome: tuple[Aggregate, Any] = defense.aggregate(updates, state, view)
    return outcome


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


# Two models [3 4 0 0] and [1 0 0 0], and what three clients make of them.
INITIAL_1, GLOBAL_1 = doubles([0.02, -0.02, 0.02, -0.02])[0], doubles([3, 4, 0, 0])[0]
MODELS_1 = doubles([3, 4, 0.3, 0], [3.1, 4, -0.2, 0.1], [2, 4.5, 2, -2])
INITIAL_2, GLOBAL_2 = doubles([0.5, -0.5, 0.5, -0.5])[0], doubles([1, 0, 0, 0])[0]
MODELS_2 = doubles([1.1, 0.1, 0, 0], [1.1, -0.1, 0.1, 0], [0.5, 1, -1, 0.5])


def replayed(
    models: Tensor, global_params: Tensor, initial: Tensor
) -> Iterator[tuple[Aggregate, Tensor]]:
    """The same round again and again, all c at first 5: the outcome, and the clusters after it."""
    defense = BayBFed()
    state = start(defense, initial, same_c(len(models)))
    view = view_of(global_params, initial, range(len(models)))
    while True:
        outcome, state = defense.aggregate(models - global_params, state, view)
        yield outcome, state["clusters"]


def test_by_hand() -> None:
    # D 1 .755051 1.065760, m 1.075 .755051 .940760, e .09 .045 10.506553 (.045: half the median).
    # Client 0 opens (0, 9.09): z = 1/.09 + 1/9 = 11.2222, mu = 1.075/.09/z, s2 = 1/z + .09.
    updates = MODELS_1 - GLOBAL_1
    rounds = replayed(MODELS_1, GLOBAL_1, INITIAL_1)
    outcome, clusters = next(rounds)
    assert scores_of(outcome) == pytest.approx([0.005783, 0.003385, 0.028238], abs=1e-6)
    assert kept_by(outcome) == [0, 1]
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


def test_a_cold_start_keeps_the_outlier() -> None:
    """The second example, in which p is not uniform."""
    rounds = replayed(MODELS_2, GLOBAL_2, INITIAL_2)
    outcome, _ = next(rounds)
    assert scores_of(outcome) == pytest.approx([0.045926, 0.060004, 0.019613], abs=1e-6)
    assert kept_by(outcome) == [2]
    outcome, _ = next(rounds)
    assert scores_of(outcome) == pytest.approx([0.210546, 0.316316, 0.589430], abs=1e-6)
    assert kept_by(outcome) == [0, 1]


def test_two_of_a_kind() -> None:
    """The third example: the first client of the first one, and its third twice."""
    updates = MODELS_1[[0, 2, 2]] - GLOBAL_1
    outcome, _ = first_round(updates, GLOBAL_1, INITIAL_1)
    assert scores_of(outcome) == pytest.approx([0.003694, 0.028238, 0.028238], abs=1e-6)
    assert kept_by(outcome) == [0]


FAR = doubles([99.9, 100.1, 99.9, 100.1])[0]  # an initial model so far away that p is uniform


def test_divergence_of_two_known_distributions() -> None:
    """p is uniform, q a Gaussian of mean 0 and variance 1 at points where it is .4 .3 .2 .1."""
    q = doubles([0.4, 0.3, 0.2, 0.1])[0]
    deviation = 0.1
    update = (2 * (q[0] / q).log()).sqrt() - deviation
    aside = torch.linalg.qr(torch.stack([update, FAR]).T).Q[:, 1]
    global_params = 0.9 * update / update.norm() + math.sqrt(1 - 0.9**2) * aside
    sigma0_sq = 1 - (float(update.norm()) * deviation) ** 2
    for score, expected in (("divergence", 0.027865613), ("distance", 0.166929966)):
        outcome, _ = first_round(update[None], global_params, FAR, sigma0_sq=sigma0_sq, score=score)
        assert scores_of(outcome) == pytest.approx([expected], abs=1e-9)


@pytest.mark.parametrize("length", [1e-2, 1e-4, 1e-6])
def test_small_divergences_are_right(length: float) -> None:
    """Down to 1e-17: the sum of p log p - p log q has lost all digits by then."""
    direction = doubles([0.8, -0.6, 0, 0])
    outcome, _ = first_round(length * direction, GLOBAL_2, FAR, score="divergence")
    oracle = Oracle(FAR.tolist(), same_c(1), score="divergence")
    verdict = oracle.round((length * direction).tolist(), [0], GLOBAL_2.tolist())
    assert scores_of(outcome) == pytest.approx(verdict.scores, rel=1e-6, abs=0)
    assert 0 < verdict.scores[0] < length**2


def test_a_divergence_below_1e_20_is_none() -> None:
    direction = doubles([0.8, -0.6, 0, 0], [0.6, -0.8, 0, 0])
    outcome, _ = first_round(1e-9 * direction, GLOBAL_2, FAR)
    assert scores_of(outcome) == [0, 0]
    assert kept_by(outcome) == []


def test_a_cluster_by_hand() -> None:
    """Across the global model D = 1, so that m = 1 + mean and e = the sum of squares."""
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
    """Found by halving: the longer across the global model, the higher the score."""
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
        ([1, 1, 3.00001, 7], [], [0, 1, 2, 3]),  # the third is at the mean
        ([4, 4, 1, 1.5], [2, 3], [2, 3]),
        ([1, 1 + 1e-8, 4], [0, 1], [0, 1, 2]),
        ([1, 1 + 1e-10, 4], [], [0, 1, 2]),
        ([4, 4 - 1e-9, 1], [2], [2]),  # 2.5e-10 of it
        ([4, 4 - 1e-7, 1], [2], [0, 1, 2]),
    ],
)
def test_filter(wanted: list[float], text: list[int], pseudocode: list[int]) -> None:
    options: dict[str, Any] = {"sigma0_sq": 1.0, "error_floor": 0.0}
    updates = torch.stack([update_of_score(0.005 * score, options) for score in wanted])
    for words, expected in (("text", text), ("pseudocode", pseudocode)):
        outcome, _ = first_round(updates, doubles([0, 0, 0, 1])[0], FAR, filter=words, **options)
        assert [200 * s for s in scores_of(outcome)] == pytest.approx(wanted, rel=1e-11)
        assert kept_by(outcome) == expected
        total = updates[expected].mean(dim=0) if expected else torch.zeros(4).double()
        assert torch.allclose(outcome.update, total, rtol=1e-12)


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "weights": st.sampled_from(["update", "model"]),
    "cosine": st.sampled_from(["distance", "angular", "similarity"]),
    "scoring": st.sampled_from(["round", "sequential"]),
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
    """The initial model, and of each round ids in any order, updates and the global model.

    Clients come and go; some copy another, some send nothing, some shout.
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
    """Up to the first round in which rounding could turn a decision."""
    initial, rounds = federation(seed, p, n_rounds)
    initial = initial.to(dtype)
    defense = BayBFed(**options)
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
def test_a_client_whose_cluster_is_gone_opens_a_new_one(max_clusters: int, assign: str) -> None:
    """Gone in the same pass, for one that a client before it opened."""
    options = {"max_clusters": max_clusters, "assign": assign}
    for seed in range(12):
        concentration = dict.fromkeys(IDS, 5.0)
        assert_follows_the_definition(seed, 4, 4, options, concentration, torch.float64)


@pytest.mark.parametrize("p", [*range(2, 10), 61, 400])
@pytest.mark.parametrize("size", [0.3, 1e-2, 1e-4])
def test_of_equal_clusters_the_first_takes_the_client(size: float, p: int) -> None:
    """Clusters of the same mean and variance, opened by equal updates, diverge alike."""
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
def test_along_the_global_model(cosine: str) -> None:
    """Where rounding takes the cosine beyond 1."""
    for seed in range(30):
        global_params = normal(7, seed=seed)
        updates = doubles([0.1], [-0.3], [0.7], [1.1], [-1.3]) * global_params
        outcome, state = first_round(
            updates, global_params, 0.3 * normal(7, seed=100), cosine=cosine
        )
        assert all(0 <= score <= LARGEST for score in scores_of(outcome))
        assert state["clusters"].isfinite().all()


@pytest.mark.parametrize("bins", [2048, 16])
def test_order_of_coordinates_is_irrelevant(bins: int) -> None:
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


def test_scores_of_a_round_do_not_depend_on_who_comes_first() -> None:
    """Whichever id sends which update, with equal c; clusters are those of the round before."""
    p, n = 20, 6
    initial, global_params = 0.3 * normal(p, seed=1), normal(p, seed=2)
    defense = BayBFed()
    newcomers = range(10, 10 + n)
    state = start(defense, initial, dict.fromkeys([*range(n), *newcomers], 5.0))
    view = view_of(global_params, initial, range(n))
    _, state = defense.aggregate(normal(n, p, seed=4), state, view)
    updates = normal(n, p, seed=5)
    plain, _ = defense.aggregate(updates, state, view_of(global_params, initial, newcomers, 1))
    for seed in range(5):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        view = view_of(global_params, initial, newcomers, 1)
        shuffled, _ = defense.aggregate(updates[order], state, view)
        expected = [scores_of(plain)[i] for i in order.tolist()]
        assert scores_of(shuffled) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_clients_all_alike_are_all_dropped(n: int) -> None:
    updates = (MODELS_1[2] - GLOBAL_1).expand(n, -1)
    outcome, _ = first_round(updates, GLOBAL_1, INITIAL_1)
    assert scores_of(outcome) == pytest.approx([scores_of(outcome)[0]] * n, rel=1e-12)
    assert scores_of(outcome)[0] > 0
    assert kept_by(outcome) == []
    assert outcome.update.tolist() == [0] * 4
    assert outcome.weights.tolist() == [0] * n


def test_clients_alike_with_another_c_are_told_apart() -> None:
    updates = (MODELS_2[0] - GLOBAL_2).expand(3, -1)
    outcome, _ = first_round(updates, GLOBAL_2, INITIAL_2, {0: 1, 1: 5, 2: 9})
    assert len(set(scores_of(outcome))) == 3
    assert 0 < len(kept_by(outcome)) < 3


@pytest.mark.parametrize("p", [1, 4, 40])
@pytest.mark.parametrize("bins", [2048, 8])
@pytest.mark.parametrize("initial", [0.0, 1.0], ids=["constant", "random"])
def test_nothing_sent_is_no_divergence(p: int, bins: int, initial: float) -> None:
    """x is 1 everywhere, so p and q are uniform; with a constant initial model too."""
    outcome, state = first_round(
        torch.zeros(3, p).double(), normal(p, seed=1), 0.5 + initial * normal(p, seed=2), bins=bins
    )
    assert scores_of(outcome) == [0, 0, 0]
    assert kept_by(outcome) == []
    assert state["clusters"].isfinite().all()
    assert (state["clusters"][:, 1] > 0).all()


@pytest.mark.parametrize("base", [0.0, 1e3, 1e20, -1e30])
def test_p_is_uniform_whatever_the_base_measure(base: float) -> None:
    """With the initial model far away g is H at every coordinate."""
    updates = MODELS_1 - GLOBAL_1
    defense = BayBFed()
    state = defense.init()
    for who in range(3):
        state["posterior"][who] = (5.0, base)
    outcome, _ = defense.aggregate(updates, state, view_of(GLOBAL_1, FAR, range(3)))
    expected, _ = first_round(updates, GLOBAL_1, FAR)
    assert scores_of(outcome) == pytest.approx(scores_of(expected), rel=1e-9)


def test_one_client_alone_is_not_below_its_mean() -> None:
    for updates in (MODELS_1[:1] - GLOBAL_1, torch.zeros(1, 4).double()):
        outcome, _ = first_round(updates, GLOBAL_1, INITIAL_1)
        assert kept_by(outcome) == []
        assert outcome.update.tolist() == [0] * 4


# Many coordinates: the exact scores are those of every coordinate.


def heavy_tailed(n: int, p: int, seed: int) -> np.ndarray:
    """As training leaves them: a common part and each its own, a third of the weights untouched."""
    rng = np.random.default_rng(seed)
    updates = 0.004 * (rng.standard_t(3, p) + rng.standard_t(3, (n, p)))
    updates[:, rng.random(p) < 0.3] = 0
    updates[: n // 4] *= 4
    return updates


def worst_error(
    rounds: Sequence[np.ndarray], spread: float, dtype: torch.dtype, **options: Any
) -> float:
    """The largest difference of a score to the exact one. Decisions and clusters must agree."""
    rng = np.random.default_rng(99)
    n, p = rounds[0].shape
    initial = torch.tensor(spread * rng.standard_normal(p), dtype=dtype)
    global_params = torch.tensor(0.05 * rng.standard_normal(p) + 0.005, dtype=dtype)
    concentration = {i: 1.0 + rng.poisson(5) for i in range(n)}
    exact_options = {name: value for name, value in options.items() if name != "bins"}
    oracle = Vectorised(initial.tolist(), concentration, **exact_options)
    defense = BayBFed(**options)
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


@pytest.mark.parametrize("spread", [0.02, 0.5])  # p uniform, p not
@pytest.mark.parametrize("options", [{}, {"weights": "model", "cosine": "similarity"}], ids=str)
def test_many_coordinates_against_all_of_them(options: dict[str, str], spread: float) -> None:
    rounds = [heavy_tailed(8, 20_000, seed) for seed in (1, 2)]
    assert worst_error(rounds, spread, torch.float32, **options) < 5e-4


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_one_coordinate_far_beyond_all_others(spread: float) -> None:
    rounds = [heavy_tailed(8, 20_000, seed) for seed in (3, 4)]
    for rows in rounds:
        rows[5, 123] = 1e4 * np.abs(rows[5]).max()
    assert worst_error(rounds, spread, torch.float32) < 1e-3


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_two_values_far_apart(spread: float) -> None:
    rng = np.random.default_rng(0)
    rounds = [
        rng.uniform(-0.5, 0.5, (5, 1)) + (rng.random((5, 3000)) < rng.uniform(0.1, 0.9, (5, 1)))
        for _ in range(2)
    ]
    assert worst_error(rounds, spread, torch.float64) < 1e-5


@pytest.mark.parametrize("cosine", ["distance", "angular"])
def test_models_are_scored_on_every_coordinate(cosine: str) -> None:
    """There p sits on few of them."""
    rounds = [heavy_tailed(6, 2500, seed=5)]
    error = worst_error(rounds, 0.05, torch.float64, weights="model", cosine=cosine, bins=64)
    assert error < 1e-9


# The claim of the paper in miniature, and its limits.


def campaign(
    seed: int, n_malicious: int, cosine: float, norm: float, n_rounds: int = 3
) -> tuple[float, float]:
    """Shares of the malicious and of the honest clients kept, after the first round.

    Honest updates have norm 1 and cosine -.1 to the global model, each within a few percent, and a
    direction in common; malicious ones another direction and the norm and cosine given.
    """
    n, p = 20, 100
    rng = np.random.default_rng(seed)

    def across(v: np.ndarray) -> np.ndarray:
        v = v - v @ along * along
        return np.asarray(v / np.linalg.norm(v))

    initial = 0.1 * rng.standard_normal(p)
    global_params = initial + 0.1 * rng.standard_normal(p)
    along = global_params / np.linalg.norm(global_params)
    defense = BayBFed()
    state = defense.init()
    kept = np.zeros((n_rounds, n))
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
        kept[index, kept_by(outcome)] = 1
    later = kept[1:]
    return later[:, :n_malicious].sum() / max(later[:, :n_malicious].size, 1), later[
        :, n_malicious:
    ].mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("cosine", "n_malicious"), [(0.3, 4), (-0.4, 4), (-0.1, 8), (-0.4, 8)])
def test_scaled_updates_are_rejected(cosine: float, n_malicious: int, seed: int) -> None:
    malicious_kept, honest_kept = campaign(seed, n_malicious, cosine, norm=3)
    assert malicious_kept == 0
    assert honest_kept > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_without_an_attack_honest_clients_are_rejected(seed: int) -> None:
    """Someone is always above the mean."""
    _, honest_kept = campaign(seed, 0, 0, 1)
    assert 0.3 < honest_kept < 0.7


def test_an_attacker_of_honest_norm_and_cosine_is_kept_like_anyone() -> None:
    shares = [campaign(seed, 6, -0.1, 1) for seed in range(8)]
    malicious_kept, honest_kept = np.mean(shares, axis=0)
    assert malicious_kept > 0.3
    assert malicious_kept == pytest.approx(honest_kept, abs=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_an_attacker_along_the_global_model_replaces_the_honest(seed: int) -> None:
    """Of honest norm but closer to the global model than they are: less suspicious than they."""
    malicious_kept, honest_kept = campaign(seed, 4, 0.3, 1)
    assert malicious_kept == 1
    assert honest_kept < 0.1


def with_a_decoy(decoy: bool) -> list[tuple[int, int]]:
    """How many of 6 malicious and 24 honest clients each round keeps; attacks from round 3."""
    n, p = 30, 3000
    rng = torch.Generator().manual_seed(0)
    global_params = 0.05 * torch.randn(p, generator=rng) + 0.01
    initial = 0.05 * torch.randn(p, generator=rng)
    aim, other_aim = torch.randn(2, p, generator=rng)
    defense = BayBFed()
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


def test_a_sacrificed_client_lets_its_accomplices_in_and_then_keeps_the_honest_out() -> None:
    """The mean is not robust, and a long update along the global model has no error."""
    assert with_a_decoy(False)[3:] == [(0, 24)] * 4
    first, *later = with_a_decoy(True)[3:]
    assert first == (5, 24)
    assert all(honest <= 3 for _, honest in later)


@pytest.mark.parametrize("value", [1e-45, 1e-42, 1e-38, 1e30, 3e38])
@pytest.mark.parametrize("everywhere", [True, False])
def test_bins_of_the_smallest_and_largest_numbers(value: float, everywhere: bool) -> None:
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
    """c of new clients, by what it makes of H: of zeros, H = c / (c + 2) * 2. And the state."""
    defense = BayBFed(**options)
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


def test_concentration_follows_its_setting() -> None:
    found = np.array([*drawn(range(250), 0, c=50.0)[0].values()])
    assert found.mean() == pytest.approx(50, abs=4.5 * math.sqrt(50 / 250))
    assert found.var() == pytest.approx(50, rel=0.5)
    assert set(np.round([*drawn(range(250), 0, c=1e-3)[0].values()])) == {1}


def test_concentration_depends_on_seed_and_id_alone() -> None:
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
    """By id: clients change their place, one is away for a round and one comes late."""
    length, mu_p = 2, 2.0
    concentration, state = drawn([4, 1, 9, 6], seed=3)
    posterior = {who: (c + length, c / (c + length) * mu_p) for who, c in concentration.items()}
    for index, ids in enumerate([(9, 4, 6), (1, 6, 9, 4), (6, 1, 9, 4)], start=1):
        updates = normal(len(ids), length, seed=index)
        view = view_of(torch.ones(2), torch.tensor([1.0, 3.0]), ids, index, seed=50 + index)
        outcome, state = BayBFed().aggregate(updates, state, view)
        for i, who in enumerate(ids):
            c, h = posterior[who]
            h = c / (c + length) * h + float(updates[i].mean()) / c
            posterior[who] = (c + length, h)
            assert float(outcome.details["base_measure"][i]) == pytest.approx(h, rel=1e-12)


def test_nothing_is_drawn_for_clients_seen_before() -> None:
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
    """Members of a cluster are counted in it; numbers rise with age and are not used twice."""
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


@pytest.mark.parametrize("options", [{}, {"scoring": "sequential", "max_clusters": 2}])
def test_state_survives_a_checkpoint(options: dict[str, Any]) -> None:
    defense = BayBFed(**options)
    kept, restored = defense.init(), defense.init()
    for index in range(3):
        file = io.BytesIO()
        torch.save(restored, file)
        file.seek(0)
        restored = torch.load(file, weights_only=True)
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


# Hostile rows and wrong settings.


@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("bins", [2048, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scoring": "sequential"},
        {"weights": "model"},
        {"cosine": "similarity", "sigma0_sq": "auto"},
        {"cosine": "angular", "tau": "cluster"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_huge_row_is_survived(
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
        ("tau", "other"),
        ("assign", "other"),
        ("score", "other"),
        ("filter", "other"),
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
def test_wrong_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .+, got {re.escape(str(value))}$"):
        BayBFed(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("error_floor", 0.0), ("max_clusters", 1), ("c", 0.1), ("bins", 2), ("sigma0_sq", "auto")],
)
def test_settings_at_their_limits_work(name: str, value: Any) -> None:
    defense = BayBFed(**{name: value})
    view = view_of(GLOBAL_2, INITIAL_2, range(3))
    outcome, _ = defense.aggregate(MODELS_2 - GLOBAL_2, defense.init(), view)
    assert all(math.isfinite(score) for score in scores_of(outcome))
