"""Auror: clients in the minority cluster of most indicative features are malicious."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rounds import ONE_LAYER, accepted_by, scores_of, view_of
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense
from fedbench.testing import DefenseContract

Auror: Any = DEFENSES.get("auror")
Round = tuple[int, Sequence[int], Tensor]  # index, ids [N] and updates [N, P]


def play(
    defense: Defense, rounds: Iterable[Round], layers: Mapping[str, slice] = ONE_LAYER
) -> list[Aggregate]:
    state, outcomes = defense.init(), []
    for index, ids, updates in rounds:
        view = view_of(ids, updates, index, layers)
        outcome, state = defense.aggregate(updates, state, view)
        outcomes.append(outcome)
    return outcomes


def auror(updates: Tensor, alpha: float, **hyper: Any) -> Aggregate:
    return play(Auror(alpha, **hyper), in_turn(updates))[0]


def in_turn(*rounds: Tensor, start: int = 0) -> list[Round]:
    return [(start + k, range(len(rows)), rows) for k, rows in enumerate(rounds)]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def spread(values: Sequence[int]) -> Fraction:
    """The sum of squared distances to the mean."""
    n = len(values)
    return Fraction(n * sum(value**2 for value in values) - sum(values) ** 2, n)


class Clusters(NamedTuple):
    gap: Fraction  # between the centers
    minority: list[int]
    clear: bool = True  # no other split is nearly as good


def two_means(values: Sequence[float]) -> Clusters:
    """The lowest of the best splits of the sorted values, in exact arithmetic."""
    ratios = [value.as_integer_ratio() for value in values]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    exact = [numerator * (unit // denominator) for numerator, denominator in ratios]
    order = sorted(range(len(exact)), key=exact.__getitem__)
    ranked = [exact[i] for i in order]
    if ranked[0] == ranked[-1]:
        return Clusters(Fraction(0), [])
    splits = range(1, len(order))
    costs = [spread(ranked[:split]) + spread(ranked[split:]) for split in splits]
    split = splits[costs.index(min(costs))]
    lower, upper = order[:split], order[split:]
    gap = Fraction(sum(ranked[split:]), len(upper)) - Fraction(sum(ranked[:split]), len(lower))
    minority: list[int] = []
    if len(lower) != len(upper):
        minority = min(lower, upper, key=len)
    good = [cost for cost in costs if cost <= min(costs) + spread(exact) / 10**9]
    return Clusters(gap / unit, minority, len(good) == 1)


def by_definition(
    rounds: Iterable[Round], alpha: float, n_rounds: int, features: Sequence[int]
) -> list[list[float]]:
    """Scores of each round: Shen et al., section 4."""
    indicative: set[int] = set()
    scores = []
    for index, _, updates in rounds:
        rows = updates.double().tolist()
        found = {k: two_means([row[k] for row in rows]) for k in features}
        if index < n_rounds:
            indicative |= {k for k in features if found[k].gap > Fraction(alpha)}
        counts = [sum(i in found[k].minority for k in indicative) for i in range(len(rows))]
        scores.append([count / len(indicative) if indicative else 0.0 for count in counts])
    return scores


def assert_agrees(
    outcome: Aggregate, updates: Tensor, scores: Sequence[float], tau: float = 0.5
) -> None:
    assert scores_of(outcome) == pytest.approx(scores, abs=1e-6)
    kept = [score <= tau for score in scores]
    assert accepted_by(outcome) == kept
    share = 1 / max(sum(kept), 1)
    assert outcome.weights.tolist() == pytest.approx([share * keep for keep in kept])
    rows = updates.double().tolist()
    info = torch.finfo(updates.dtype)
    for k, found in enumerate(outcome.update.tolist()):
        exact = math.fsum(row[k] * share for row, keep in zip(rows, kept, strict=True) if keep)
        # Below `tiny`, numbers have fewer digits and rounding error is absolute.
        largest = max(info.tiny, *(abs(row[k]) for row in rows))
        assert abs(found - exact) <= 8 * info.eps * largest


def test_by_hand() -> None:
    # Three features of five clients:
    #    0 1 1 9 10: 0 1 1 | 9 10, centers 2/3 and 19/2, minority 3 and 4
    #    0 0 0 0 2: 0 0 0 0 | 2, centers 0 and 2: exactly alpha apart, so not indicative
    #    4 8 8 8 7: 4 | 7 8 8 8, centers 4 and 31/4, minority 0
    # Shares 1/2 0 0 1/2 1/2: none is above 1/2. With a fourth feature,
    #    5 5 5 5 0: 0 | 5 5 5 5, minority 4
    # they are 1/3 0 0 1/3 2/3, and client 4 is rejected.
    rows = torch.tensor(
        [
            [0.0, 0.0, 4.0, 5.0],
            [1.0, 0.0, 8.0, 5.0],
            [1.0, 0.0, 8.0, 5.0],
            [9.0, 0.0, 8.0, 5.0],
            [10.0, 2.0, 7.0, 0.0],
        ]
    )
    outcome = auror(rows[:, :3], alpha=2.0)
    assert scores_of(outcome) == [0.5, 0, 0, 0.5, 0.5]
    assert accepted_by(outcome) == [True] * 5
    assert outcome.update.tolist() == pytest.approx([21 / 5, 2 / 5, 7])
    outcome = auror(rows, alpha=2.0)
    assert scores_of(outcome) == pytest.approx([1 / 3, 0, 0, 1 / 3, 2 / 3])
    assert accepted_by(outcome) == [True, True, True, True, False]
    assert outcome.threshold == 0.5
    assert outcome.weights.tolist() == [0.25, 0.25, 0.25, 0.25, 0]
    assert outcome.update.tolist() == [11 / 4, 0, 7, 5]


@pytest.mark.parametrize(("alpha", "score"), [(0.0, 1.0), (2.9, 1.0), (3.0, 0.0), (9.0, 0.0)])
def test_centers_must_be_more_than_alpha_apart(alpha: float, score: float) -> None:
    outcome = auror(column(1, 1, 4), alpha)
    assert scores_of(outcome) == [0, 0, score]
    assert accepted_by(outcome) == [True, True, score == 0]


@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e-30, 1e30])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 10])
def test_equal_values_are_one_cluster(value: float, n: int) -> None:
    """Rounding must not give two halves different means."""
    for dtype in (torch.float32, torch.float64):
        outcome = auror(torch.full((n, 3), value, dtype=dtype), alpha=0.0)
        assert scores_of(outcome) == [0] * n
        assert accepted_by(outcome) == [True] * n


def test_two_equal_halves_have_no_minority() -> None:
    rows = torch.cat([column(0, 0, 9, 9), column(0, 0, 0, 9)], dim=1)
    assert scores_of(auror(rows[:, :1], alpha=1.0)) == [0] * 4
    assert scores_of(auror(rows, alpha=1.0)) == [
        0,
        0,
        0,
        0.5,
    ]  # the first feature still counts as indicative


def test_takes_the_lowest_of_equally_good_splits() -> None:
    # 0 | 1 2 and 0 1 | 2 both have a cost of 1/2; -3 | 0 0 3 and -3 0 0 | 3 both have 6.
    assert scores_of(auror(column(1, 2, 0), alpha=0.0)) == [0, 0, 1]
    assert scores_of(auror(column(0, 3, -3, 0), alpha=0.0)) == [0, 0, 1, 0]
    assert scores_of(auror(column(0, 8, 4), alpha=0.0)) == [1, 0, 0]


def best_of_all(values: Sequence[int]) -> tuple[Fraction, list[set[int]]]:
    """Minimum cost over all 2^(N-1) - 1 ways to form two clusters, and its lower clusters."""
    clients = set(range(len(values)))
    costs: dict[Fraction, list[set[int]]] = {}
    for size in range(1, len(values)):
        for chosen in itertools.combinations(sorted(clients), size):
            parts = [set(chosen), clients - set(chosen)]
            means = [Fraction(sum(values[i] for i in part), len(part)) for part in parts]
            if means[0] < means[1]:
                cost = sum(spread([values[i] for i in part]) for part in parts)
                costs.setdefault(Fraction(cost), []).append(parts[0])
    return min(costs), costs[min(costs)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=8).filter(lambda v: len(set(v)) > 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_finds_the_best_two_clusters(values: list[int], dtype: torch.dtype) -> None:
    _, lowers = best_of_all(values)
    lower = min(lowers, key=len)
    upper = set(range(len(values))) - lower
    minority = min(lower, upper, key=len) if len(lower) != len(upper) else set()
    gap = Fraction(sum(values[i] for i in upper), len(upper)) - Fraction(
        sum(values[i] for i in lower), len(lower)
    )
    rows = torch.tensor(values, dtype=dtype)[:, None]
    for alpha, expected in ((0.999 * float(gap), minority), (1.001 * float(gap), set())):
        scores = scores_of(auror(rows, alpha))
        assert scores == [float(i in expected) for i in range(len(values))]


def test_does_not_stop_at_a_local_optimum() -> None:
    # 0 5 6 7 | 12 13 costs 29 + 1/2. 0 | 5 6 7 12 13 costs 53.2, but every value is closest to its
    # own center, 0 or 8.6, so Lloyd's algorithm would stop there.
    assert scores_of(auror(column(0, 5, 6, 7, 12, 13), alpha=0.0)) == [0, 0, 0, 0, 1, 1]


@st.composite
def runs(
    draw: st.DrawFn, elements: st.SearchStrategy[float]
) -> list[tuple[int, list[int], np.ndarray]]:
    """Rounds of 1 to 8 out of ten clients, in changing rows."""
    p = draw(st.integers(1, 5))
    index = draw(st.integers(0, 2))
    id_lists = st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)
    rounds = []
    for ids in draw(st.lists(id_lists, min_size=1, max_size=5)):
        rounds.append((index, ids, draw(hnp.arrays(np.float64, (len(ids), p), elements=elements))))
        index += draw(st.integers(1, 2))
    return rounds


settings_of_a_run = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 0.31, 1.13, 2.71]),  # no gap equals these
        "tau": st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
        "rounds": st.integers(1, 4),
    }
)


def compare(
    run: list[tuple[int, list[int], np.ndarray]], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    rounds = [(index, ids, torch.tensor(rows, dtype=dtype)) for index, ids, rows in run]
    features = range(rounds[0][2].shape[1])
    expected = by_definition(rounds, hyper["alpha"], hyper["rounds"], features)
    for outcome, (_, _, updates), scores in zip(
        play(Auror(**hyper), rounds), rounds, expected, strict=True
    ):
        assert_agrees(outcome, updates, scores, hyper["tau"])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    runs(st.integers(-3, 3).map(float)),
    settings_of_a_run,
    st.sampled_from([torch.float32, torch.float64]),
)
@example([(0, [3, 1, 2], np.eye(3))], {"alpha": 0.31, "tau": 0.0, "rounds": 1}, torch.float32)
def test_against_the_definition_on_integers(
    run: list[tuple[int, list[int], np.ndarray]], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    """Many equal values and tied splits; a low tau may reject all clients."""
    compare(run, hyper, dtype)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    runs(st.floats(-4, 4, width=32)),
    st.sampled_from([0.0, -100.0, 1e4]),
    settings_of_a_run,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition_on_floats(
    run: list[tuple[int, list[int], np.ndarray]],
    center: float,
    hyper: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Including values far from zero, which differ in their last bits only."""
    run = [(index, ids, rows + center) for index, ids, rows in run]
    for _, _, rows in run:
        sent = torch.tensor(rows, dtype=dtype).double()
        assume(all(two_means(values).clear for values in sent.T.tolist()))
    compare(run, hyper, dtype)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("relative", "dtype"),
    [(1e-2, torch.float32), (1e-4, torch.float32), (1e-5, torch.float32), (1e-10, torch.float64)],
)
def test_separates_nearly_equal_rows(relative: float, dtype: torch.dtype) -> None:
    """Eleven clients, with alpha close to the distances of the centers."""
    for seed in range(5):
        differences = relative * noise(11, 40, seed=seed + 100).to(dtype)
        rows = noise(40, seed=seed).to(dtype) * (1 + differences)
        for alpha in (0.0, relative, 2 * relative):
            expected = by_definition(in_turn(rows), alpha, 10, range(40))[0]
            assert_agrees(auror(rows, alpha), rows, expected)
            assert max(expected) > 0


