"""foolsgold: clients whose summed updates point the same way share one vote, or none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rounds import ONE_LAYER, accepted_by, runs, view_of
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense

FoolsGold: Any = DEFENSES.get("foolsgold")
Round = tuple[Sequence[int], Tensor]  # ids [N] and updates [N, P]


def play(
    rounds: Iterable[Round], defense: Defense | None = None, places: Mapping[str, slice] = ONE_LAYER
) -> list[Aggregate]:
    defense = defense or FoolsGold()
    state, outcomes = defense.init(), []
    for index, (ids, updates) in enumerate(rounds):
        view = view_of(ids, updates, index, places)
        outcome, state = defense.aggregate(updates, state, view)
        outcomes.append(outcome)
    return outcomes


def foolsgold(updates: Tensor, **hyper: Any) -> Aggregate:
    return play([(range(len(updates)), updates)], FoolsGold(**hyper))[0]


def votes_of(outcome: Aggregate) -> list[float]:
    """w, before it is divided by its sum."""
    assert outcome.scores is not None
    return [1 - score for score in outcome.scores.tolist()]


class Verdict(NamedTuple):
    votes: list[float]
    largest: float  # 1 - max cs of the client least like another: what rounding is measured by


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot, aa, bb = (
        math.fsum(x * y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b))
    )
    return dot / math.sqrt(aa) / math.sqrt(bb) if aa and bb else 0.0


def by_definition(histories: Sequence[Sequence[float]], kappa: float) -> Verdict:
    """Fung et al., algorithm 1, from the sums of this round's clients to their votes."""
    clients = range(len(histories))
    cs = {
        (i, j): cosine(histories[i], histories[j]) if i != j else 0.0
        for i in clients
        for j in clients
    }
    v = [max(cs[i, j] for j in clients) for i in clients]
    w = []
    for i in clients:
        pardoned = [cs[i, j] * v[i] / v[j] if v[i] < v[j] else cs[i, j] for j in clients]
        w.append(min(max(1 - max(pardoned), 0.0), 1.0))
    largest = max(w)
    if largest <= 1e-12:
        return Verdict([0.0 for _ in clients], largest)
    votes = []
    for i in clients:
        share = w[i] / largest
        share = 0.99 if share == 1 else share
        logit = -math.inf if share == 0 else math.log(share / (1 - share))
        votes.append(min(max(kappa * (logit + 0.5), 0.0), 1.0))
    return Verdict(votes, largest)


class Memory:
    """The sum of each client's updates, by id."""

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}
        self.sizes: dict[int, float] = {}

    def add(self, ids: Sequence[int], rows: Sequence[Sequence[float]]) -> list[list[float]]:
        for client, row in zip(ids, rows, strict=True):
            before = self.sums.get(client, [0.0] * len(row))
            self.sums[client] = [a + b for a, b in zip(before, row, strict=True)]
            self.sizes[client] = self.sizes.get(client, 0.0) + math.hypot(*row)
        return [self.sums[client] for client in ids]

    def cancelled(self, ids: Sequence[int]) -> bool:
        """Is what is left of a sum mostly rounding?"""
        return any(0 < math.hypot(*self.sums[i]) < 1e-6 * self.sizes[i] for i in ids)


def assert_agrees(
    outcome: Aggregate, updates: Tensor, expected: Verdict, rel: float = 1e-9
) -> None:
    votes, total = expected.votes, math.fsum(expected.votes)
    eps = torch.finfo(updates.dtype).eps
    assert votes_of(outcome) == pytest.approx(votes, abs=rel + eps)
    shares = [vote / total if total else 0.0 for vote in votes]
    assert outcome.weights.tolist() == pytest.approx(shares, abs=rel + eps)
    for vote, accepted, weight in zip(
        votes, accepted_by(outcome), outcome.weights.tolist(), strict=True
    ):
        assert accepted == (weight > 0)
        assert accepted == (vote > 0) or vote < rel
    rows = updates.double().tolist()
    for k, found in enumerate(outcome.update.tolist()):
        exact = math.fsum(share * row[k] for share, row in zip(shares, rows, strict=True))
        size = max(abs(row[k]) for row in rows)
        rounding = (4 * len(rows) * rel + 8 * eps) * size + torch.finfo(updates.dtype).tiny
        assert abs(found - exact) <= rounding


