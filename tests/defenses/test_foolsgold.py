"""FoolsGold: clients whose summed updates have the same direction lose weight."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rounds import ONE_LAYER, accepted_by, runs, view_of
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.testing import DefenseContract

FoolsGold: Any = DEFENSES.get("foolsgold")
Round = tuple[Sequence[int], Tensor]  # ids [N] and updates [N, P]


def play(
    rounds: Iterable[Round], defense: Defense | None = None, layers: Mapping[str, slice] = ONE_LAYER
) -> list[Aggregate]:
    defense = defense or FoolsGold()
    state, outcomes = defense.init(), []
    for index, (ids, updates) in enumerate(rounds):
        view = view_of(ids, updates, index, layers)
        outcome, state = defense.aggregate(updates, state, view)
        outcomes.append(outcome)
    return outcomes


def foolsgold(updates: Tensor, **hyper: Any) -> Aggregate:
    return play([(range(len(updates)), updates)], FoolsGold(**hyper))[0]


def trust_of(outcome: Aggregate) -> list[float]:
    """Trust w, before the division by its sum."""
    assert outcome.scores is not None
    return [1 - score for score in outcome.scores.tolist()]


class Verdict(NamedTuple):
    trust: list[float]
    largest: float  # max_i w_i before the division by it; sets the scale of the rounding error


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot, aa, bb = (
        math.fsum(x * y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b))
    )
    return dot / math.sqrt(aa) / math.sqrt(bb) if aa and bb else 0.0


def by_definition(histories: Sequence[Sequence[float]], kappa: float) -> Verdict:
    """Fung et al., Algorithm 1: the weights w of this round's clients from their histories."""
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
    trust = []
    for i in clients:
        share = w[i] / largest
        share = 0.99 if share == 1 else share
        logit = -math.inf if share == 0 else math.log(share / (1 - share))
        trust.append(min(max(kappa * (logit + 0.5), 0.0), 1.0))
    return Verdict(trust, largest)


class Memory:
    """Sum of each client's updates, by id."""

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
        """Whether a sum is so small after cancellation that it is mostly rounding error."""
        return any(0 < math.hypot(*self.sums[i]) < 1e-6 * self.sizes[i] for i in ids)


def assert_agrees(
    outcome: Aggregate, updates: Tensor, expected: Verdict, rel: float = 1e-9
) -> None:
    trust, total = expected.trust, math.fsum(expected.trust)
    eps = torch.finfo(updates.dtype).eps
    assert trust_of(outcome) == pytest.approx(trust, abs=rel + eps)
    shares = [w / total if total else 0.0 for w in trust]
    assert outcome.weights.tolist() == pytest.approx(shares, abs=rel + eps)
    for w, accepted, weight in zip(
        trust, accepted_by(outcome), outcome.weights.tolist(), strict=True
    ):
        assert accepted == (weight > 0)
        assert accepted == (w > 0) or w < rel
    rows = updates.double().tolist()
    for k, found in enumerate(outcome.update.tolist()):
        exact = math.fsum(share * row[k] for share, row in zip(shares, rows, strict=True))
        size = max(abs(row[k]) for row in rows)
        rounding = (4 * len(rows) * rel + 8 * eps) * size + torch.finfo(updates.dtype).tiny
        assert abs(found - exact) <= rounding


def test_by_hand() -> None:
    # cos(0, 1) = 1 / (sqrt 2 * sqrt 2) = 1/2, and both are orthogonal to the third:
    #    v = 1/2 1/2 0, no pardoning (0 * ... = 0), 1 - v = 1/2 1/2 1 -> 1/2 1/2 0.99
    #    ln(1) + 0.5 = 0.5, ln(99) + 0.5 = 5.1 -> 1, so w = 0.5 0.5 1 with sum 2.
    rows = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [-1.0, 1.0, 1.0]])
    outcome = foolsgold(rows)
    assert trust_of(outcome) == pytest.approx([0.5, 0.5, 1])
    assert outcome.weights.tolist() == pytest.approx([0.25, 0.25, 0.5])
    assert outcome.update.tolist() == pytest.approx(
        [0, 0.75, 0.75]
    )  # not 0.5, as after division by N
    assert accepted_by(outcome) == [True, True, True]