def test_centers_are_not_rounded_to_float32() -> None:
    # 1, 1, 1 + 2^-23 have the mean 1 + 2^-23 / 3, which float32 cannot represent.
    rows = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1 + 2.0**-23]])
    assert rows[-1].item() > 1
    assert scores_of(auror(rows, alpha=1.0)) == [0, 0, 0, 0, 1, 1, 1]


def poisoned(n: int, n_malicious: int, seed: int = 0) -> Tensor:
    """Malicious clients come first and deviate in the last four weights, the output layer."""
    rows = 0.1 * noise(n, 10, seed=seed)
    rows[:n_malicious, 6:] += torch.tensor([1.0, -1.0, 1.0, -1.0])
    return rows


HIDDEN_AND_OUTPUT = {"0.weight": slice(0, 6), "2.weight": slice(6, 9), "2.bias": slice(9, 10)}


@pytest.mark.parametrize(("n", "n_malicious"), [(3, 1), (10, 1), (10, 4), (30, 14)])
def test_rejects_a_poisoned_minority(n: int, n_malicious: int) -> None:
    rounds = in_turn(poisoned(n, n_malicious))
    outcome = play(Auror(0.6), rounds, HIDDEN_AND_OUTPUT)[0]
    assert scores_of(outcome) == [1] * n_malicious + [0] * (n - n_malicious)
    assert accepted_by(outcome) == [False] * n_malicious + [True] * (n - n_malicious)
    expected = poisoned(n, n_malicious)[n_malicious:].mean(dim=0)
    torch.testing.assert_close(outcome.update, expected)