def test_by_hand() -> None:
    # cos(0, 1) = 1 / (sqrt 2 * sqrt 2) = 1/2, and both are orthogonal to the third:
    #    v = 1/2 1/2 0, nothing to pardon (0 * ... = 0), 1 - v = 1/2 1/2 1 -> 1/2 1/2 0.99
    #    ln(1) + 0.5 = 0.5, ln(99) + 0.5 = 5.1 -> 1, so w = 0.5 0.5 1 and their sum is 2.
    rows = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [-1.0, 1.0, 1.0]])
    outcome = foolsgold(rows)
    assert votes_of(outcome) == pytest.approx([0.5, 0.5, 1])
    assert outcome.weights.tolist() == pytest.approx([0.25, 0.25, 0.5])
    assert outcome.update.tolist() == pytest.approx([0, 0.75, 0.75])  # dividing by N: 0.5
    assert accepted_by(outcome) == [True, True, True]


def test_by_hand_over_two_rounds() -> None:
    # Round 0: clients 7 and 4 send (2, 0) and (0, 2), orthogonal: a vote each.
    # Round 1: 4 and 7 both send (1, 1). Sums 4: (1, 3), 7: (3, 1), cos = 6 / 10; client 9 sends
    # (2, -2): cos = (2 - 6) / (sqrt 10 * sqrt 8) < 0 to client 4 and 4 / sqrt 80 = 0.4472 to 7.
    #    v_4 = 0.6 (7), v_7 = 0.6 (4), v_9 = 0.4472 (7); cs_97 *= 0.4472 / 0.6 makes 1/3.
    #    1 - cs = 0.4 0.4 2/3, over 2/3: 0.6 0.6 1 -> 0.99; ln(1.5) + 0.5 = 0.9055.
    # By place the sums would be (3, 1), (2, 0) and (1, 1).
    first = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[1.0, 1.0], [2.0, -2.0], [1.0, 1.0]])
    before, after = play([((7, 4), first), ((4, 9, 7), second)])
    assert before.weights.tolist() == [0.5, 0.5]
    vote = math.log(1.5) + 0.5
    assert votes_of(after) == pytest.approx([vote, 1, vote])
    assert after.weights.tolist() == pytest.approx(
        [share / (1 + 2 * vote) for share in (vote, 1, vote)]
    )
    assert after.update.tolist() == pytest.approx(
        [(2 * vote + 2) / (1 + 2 * vote), (2 * vote - 2) / (1 + 2 * vote)]
    )


def test_alike_by_all_means_divided_by_the_largest() -> None:
    # cos((4, 3), (3, 4)) = 0.96: 0.04 each, over 0.04: 1 -> 0.99 each, so nobody is dropped.
    outcome = foolsgold(torch.tensor([[4.0, 3.0], [3.0, 4.0]]))
    assert votes_of(outcome) == pytest.approx([1, 1])
    assert outcome.update.tolist() == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize("kappa", [0.05, 0.1, 0.15])
def test_the_least_alike_count_as_99_percent(kappa: float) -> None:
    outcome = foolsgold(torch.eye(4), kappa=kappa)
    assert votes_of(outcome) == pytest.approx([kappa * (math.log(99) + 0.5)] * 4)
    assert outcome.weights.tolist() == [0.25] * 4