def test_by_hand_over_two_rounds() -> None:
    # Round 0: clients 7 and 4 send (2, 0) and (0, 2), which are orthogonal: w = 1 each.
    # Round 1: 4 and 7 both send (1, 1). Sums 4: (1, 3), 7: (3, 1), cos = 6 / 10; client 9 sends
    # (2, -2): cos = (2 - 6) / (sqrt 10 * sqrt 8) < 0 to client 4 and 4 / sqrt 80 = 0.4472 to 7.
    #    v_4 = 0.6 (7), v_7 = 0.6 (4), v_9 = 0.4472 (7); cs_97 *= 0.4472 / 0.6 makes 1/3.
    #    1 - cs = 0.4 0.4 2/3, over 2/3: 0.6 0.6 1 -> 0.99; ln(1.5) + 0.5 = 0.9055.
    # Keyed by row, the sums would be (3, 1), (2, 0) and (1, 1).
    first = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[1.0, 1.0], [2.0, -2.0], [1.0, 1.0]])
    before, after = play([((7, 4), first), ((4, 9, 7), second)])
    assert before.weights.tolist() == [0.5, 0.5]
    w = math.log(1.5) + 0.5
    assert trust_of(after) == pytest.approx([w, 1, w])
    assert after.weights.tolist() == pytest.approx([share / (1 + 2 * w) for share in (w, 1, w)])
    assert after.update.tolist() == pytest.approx(
        [(2 * w + 2) / (1 + 2 * w), (2 * w - 2) / (1 + 2 * w)]
    )


def test_equally_similar_clients_are_all_kept() -> None:
    # cos((4, 3), (3, 4)) = 0.96: 0.04 each, over 0.04: 1 -> 0.99 each, so neither is dropped.
    outcome = foolsgold(torch.tensor([[4.0, 3.0], [3.0, 4.0]]))
    assert trust_of(outcome) == pytest.approx([1, 1])
    assert outcome.update.tolist() == pytest.approx([3.5, 3.5])


@pytest.mark.parametrize("kappa", [0.05, 0.1, 0.15])
def test_the_largest_weight_becomes_99_percent(kappa: float) -> None:
    outcome = foolsgold(torch.eye(4), kappa=kappa)
    assert trust_of(outcome) == pytest.approx([kappa * (math.log(99) + 0.5)] * 4)
    assert outcome.weights.tolist() == [0.25] * 4