@pytest.mark.parametrize(("n", "n_malicious"), [(10, 6), (30, 16)])
def test_a_poisoned_majority_wins(n: int, n_malicious: int) -> None:
    outcome = play(Auror(0.6), in_turn(poisoned(n, n_malicious)), HIDDEN_AND_OUTPUT)[0]
    assert accepted_by(outcome) == [True] * n_malicious + [False] * (n - n_malicious)


def test_keeps_all_if_half_are_poisoned() -> None:
    outcome = play(Auror(0.6), in_turn(poisoned(10, 5)), HIDDEN_AND_OUTPUT)[0]
    assert accepted_by(outcome) == [True] * 10
    assert scores_of(outcome) == [0] * 10


@pytest.mark.parametrize("n", [1, 2, 3, 10, 30])
def test_keeps_all_without_an_attack(n: int) -> None:
    """Noise also forms two clusters; only alpha separates it from an attack."""
    rows = poisoned(n, 0)
    outcome = play(Auror(0.6), in_turn(rows), HIDDEN_AND_OUTPUT)[0]
    assert accepted_by(outcome) == [True] * n
    assert scores_of(outcome) == [0] * n
    torch.testing.assert_close(outcome.update, rows.mean(dim=0))
    if n >= 10:
        assert not all(score == 0 for score in scores_of(auror(rows, alpha=0.0)))