def test_kappa_divides_more_sharply() -> None:
    # As by hand, ln(0.4 / 0.6) + 0.5 = 0.0945 with cos 3/5.
    rows = torch.tensor([[5.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    vote = math.log(2 / 3) + 0.5
    assert votes_of(foolsgold(rows)) == pytest.approx([vote, vote, 1])
    assert votes_of(foolsgold(rows, kappa=3.0)) == pytest.approx([3 * vote, 3 * vote, 1])
    assert votes_of(foolsgold(rows, kappa=30.0)) == pytest.approx([1, 1, 1])


def compare(run: list[tuple[list[int], np.ndarray]], kappa: float, dtype: torch.dtype) -> None:
    tensors = [(ids, torch.tensor(rows, dtype=dtype)) for ids, rows in run]
    memory, verdicts = Memory(), []
    for ids, updates in tensors:
        histories = memory.add(ids, updates.double().tolist())
        verdicts.append(by_definition(histories, kappa))
        assume(not memory.cancelled(ids))
        assume(verdicts[-1].largest < 1e-14 or verdicts[-1].largest > 1e-8)
    for (_, updates), outcome, expected in zip(
        tensors, play(tensors, FoolsGold(kappa=kappa)), verdicts, strict=True
    ):
        rel = 1e-9 + 1e-14 * kappa / max(expected.largest, 1e-8)
        assert_agrees(outcome, updates, expected, rel)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    runs(st.integers(-3, 3).map(float), most=4),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_on_whole_numbers(
    run: list[tuple[list[int], np.ndarray]], kappa: float, dtype: torch.dtype
) -> None:
    """Zero, parallel, opposite and orthogonal rows in plenty."""
    compare(run, kappa, dtype)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    runs(st.floats(-1e3, 1e3, width=32), most=4),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_on_any_numbers(
    run: list[tuple[list[int], np.ndarray]], kappa: float, dtype: torch.dtype
) -> None:
    compare(run, kappa, dtype)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("p", [10, 400])
def test_nearly_equal_rows_get_the_right_votes(relative: float, p: int) -> None:
    """Ten float32 clients, over three rounds in which the sums outgrow their differences."""
    for seed in range(5):
        common = noise(p, seed=seed)
        rounds = [
            (range(10), common * (1 + relative * noise(10, p, seed=100 * seed + index)))
            for index in range(3)
        ]
        memory = Memory()
        for outcome, (ids, updates) in zip(play(rounds), rounds, strict=True):
            expected = by_definition(memory.add(ids, updates.double().tolist()), kappa=1.0)
            assert_agrees(outcome, updates, expected, rel=1e-5)


def test_sybils_are_found_among_nearly_equal_clients() -> None:
    """All differ by 1e-4 of their norm, sybils from each other by a tenth of that."""
    rows = noise(50, seed=0) * (1 + 1e-4 * noise(10, 50, seed=1))
    rows[:3] = rows[0] * (1 + 1e-5 * noise(3, 50, seed=2))
    assert accepted_by(foolsgold(rows)) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e30])
def test_the_size_of_updates_does_not_matter(scale: float) -> None:
    rows = noise(6, 4, seed=3)
    outcome, scaled = foolsgold(rows), foolsgold(rows * scale)
    assert votes_of(scaled) == pytest.approx(votes_of(outcome), abs=1e-4)
    assert 0 < sum(accepted_by(outcome)) < 6
    assert accepted_by(scaled) == accepted_by(outcome)
    assert (scaled.update / scale).tolist() == pytest.approx(outcome.update.tolist(), abs=1e-4)


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_all_are_alike_there_is_no_update(n: int, dtype: torch.dtype) -> None:
    row = noise(20, seed=0).to(dtype)
    for size in (torch.ones(n, 1), torch.arange(1, n + 1)[:, None]):
        outcome = foolsgold(row * size.to(dtype))
        assert outcome.update.tolist() == [0] * 20
        assert outcome.weights.tolist() == [0] * n
        assert votes_of(outcome) == [0] * n
        assert accepted_by(outcome) == [False] * n


def test_alone_a_client_is_like_nobody() -> None:
    row = torch.tensor([[3.0, -1.0]])
    outcomes = play([([4], row), ([4], 2 * row), ([6], row)])
    assert [outcome.weights.tolist() for outcome in outcomes] == [[1], [1], [1]]
    assert outcomes[1].update.tolist() == [6, -2]


def test_zero_updates_are_like_nobody() -> None:
    outcome = foolsgold(torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
    assert outcome.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert foolsgold(torch.zeros(3, 2)).update.tolist() == [0, 0]


def poisoned(n: int, n_sybils: int, seed: int = 0) -> Tensor:
    """Honest clients with little in common, and first sybils that send one and the same update."""
    rows = 0.3 * noise(200, seed=seed) + noise(n, 200, seed=seed + 1)
    rows[:n_sybils] = noise(200, seed=seed + 2)
    return rows


@pytest.mark.parametrize(("n", "n_sybils"), [(5, 2), (10, 3), (10, 9), (30, 15), (30, 29)])
def test_identical_sybils_are_dropped_and_others_spared(n: int, n_sybils: int) -> None:
    """However many they are."""
    outcome = foolsgold(poisoned(n, n_sybils))
    assert accepted_by(outcome) == [False] * n_sybils + [True] * (n - n_sybils)
    assert votes_of(outcome) == pytest.approx([0] * n_sybils + [1] * (n - n_sybils))
    expected = poisoned(n, n_sybils)[n_sybils:].mean(dim=0)
    torch.testing.assert_close(outcome.update, expected)


def test_sybils_of_different_size_are_dropped() -> None:
    rows = poisoned(10, 3)
    rows[:3] *= torch.tensor([[0.01], [1.0], [100.0]])
    assert accepted_by(foolsgold(rows)) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_single_attacker_is_not_caught(scale: float) -> None:
    rows = poisoned(10, 1)
    rows[0] *= scale
    outcome = foolsgold(rows)
    assert votes_of(outcome) == pytest.approx([1] * 10)
    assert outcome.weights.tolist() == pytest.approx([0.1] * 10)


def test_honest_clients_alike_are_dropped_for_sybils() -> None:
    """What the rule costs: clients of like data have one vote less than one client would."""
    rows = noise(100, seed=0) + 0.1 * noise(10, 100, seed=1)
    rows[0] = -rows[0]
    assert accepted_by(foolsgold(rows)) == [True] + [False] * 9


def test_pardoning_protects_who_resembles_a_sybil() -> None:
    # cos 3/5 to both sybils, whose v is 1: 0.6 * 0.6 / 1 = 0.36, ln(0.64 / 0.36) + 0.5 > 1.
    # Unpardoned, ln(0.4 / 0.6) + 0.5 = 0.0945.
    sybil, honest, other = [5.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 1.0]
    outcome = foolsgold(torch.tensor([sybil, honest, sybil, other]))
    assert votes_of(outcome) == pytest.approx([0, 1, 0, 1], abs=1e-6)
    assert accepted_by(outcome) == [False, True, False, True]


def test_pardoning_decides_who_is_dropped() -> None:
    # cos 7 / sqrt 98 = 0.7071: pardoned 1/2, so ln(1) + 0.5; unpardoned
    # ln(0.2929 / 0.7071) + 0.5 = -0.38.
    sybil, honest, other = [1.0, 0.0, 0.0], [7.0, 7.0, 0.0], [0.0, 0.0, 1.0]
    outcome = foolsgold(torch.tensor([sybil, sybil, honest, other]))
    assert votes_of(outcome) == pytest.approx([0, 0, 0.5, 1], abs=1e-6)


def hidden(places: Sequence[int], sign: float) -> Round:
    """Sybils 1 and 2 who add opposite noise to one small update, and three others."""
    common, cover = noise(100, seed=0), sign * 5 * noise(100, seed=1)
    rows = {1: common + cover, 2: common - cover}
    rows |= {client: noise(100, seed=10 * client + int(sign)) for client in (3, 4, 5)}
    return places, torch.stack([rows[client] for client in places])


@pytest.mark.parametrize("places", [(1, 2, 3, 4, 5), (2, 1, 3, 4, 5), (4, 2, 5, 3, 1)])
def test_sums_show_sybils_that_one_round_hides(places: tuple[int, ...]) -> None:
    """In the first round they are opposed; the sums are equal, wherever the sybils stand."""
    first, second = play([hidden((1, 2, 3, 4, 5), 1.0), hidden(places, -1.0)])
    assert accepted_by(first) == [True] * 5
    assert accepted_by(second) == [client not in (1, 2) for client in places]


def test_a_sum_goes_on_after_absence() -> None:
    others = ((3, 4), noise(2, 100, seed=9))
    rounds = [hidden((1, 2, 3, 4, 5), 1.0), others, others, hidden((3, 2, 1), -1.0)]
    assert accepted_by(play(rounds)[-1]) == [True, False, False]


def test_who_is_absent_is_not_compared() -> None:
    rows = noise(3, 50, seed=0)
    same = torch.stack([rows[0], rows[1]])
    outcomes = play([((0, 1, 2), rows), ((5, 6), same), ((0, 5), same)])
    assert accepted_by(outcomes[1]) == [True, True]
    assert accepted_by(outcomes[2]) == [True, True]
    assert accepted_by(play([((0, 1, 2), rows), ((0, 5), rows[[0, 0]])])[1]) == [False, False]


def test_a_stranger_has_no_history() -> None:
    """Client 8 stands where sybil 1 stood."""
    rows = poisoned(5, 2)
    again = poisoned(5, 0, seed=50)
    outcome = play([((0, 1, 2, 3, 4), rows), ((0, 8, 2, 3, 4), again)])[1]
    assert accepted_by(outcome) == [True] * 5
    assert accepted_by(play([((0, 1, 2), rows[:3]), ((2, 1, 0), 0.1 * again[:3])])[1]) == [
        True,
        False,
        False,
    ]


LAYERS: dict[str, tuple[dict[str, slice], list[int]]] = {
    "last_of_three": (
        {"0.weight": slice(0, 3), "2.weight": slice(3, 5), "2.bias": slice(5, 6)},
        [3, 4, 5],
    ),
    "nested": (
        {"a.fc.weight": slice(0, 2), "a.fc.bias": slice(2, 4), "b.fc.weight": slice(4, 6)},
        [4, 5],
    ),
    "prefix_of_another": (
        {"11.weight": slice(0, 2), "1.weight": slice(2, 5), "1.bias": slice(5, 6)},
        [2, 3, 4, 5],
    ),
    "one": ({"fc.weight": slice(0, 5), "fc.bias": slice(5, 6)}, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_only_the_output_layer_is_compared(name: str) -> None:
    layers, features = LAYERS[name]
    votes = []
    for seed in range(20):
        rows = noise(6, 6, seed=seed)
        outcome = play([(range(6), rows)], places=layers)[0]
        expected = by_definition(rows.double()[:, features].tolist(), kappa=1.0)
        assert_agrees(outcome, rows, expected, rel=1e-6)
        whole = play([(range(6), rows)], FoolsGold(layers="all"), layers)[0]
        assert_agrees(whole, rows, by_definition(rows.double().tolist(), 1.0), rel=1e-6)
        votes.append(votes_of(outcome) == pytest.approx(votes_of(whole), abs=1e-3))
    assert all(votes) == (len(features) == 6)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kappa", value) for value in (0.0, -1.0, math.nan, math.inf)] + [("layers", "last")],
)
def test_bad_settings_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{setting} must be .+, got '?{re.escape(str(value))}"):
        FoolsGold(**{setting: value})


def test_settings_of_the_paper() -> None:
    assert FoolsGold() == FoolsGold(layers="output", kappa=1.0)