def test_kappa_scales_the_logit() -> None:
    # As in test_by_hand, with cos 3/5: ln(0.4 / 0.6) + 0.5 = 0.0945.
    rows = torch.tensor([[5.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    w = math.log(2 / 3) + 0.5
    assert trust_of(foolsgold(rows)) == pytest.approx([w, w, 1])
    assert trust_of(foolsgold(rows, kappa=3.0)) == pytest.approx([3 * w, 3 * w, 1])
    assert trust_of(foolsgold(rows, kappa=30.0)) == pytest.approx([1, 1, 1])


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
    runs(st.integers(-3, 3).map(float), max_rounds=4),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition_on_integers(
    run: list[tuple[list[int], np.ndarray]], kappa: float, dtype: torch.dtype
) -> None:
    """Many zero, parallel, opposite and orthogonal rows."""
    compare(run, kappa, dtype)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    runs(st.floats(-1e3, 1e3, width=32), max_rounds=4),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition_on_floats(
    run: list[tuple[list[int], np.ndarray]], kappa: float, dtype: torch.dtype
) -> None:
    compare(run, kappa, dtype)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("p", [10, 400])
def test_weights_of_nearly_equal_rows(relative: float, p: int) -> None:
    """Ten float32 clients over three rounds, whose sums grow faster than their differences."""
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


def test_finds_sybils_among_nearly_equal_clients() -> None:
    """Clients differ by 1e-4 of their norm, sybils by a tenth of that."""
    rows = noise(50, seed=0) * (1 + 1e-4 * noise(10, 50, seed=1))
    rows[:3] = rows[0] * (1 + 1e-5 * noise(3, 50, seed=2))
    assert accepted_by(foolsgold(rows)) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e30])
def test_is_invariant_to_the_scale_of_updates(scale: float) -> None:
    rows = noise(6, 4, seed=3)
    outcome, scaled = foolsgold(rows), foolsgold(rows * scale)
    assert trust_of(scaled) == pytest.approx(trust_of(outcome), abs=1e-4)
    assert 0 < sum(accepted_by(outcome)) < 6
    assert accepted_by(scaled) == accepted_by(outcome)
    assert (scaled.update / scale).tolist() == pytest.approx(outcome.update.tolist(), abs=1e-4)


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_update_if_all_clients_have_the_same_direction(n: int, dtype: torch.dtype) -> None:
    row = noise(20, seed=0).to(dtype)
    for size in (torch.ones(n, 1), torch.arange(1, n + 1)[:, None]):
        outcome = foolsgold(row * size.to(dtype))
        assert outcome.update.tolist() == [0] * 20
        assert outcome.weights.tolist() == [0] * n
        assert trust_of(outcome) == [0] * n
        assert accepted_by(outcome) == [False] * n


def test_keeps_a_single_client() -> None:
    row = torch.tensor([[3.0, -1.0]])
    outcomes = play([([4], row), ([4], 2 * row), ([6], row)])
    assert [outcome.weights.tolist() for outcome in outcomes] == [[1], [1], [1]]
    assert outcomes[1].update.tolist() == [6, -2]


def test_zero_updates_resemble_no_other() -> None:
    outcome = foolsgold(torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
    assert outcome.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert foolsgold(torch.zeros(3, 2)).update.tolist() == [0, 0]


def poisoned(n: int, n_sybils: int, seed: int = 0) -> Tensor:
    """Sybils first, which send one identical update; honest clients with little in common."""
    rows = 0.3 * noise(200, seed=seed) + noise(n, 200, seed=seed + 1)
    rows[:n_sybils] = noise(200, seed=seed + 2)
    return rows


@pytest.mark.parametrize(("n", "n_sybils"), [(5, 2), (10, 3), (10, 9), (30, 15), (30, 29)])
def test_drops_identical_sybils_only(n: int, n_sybils: int) -> None:
    """Even if they are the majority."""
    outcome = foolsgold(poisoned(n, n_sybils))
    assert accepted_by(outcome) == [False] * n_sybils + [True] * (n - n_sybils)
    assert trust_of(outcome) == pytest.approx([0] * n_sybils + [1] * (n - n_sybils))
    expected = poisoned(n, n_sybils)[n_sybils:].mean(dim=0)
    torch.testing.assert_close(outcome.update, expected)


def test_drops_sybils_of_different_norms() -> None:
    rows = poisoned(10, 3)
    rows[:3] *= torch.tensor([[0.01], [1.0], [100.0]])
    assert accepted_by(foolsgold(rows)) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_keeps_a_single_attacker(scale: float) -> None:
    rows = poisoned(10, 1)
    rows[0] *= scale
    outcome = foolsgold(rows)
    assert trust_of(outcome) == pytest.approx([1] * 10)
    assert outcome.weights.tolist() == pytest.approx([0.1] * 10)


def test_drops_honest_clients_with_similar_updates() -> None:
    """The cost of the rule: clients with similar data count less than one client alone."""
    rows = noise(100, seed=0) + 0.1 * noise(10, 100, seed=1)
    rows[0] = -rows[0]
    assert accepted_by(foolsgold(rows)) == [True] + [False] * 9


def test_pardoning_protects_a_client_that_resembles_a_sybil() -> None:
    # cos 3/5 to both sybils, whose v is 1: 0.6 * 0.6 / 1 = 0.36, ln(0.64 / 0.36) + 0.5 > 1.
    # Without pardoning, ln(0.4 / 0.6) + 0.5 = 0.0945.
    sybil, honest, other = [5.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 1.0]
    outcome = foolsgold(torch.tensor([sybil, honest, sybil, other]))
    assert trust_of(outcome) == pytest.approx([0, 1, 0, 1], abs=1e-6)
    assert accepted_by(outcome) == [False, True, False, True]


def test_pardoning_decides_which_clients_are_dropped() -> None:
    # cos 7 / sqrt 98 = 0.7071. Pardoned 1/2, so ln(1) + 0.5; otherwise
    # ln(0.2929 / 0.7071) + 0.5 = -0.38.
    sybil, honest, other = [1.0, 0.0, 0.0], [7.0, 7.0, 0.0], [0.0, 0.0, 1.0]
    outcome = foolsgold(torch.tensor([sybil, sybil, honest, other]))
    assert trust_of(outcome) == pytest.approx([0, 0, 0.5, 1], abs=1e-6)


def hidden(ids: Sequence[int], sign: float) -> Round:
    """Sybils 1 and 2, which add opposite noise to the same small update, and three others."""
    common, cover = noise(100, seed=0), sign * 5 * noise(100, seed=1)
    rows = {1: common + cover, 2: common - cover}
    rows |= {client: noise(100, seed=10 * client + int(sign)) for client in (3, 4, 5)}
    return ids, torch.stack([rows[client] for client in ids])


@pytest.mark.parametrize("ids", [(1, 2, 3, 4, 5), (2, 1, 3, 4, 5), (4, 2, 5, 3, 1)])
def test_histories_reveal_sybils_that_hide_in_one_round(ids: tuple[int, ...]) -> None:
    """Their first updates are nearly opposite; their sums are equal, in any order of clients."""
    first, second = play([hidden((1, 2, 3, 4, 5), 1.0), hidden(ids, -1.0)])
    assert accepted_by(first) == [True] * 5
    assert accepted_by(second) == [client not in (1, 2) for client in ids]


def test_a_history_continues_after_absence() -> None:
    others = ((3, 4), noise(2, 100, seed=9))
    rounds = [hidden((1, 2, 3, 4, 5), 1.0), others, others, hidden((3, 2, 1), -1.0)]
    assert accepted_by(play(rounds)[-1]) == [True, False, False]


def test_ignores_histories_of_absent_clients() -> None:
    rows = noise(3, 50, seed=0)
    same = torch.stack([rows[0], rows[1]])
    outcomes = play([((0, 1, 2), rows), ((5, 6), same), ((0, 5), same)])
    assert accepted_by(outcomes[1]) == [True, True]
    assert accepted_by(outcomes[2]) == [True, True]
    assert accepted_by(play([((0, 1, 2), rows), ((0, 5), rows[[0, 0]])])[1]) == [False, False]


def test_a_new_client_has_no_history() -> None:
    """Client 8 takes the row of sybil 1."""
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
def test_compares_only_the_output_layer(name: str) -> None:
    layers, features = LAYERS[name]
    same = []
    for seed in range(20):
        rows = noise(6, 6, seed=seed)
        outcome = play([(range(6), rows)], layers=layers)[0]
        expected = by_definition(rows.double()[:, features].tolist(), kappa=1.0)
        assert_agrees(outcome, rows, expected, rel=1e-6)
        whole = play([(range(6), rows)], FoolsGold(layers="all"), layers)[0]
        assert_agrees(whole, rows, by_definition(rows.double().tolist(), 1.0), rel=1e-6)
        same.append(trust_of(outcome) == pytest.approx(trust_of(whole), abs=1e-3))
    assert all(same) == (len(features) == 6)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kappa", value) for value in (0.0, -1.0, math.nan, math.inf)] + [("layers", "last")],
)
def test_rejects_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{setting} must be .+, got '?{re.escape(str(value))}"):
        FoolsGold(**{setting: value})


def test_defaults_are_the_settings_of_the_paper() -> None:
    assert FoolsGold() == FoolsGold(layers="output", kappa=1.0)


def test_histories_above_the_limit_of_memory_are_refused_in_one_line() -> None:
    """Also when later clients bring them above it: 8 bytes for each of 4 features."""
    defense = DEFENSES.build({"name": "foolsgold", "layers": "all", "memory_gb": 100e-9})
    rows = torch.eye(4)
    layers = {"w": slice(0, 4)}
    _, state = defense.aggregate(rows[:3], defense.init(), view_of([0, 1, 2], rows, layers=layers))
    with pytest.raises(UserError, match=r"^defense.memory_gb=1e-07: the histories of 4 clients"):
        defense.aggregate(rows[:2], state, view_of([0, 7], rows, layers=layers))


def test_a_run_whose_histories_could_exceed_the_limit_does_not_start(
    federation: Callable[..., Federation],
) -> None:
    """7850 parameters: 40 clients could take part in 5 rounds of 8, but the pool has 20."""
    settings = {"n_clients": 8, "pool": 20, "rounds": 5}
    federation(FoolsGold(layers="all", memory_gb=1.3e-3), **settings)
    too_small = FoolsGold(layers="all", memory_gb=1.2e-3)
    with pytest.raises(UserError, match=r"the histories of 20 clients take 0.0013 GB; raise it"):
        federation(too_small, **settings)
    federation(too_small, **settings | {"rounds": 2})


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = ({"name": "foolsgold", "layers": "all"},)
    invalid: ClassVar[Any] = {
        "layers": ["last", ""],
        "kappa": [-1.0, math.nan, math.inf, -math.inf],
        "memory_gb": [0.0, -4.0, math.nan, math.inf, -math.inf],
    }