def test_a_low_alpha_rejects_honest_clients() -> None:
    dropped = [not all(accepted_by(auror(noise(10, 3, seed=seed), 0.0))) for seed in range(20)]
    assert any(dropped)


@pytest.mark.parametrize(
    ("tau", "accepted"),
    [
        (0.0, [True, False, False]),
        (0.49, [True, False, False]),
        (0.5, [True, True, False]),
        (0.74, [True, True, False]),
        (0.75, [True, True, True]),
        (1.0, [True, True, True]),
    ],
)
def test_rejects_clients_with_a_share_above_tau(tau: float, accepted: list[bool]) -> None:
    # Client 1 deviates in two of four features, client 2 in three.
    rows = torch.zeros(7, 4)
    rows[1] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    rows[2] = torch.tensor([9.0, 0.0, 9.0, 9.0])
    outcome = auror(rows, alpha=1.0, tau=tau)
    assert scores_of(outcome) == [0, 0.5, 0.75, 0, 0, 0, 0]
    assert accepted_by(outcome) == [*accepted, True, True, True, True]


def test_a_share_of_exactly_half_is_kept() -> None:
    rows = torch.zeros(5, 2)
    rows[0, 0] = 9
    rows[1, 1] = 9
    outcome = auror(rows, alpha=1.0)
    assert scores_of(outcome) == [0.5, 0.5, 0, 0, 0]
    assert accepted_by(outcome) == [True] * 5


def deviating(*positions: tuple[int, int], size: float = 9.0, n: int = 5) -> Tensor:
    """Zeros except at these (client, feature)."""
    rows = torch.zeros(n, 4)
    for client, feature in positions:
        rows[client, feature] = size
    return rows


@pytest.mark.parametrize("last", [0, 5, 9])
@pytest.mark.parametrize("later", [10, 11, 50])
def test_remembers_the_features_of_the_first_rounds(last: int, later: int) -> None:
    """Feature 0 becomes indicative in time, feature 1 too late; later, small differences count."""
    early, late = deviating((0, 0)), deviating((1, 0), (2, 1), size=0.1)
    outcome = play(Auror(1.0), [(last, range(5), early), (later, range(5), late)])[1]
    assert scores_of(outcome) == [0, 1, 0, 0, 0]
    assert accepted_by(outcome) == [True, False, True, True, True]


@pytest.mark.parametrize(("index", "used"), [(0, True), (9, True), (10, False), (99, False)])
def test_finds_features_in_the_first_ten_rounds(index: int, used: bool) -> None:
    """And uses them immediately."""
    outcome = play(Auror(1.0), [(index, range(5), deviating((3, 2)))])[0]
    assert scores_of(outcome) == [0, 0, 0, float(used), 0]
    assert accepted_by(outcome) == [True, True, True, not used, True]


def test_adds_no_features_later() -> None:
    rounds = [deviating((0, 0)), *[deviating()] * 9, deviating((0, 0), (1, 1)), deviating((1, 1))]
    outcomes = play(Auror(1.0), in_turn(*rounds))
    assert scores_of(outcomes[9]) == [0] * 5
    assert scores_of(outcomes[10]) == [1, 0, 0, 0, 0]
    assert scores_of(outcomes[11]) == [0] * 5


def test_one_client_can_hide_a_backdoor() -> None:
    """Once every feature is indicative, a backdoor in one of them goes unnoticed."""
    backdoor = deviating((1, 2))
    alone = play(Auror(1.0), in_turn(backdoor, backdoor))
    assert accepted_by(alone[1]) == [True, False, True, True, True]
    blinded = play(Auror(1.0), in_turn(deviating(*((0, k) for k in range(4))), backdoor))
    assert scores_of(blinded[1]) == [0, 0.25, 0, 0, 0]
    assert accepted_by(blinded[1]) == [True] * 5


def test_features_of_several_rounds_accumulate() -> None:
    rounds = [deviating((0, k)) for k in range(4)]
    outcomes = play(Auror(1.0), in_turn(*rounds))
    assert [scores_of(outcome)[0] for outcome in outcomes] == pytest.approx(
        [1, 1 / 2, 1 / 3, 1 / 4]
    )


@pytest.mark.parametrize("rounds", [1, 3])
def test_number_of_first_rounds(rounds: int) -> None:
    outcomes = play(Auror(1.0, rounds=rounds), in_turn(*[deviating((0, k)) for k in range(4)]))
    expected = [1 / (k + 1) if k < rounds else 0 for k in range(4)]
    assert [scores_of(outcome)[0] for outcome in outcomes] == pytest.approx(expected)


def test_memory_is_independent_of_the_clients() -> None:
    """The state is about features; clients and their number may change."""
    rounds: list[Round] = [(0, [5, 6, 7], deviating((0, 1), n=3)), (12, [6], deviating(n=1))]
    rounds.append((13, [8, 5, 9, 1, 2, 3], deviating((4, 1), (1, 0), n=6)))
    outcomes = play(Auror(1.0), rounds)
    assert [accepted_by(outcome).count(False) for outcome in outcomes] == [1, 0, 1]
    assert scores_of(outcomes[2]) == [0, 0, 0, 0, 1, 0]


LAYERS: dict[str, tuple[dict[str, slice], list[int]]] = {
    "last_of_three": (HIDDEN_AND_OUTPUT, [6, 7, 8, 9]),
    "nested": (
        {"a.fc.weight": slice(0, 3), "a.fc.bias": slice(3, 5), "b.fc.weight": slice(5, 10)},
        [5, 6, 7, 8, 9],
    ),
    "prefix_of_another": (
        {"11.weight": slice(0, 4), "1.weight": slice(4, 8), "1.bias": slice(8, 10)},
        [4, 5, 6, 7, 8, 9],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_uses_only_the_output_layer(name: str) -> None:
    layers, features = LAYERS[name]
    for seed in range(10):
        rounds = in_turn(noise(7, 10, seed=seed), noise(7, 10, seed=seed + 100), start=9)
        expected = by_definition(rounds, 1.0, 10, features)
        whole = by_definition(rounds, 1.0, 10, range(10))
        assert expected != whole
        for layer, scores in (("output", expected), ("all", whole)):
            outcomes = play(Auror(1.0, layer), rounds, layers)
            for outcome, (_, _, updates), of_round in zip(outcomes, rounds, scores, strict=True):
                assert_agrees(outcome, updates, of_round)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("alpha", -0.1), ("alpha", math.nan), ("alpha", math.inf)],
        *[("tau", -0.1), ("tau", 1.1), ("tau", math.nan), ("tau", math.inf)],
        *[("rounds", 0), ("rounds", -1), ("layers", "last")],
    ],
)
def test_rejects_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{setting} must be .+, got '?{re.escape(str(value))}"):
        Auror(**{"alpha": 1.0, setting: value})


def test_defaults_are_the_settings_of_the_paper() -> None:
    assert Auror(alpha=1.0) == Auror(alpha=1.0, layers="output", tau=0.5, rounds=10)
    for hyper in ({"tau": 0.0}, {"tau": 1.0}, {"rounds": 1}):
        Auror(**{"alpha": 0.0} | hyper)


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = (
        {"name": "auror", "layers": "all", "alpha": 0.0},
        {"name": "auror", "rounds": 1, "tau": 0.0},
    )
    invalid: ClassVar[Any] = {
        "alpha": [-0.1, math.nan, math.inf, -math.inf],
        "layers": ["last", ""],
        "tau": [-0.1, 1.1, math.nan, math.inf, -math.inf],
        "rounds": [0, -3],
    }
