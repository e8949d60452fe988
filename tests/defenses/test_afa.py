"""AFA: drops clients with outlying cosines, and blocks clients dropped too often."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rounds import accepted_by, runs, scores_of, view_of
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense
from fedbench.testing import DefenseContract

AFA: Any = DEFENSES.get("afa")
Round = tuple[Sequence[int], Tensor]  # ids [N] and updates [N, P]


def step(
    ids: Sequence[int], updates: Tensor, state: Any = None, defense: Defense | None = None
) -> tuple[Aggregate, Any]:
    defense = defense or AFA()
    view = view_of(ids, updates, layers={"0.weight": slice(0, 1), "1.weight": slice(1, None)})
    return defense.aggregate(updates, defense.init() if state is None else state, view)


def play(rounds: Iterable[Round], defense: Defense | None = None) -> tuple[list[Aggregate], Any]:
    """Outcomes of all rounds, and the final state."""
    state, outcomes = None, []
    for ids, updates in rounds:
        outcome, state = step(ids, updates, state, defense)
        outcomes.append(outcome)
    return outcomes, state


def afa(updates: Tensor, **hyper: Any) -> Aggregate:
    return step(range(len(updates)), updates, defense=AFA(**hyper))[0]


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot, aa, bb = (
        math.fsum(x * y for x, y in zip(*pair, strict=True)) for pair in ((a, b), (a, a), (b, b))
    )
    return dot / math.sqrt(aa) / math.sqrt(bb) if aa and bb else 0.0


def median_of(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@cache
def beta_cdf_at_half(a: int, b: int) -> Fraction:
    """BetaCDF(1/2; a, b) = P(Binomial(a + b - 1, 1/2) >= a), exactly."""
    n = a + b - 1
    return Fraction(sum(math.comb(n, k) for k in range(a, n + 1)), 2**n)


class Verdict(NamedTuple):
    update: list[float]
    weights: list[float]
    scores: list[float]
    rounding: float  # error of the scores
    clear: bool  # no decision depends on rounding


@dataclass
class Server:
    """Munoz-Gonzalez et al., Algorithm 1 and section 3, one client at a time."""

    alpha0: int = 3
    beta0: int = 3
    xi: float = 2.0
    xi_step: float = 0.5
    block: float = 0.95
    past: dict[int, tuple[int, int]] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)

    def aggregate(self, ids: Sequence[int], rows: Sequence[Sequence[float]]) -> Verdict:
        update_of = dict(zip(ids, rows, strict=True))
        kept = [client for client in ids if client not in self.blocked]
        taking_part = list(kept)
        xi, clear = self.xi, True
        while kept:
            mean, rounding = self._mean(kept, update_of)
            s = {client: cosine(update_of[client], mean) for client in kept}
            dropped, certain = _dropped(s, xi, rounding)
            clear = clear and certain
            if not dropped:
                break
            kept = [client for client in kept if client not in dropped]
            xi += self.xi_step
        mean, rounding = self._mean(kept, update_of)
        total = sum(self._reputation(client) for client in kept)
        weights = [
            float(self._reputation(client) / total) if client in kept else 0.0 for client in ids
        ]
        scores = [1 - cosine(update_of[client], mean) for client in ids]
        for client in taking_part:
            good, bad = self.past.get(client, (self.alpha0, self.beta0))
            good, bad = (good + 1, bad) if client in kept else (good, bad + 1)
            self.past[client] = good, bad
            if beta_cdf_at_half(good, bad) > self.block:
                self.blocked.add(client)
        return Verdict(mean, weights, scores, rounding, clear and rounding < 1e-6)

    def _reputation(self, client: int) -> Fraction:
        good, bad = self.past.get(client, (self.alpha0, self.beta0))
        return Fraction(good, good + bad)

    def _mean(
        self, kept: Sequence[int], update_of: dict[int, Sequence[float]]
    ) -> tuple[list[float], float]:
        """Mean weighted by reputation, and the error of cosines to it if rows cancel."""
        total = sum(self._reputation(client) for client in kept)
        shares = {client: self._reputation(client) / total for client in kept}
        p = len(next(iter(update_of.values())))
        mean = [
            float(sum(shares[client] * Fraction(update_of[client][k]) for client in kept))
            for k in range(p)
        ]
        largest = max((math.hypot(*update_of[client]) for client in kept), default=0.0)
        length = math.hypot(*mean)
        return mean, 1e-15 * (largest / length) ** 2 if length else 1e-15


def _dropped(s: dict[int, float], xi: float, rounding: float) -> tuple[set[int], bool]:
    values = list(s.values())
    mean, median = math.fsum(values) / len(values), median_of(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    slack = 3 * rounding + 1e-9 * std
    low = {client for client in s if s[client] < median - xi * std}
    high = {client for client in s if s[client] > median + xi * std}
    if std <= 1e-12:
        return set(), std < 1e-13
    certain = std > 1e-11
    if abs(mean - median) <= slack and (low or high):
        certain = False
    bound = median - xi * std if mean < median else median + xi * std
    if any(abs(value - bound) <= (1 + xi) * slack for value in values):
        certain = False
    return (low if mean < median else high), certain


def assert_agrees(outcome: Aggregate, updates: Tensor, expected: Verdict) -> None:
    info = torch.finfo(updates.dtype)
    eps = info.eps
    assert accepted_by(outcome) == [weight > 0 for weight in expected.weights]
    assert outcome.weights.tolist() == pytest.approx(expected.weights, abs=1e-9 + eps)
    tolerance = 10 * expected.rounding
    assert scores_of(outcome) == pytest.approx(expected.scores, rel=1e-6, abs=tolerance)
    for k, found in enumerate(outcome.update.tolist()):
        size = float(updates[:, k].double().abs().max())
        # Below `tiny`, numbers have fewer digits and rounding error is absolute.
        assert abs(found - expected.update[k]) <= 8 * eps * max(size, info.tiny)


def test_by_hand() -> None:
    # All reputations are 3 / 6. The mean is (3/5, 0), s = 1 1 1 1 -1, their mean 3/5 is below the
    # median 1, std = sqrt((4 * 0.16 + 2.56) / 5) = 0.8 and -1 < 1 - 2 * 0.8 is dropped.
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    first, state = step((10, 11, 12, 13, 14), rows)
    assert accepted_by(first) == [True, True, False, True, True]
    assert first.weights.tolist() == [0.25, 0.25, 0, 0.25, 0.25]
    assert first.update.tolist() == [1, 0]
    assert scores_of(first) == pytest.approx([0, 0, 2, 0, 0])
    # Reputations: 12 has 3/7, 10 has 4/7, 15 is new and has 3/6; divided by 21/14: 6, 8, 7 of 21.
    rows = torch.tensor([[21.0, 0.0], [42.0, 0.0], [63.0, 0.0]])
    second, _ = step((12, 10, 15), rows, state)
    assert accepted_by(second) == [True] * 3
    assert second.weights.tolist() == pytest.approx([6 / 21, 8 / 21, 7 / 21])
    assert second.update.tolist() == pytest.approx([6 + 16 + 21, 0])


def test_drops_a_client_too_close_to_the_mean_by_hand() -> None:
    # The mean is (1, 1, 1, 1, 1, 2) / 6, of norm 3/6: s = 1/3 five times, and 2/3 for the last.
    # Their mean 7/18 is above the median 1/3, std = sqrt((5 + 25) / 324 / 6) = 0.1242 and
    # 2/3 > 1/3 + 2 * 0.1242 = 0.5818 is dropped. Then s = 1 / sqrt 5 for all.
    rows = torch.eye(6)
    rows[5] *= 2
    outcome = afa(rows)
    assert accepted_by(outcome) == [True] * 5 + [False]
    assert outcome.update.tolist() == pytest.approx([0.2] * 5 + [0])
    assert scores_of(outcome) == pytest.approx([1 - 5**-0.5] * 5 + [1])


def test_std_is_that_of_the_population() -> None:
    # s = 1 1 -1: std = sqrt(8/9) = 0.94, -1 < 1 - 1.89. With N - 1 it is 1.15, and none is dropped.
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert accepted_by(afa(rows)) == [True, True, False]


def test_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    # s = 1 1 0 0: mean and median 1/2, std 1/2, bounds 1/2 +- 3/4. The lower middle value, 0, would
    # drop clients above 3/4; the upper one, 1, would drop clients below 1/4.
    assert accepted_by(afa(column(1, 1, 0, 0), xi=1.5)) == [True] * 4
    # s = 1 1 1 0 0 -1: mean 1/3, median 1/2, std = sqrt(5) / 3, -1 < 1/2 - 1.49. With the lower
    # middle value, 0, the mean is above the median, and no client is far enough above.
    assert accepted_by(afa(column(1, 1, 1, 0, 0, -1))) == [True] * 5 + [False]


def steps_of_xi() -> Tensor:
    # The mean is (2.8, 0.6) / 5: s = 0.978 three times, 0.908 and -0.978, which is dropped. Then
    # one of four differs, which is 4 / sqrt 3 = 2.31 std from the median at any distance.
    return torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]])


def test_xi_grows_while_clients_are_dropped() -> None:
    assert accepted_by(afa(steps_of_xi())) == [True, True, True, True, False]
    assert accepted_by(afa(steps_of_xi(), xi_step=0.25)) == [True, True, True, False, False]


def test_xi_is_reset_in_every_round() -> None:
    outcomes, _ = play([(range(5), steps_of_xi()), (range(5, 9), steps_of_xi()[:4])])
    assert accepted_by(outcomes[0]) == [True, True, True, True, False]
    assert accepted_by(outcomes[1]) == [True, True, True, False]


settings_of_a_run = st.fixed_dictionaries(
    {
        "xi": st.sampled_from([0.6, 1.1, 2.0]),
        "xi_step": st.sampled_from([0.1, 0.5]),
        "block": st.sampled_from([0.6, 0.8, 0.95]),
    }
).flatmap(
    lambda hyper: st.sampled_from([(1, 1), (2, 1), (3, 3)]).map(
        lambda prior: hyper | {"alpha0": prior[0], "beta0": prior[1]}
    )
)


def compare(
    run: list[tuple[list[int], np.ndarray]], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    """Compare up to the first round in which rounding decides."""
    server, defense, state = Server(**hyper), AFA(**hyper), None
    for index, (ids, rows) in enumerate(run):
        updates = torch.tensor(rows, dtype=dtype)
        expected = server.aggregate(ids, updates.double().tolist())
        if not expected.clear:
            assume(index > 0)
            return
        outcome, state = step(ids, updates, state, defense)
        assert_agrees(outcome, updates, expected)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    runs(st.integers(-3, 3).map(float), max_rounds=6),
    settings_of_a_run,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition_on_integers(
    run: list[tuple[list[int], np.ndarray]], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    """Many zero and parallel rows."""
    compare(run, hyper, dtype)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    runs(st.floats(-1e3, 1e3, width=32), max_rounds=6),
    settings_of_a_run,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition_on_floats(
    run: list[tuple[list[int], np.ndarray]], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    compare(run, hyper, dtype)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("relative", [1e-2, 1e-3, 1e-4])
def test_separates_nearly_equal_rows(relative: float) -> None:
    """Ten float32 clients, and one with an extra deviation three times as large; four rounds."""
    n_dropped = 0
    for seed in range(5):
        server, rounds = Server(), []
        for index in range(4):
            rows = 1 + relative * noise(11, 60, seed=100 * seed + index)
            rows[5] += 3 * relative * noise(60, seed=seed)
            rounds.append((range(11), noise(60, seed=seed) * rows))
        for outcome, (ids, updates) in zip(play(rounds)[0], rounds, strict=True):
            expected = server.aggregate(ids, updates.double().tolist())
            assert expected.clear
            assert_agrees(outcome, updates, expected)
            assert not accepted_by(outcome)[5]
            n_dropped += accepted_by(outcome).count(False)
    assert n_dropped > 20  # honest ones too: 2 to 2.5 std is a tight bound


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e30])
def test_is_invariant_to_the_scale_of_updates(scale: float) -> None:
    rows = poisoned(10, 3)
    outcome, scaled = afa(rows), afa(rows * scale)
    assert accepted_by(scaled) == accepted_by(outcome)
    assert scores_of(scaled) == pytest.approx(scores_of(outcome), abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 10])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.0])
def test_keeps_all_clients_with_the_same_direction(n: int, value: float) -> None:
    """Their cosines differ by rounding error, so their std is not exactly 0."""
    rows = (value * noise(1, 50, seed=0)).expand(n, -1).clone() * torch.arange(1, n + 1)[:, None]
    for dtype in (torch.float32, torch.float64):
        outcome = afa(rows.to(dtype))
        assert accepted_by(outcome) == [True] * n
        assert outcome.weights.tolist() == pytest.approx([1 / n] * n)
        assert scores_of(outcome) == pytest.approx([0] * n, abs=1e-6)


def test_keeps_all_clients_if_the_mean_is_zero() -> None:
    opposed = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    for rows in (opposed, torch.zeros(3, 2)):
        outcome = afa(rows)
        assert accepted_by(outcome) == [True] * len(rows)
        assert outcome.update.tolist() == [0, 0]
        assert scores_of(outcome) == [1] * len(rows)


def test_a_zero_row_has_cosine_zero() -> None:
    # s = 1 1 1 0: the zero row is 4 / sqrt 3 > 2 standard deviations from the median.
    outcome = afa(column(1, 1, 1, 0))
    assert accepted_by(outcome) == [True, True, True, False]
    assert scores_of(outcome) == pytest.approx([0, 0, 0, 1])


def poisoned(n: int, n_malicious: int, seed: int = 0) -> Tensor:
    """Malicious rows first, around -1; honest rows around 1."""
    rows = 1 + 0.5 * noise(n, 300, seed=seed)
    rows[:n_malicious] -= 2
    return rows


@pytest.mark.parametrize(("n", "n_malicious"), [(5, 1), (10, 1), (10, 2), (30, 4)])
def test_drops_a_minority_in_another_direction(n: int, n_malicious: int) -> None:
    """And few honest clients."""
    rows = poisoned(n, n_malicious)
    outcome = afa(rows)
    accepted = accepted_by(outcome)
    assert not any(accepted[:n_malicious])
    assert sum(accepted) >= 0.95 * (n - n_malicious)
    torch.testing.assert_close(outcome.update, rows[accepted].mean(dim=0))
    scores = scores_of(outcome)
    assert min(scores[:n_malicious]) > 1.5 > 0.5 > max(scores[n_malicious:])


@pytest.mark.parametrize("scale", [0.01, 1.0, 2.0])
def test_drops_an_outlier_of_any_norm(scale: float) -> None:
    rows = poisoned(10, 1)
    rows[0] *= scale
    assert accepted_by(afa(rows)) == [False] + [True] * 9


@pytest.mark.parametrize(("n", "n_malicious"), [(10, 8), (30, 26)])
def test_a_malicious_majority_wins(n: int, n_malicious: int) -> None:
    accepted = accepted_by(afa(poisoned(n, n_malicious)))
    assert not any(accepted[n_malicious:])
    assert sum(accepted) >= 0.9 * n_malicious


def test_drops_colluders_too_close_to_the_mean() -> None:
    """Their long updates dominate the mean, since the other clients have little in common."""
    rows = noise(20, 300, seed=0)
    rows[:3] = 20 * noise(300, seed=1) + 0.1 * noise(3, 300, seed=2)
    outcome = afa(rows)
    assert accepted_by(outcome) == [False] * 3 + [True] * 17
    assert outcome.update.norm() < 1.5 * rows[3:].mean(dim=0).norm()


def test_drops_some_honest_clients_without_an_attack() -> None:
    n_dropped = sum(accepted_by(afa(poisoned(30, 0, seed))).count(False) for seed in range(10))
    assert 0 < n_dropped < 30


def offence(ids: Sequence[int], offenders: Sequence[int]) -> Round:
    """Offenders send (-1, 0), all other clients (1, 0)."""
    return ids, torch.tensor([[-1.0 if client in offenders else 1.0, 0.0] for client in ids])


def is_blocked(client: int, state: Any) -> bool:
    """Whether the client is rejected although it sends the same update as others."""
    outcome, _ = step((1001, client, 1002), torch.ones(3, 2), state)
    accepted = accepted_by(outcome)
    assert accepted[0]
    assert accepted[2]
    return not accepted[1]


def test_blocks_a_new_client_at_its_sixth_drop_in_a_row() -> None:
    # P(Beta(3, 3 + k) < 1/2) = P(at least 3 heads of 5 + k): 1 - 56/1024 = 0.9453 for k = 5,
    # 1 - 67/2048 = 0.9673 for k = 6.
    state = None
    for n_drops in range(1, 10):
        outcome, state = step(*offence(range(7), [4]), state)
        assert accepted_by(outcome) == [True, True, True, True, False, True, True]
        assert is_blocked(4, state) == (beta_cdf_at_half(3, 3 + n_drops) > 0.95) == (n_drops >= 6)
        assert not any(is_blocked(client, state) for client in (0, 6, 7, 99))


@pytest.mark.parametrize("n_kept", [1, 5, 60])
def test_a_good_reputation_delays_blocking(n_kept: int) -> None:
    _, state = play([offence((3, 4, 5), [])] * n_kept)
    limit = next(k for k in range(200) if beta_cdf_at_half(3 + n_kept, 3 + k) > 0.95)
    assert limit > 6
    for n_drops in range(1, limit + 1):
        _, state = step(*offence((3, 4, 5), [4]), state)
        assert is_blocked(4, state) == (n_drops >= limit)


def test_a_kept_round_between_drops_counts() -> None:
    drops = [offence(range(5), [2])] * 5
    _, state = play([*drops, offence(range(5), []), *drops[:1]])
    assert not is_blocked(2, state)  # Beta(4, 9): P(at least 4 heads of 12) = 1 - 299/4096 = 0.927
    _, state = play([*drops, offence(range(5), []), *drops[:2]])
    assert is_blocked(2, state)  # Beta(4, 10): 1 - 378/8192 = 0.954


@pytest.mark.parametrize(("block", "n_drops"), [(0.74, 1), (0.76, 2), (0.87, 2), (0.88, 3)])
def test_block_threshold(block: float, n_drops: int) -> None:
    # P(Beta(1, 1 + k) < 1/2) = 1 - 1/2^(k + 1): 3/4, 7/8, 15/16.
    defense = AFA(alpha0=1, beta0=1, block=block)
    for k in range(1, 5):
        _, state = play([offence(range(5), [0])] * k, defense)
        outcome, _ = step(range(5), torch.ones(5, 2), state, defense)
        assert accepted_by(outcome) == [k < n_drops] + [True] * 4


def test_does_not_block_at_exactly_the_threshold() -> None:
    defense = AFA(alpha0=1, beta0=1, block=0.75)
    _, state = play([offence(range(5), [0])], defense)
    assert accepted_by(step(range(5), torch.ones(5, 2), state, defense)[0]) == [True] * 5


@pytest.mark.parametrize("block", [0.5, 0.75, 0.95, 0.99, 1.0])
def test_blocking_is_exact(block: float) -> None:
    """Rounding error of the Beta CDF decides nothing, not even at exactly 1/2 for a = b."""
    defense = AFA(alpha0=1, beta0=1, block=block)
    for a in range(1, 80):
        for b in range(1, 80):
            assert defense.blocks(a, b) == (beta_cdf_at_half(a, b) > block)


def test_a_blocked_client_stays_blocked() -> None:
    """Even if it behaves well, and after absence."""
    rounds = [offence(range(5), [2])] * 6 + [offence((3, 1, 0, 4), [])] * 3
    good = [offence(range(5), [])] * 60
    outcomes, state = play(rounds + good)
    for outcome in outcomes[9:]:
        assert accepted_by(outcome) == [True, True, False, True, True]
        assert outcome.weights.tolist() == pytest.approx([0.25, 0.25, 0, 0.25, 0.25])
        assert scores_of(outcome) == pytest.approx([0] * 5, abs=1e-9)
    assert is_blocked(2, state)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
def test_ignores_rows_of_blocked_clients(seed: int, scale: float) -> None:
    """The result is the same as without them, except that they have a score."""
    _, state = play([offence(range(12), [2, 5])] * 6)
    rows = poisoned(8, 0, seed)
    rows[0] = -rows[0]
    rows[3] *= -scale
    rows[6] = scale * noise(300, seed=seed)
    ids = (0, 1, 3, 2, 4, 6, 5, 7)
    others = [0, 1, 2, 4, 5, 7]
    outcome, after = step(ids, rows, state)
    alone, after_alone = step([ids[k] for k in others], rows[others], state)
    assert outcome.weights[[3, 6]].tolist() == [0, 0]
    assert accepted_by(outcome)[3] is accepted_by(outcome)[6] is False
    torch.testing.assert_close(outcome.update, alone.update)
    torch.testing.assert_close(outcome.weights[others], alone.weights)
    assert [accepted_by(outcome)[k] for k in others] == accepted_by(alone)
    scores = scores_of(outcome)
    assert [scores[k] for k in others] == pytest.approx(scores_of(alone))
    mean = alone.update.double().tolist()
    for k in (3, 6):
        assert scores[k] == pytest.approx(1 - cosine(rows[k].double().tolist(), mean), abs=1e-6)
    for client in range(12):
        assert is_blocked(client, after) == is_blocked(client, after_alone) == (client in (2, 5))


def test_no_update_if_all_clients_are_blocked() -> None:
    _, state = play([offence(range(12), [2, 5])] * 6)
    outcome, after = step((5, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), state)
    assert outcome.update.tolist() == [0, 0]
    assert outcome.weights.tolist() == [0, 0]
    assert accepted_by(outcome) == [False, False]
    assert scores_of(outcome) == [1, 1]
    assert is_blocked(5, after)
    outcome, _ = step((5, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), after)
    assert outcome.update.tolist() == [3, 4]


def test_reputation_belongs_to_the_client_and_not_to_the_row() -> None:
    """Client 2 offends from a different row in each round, then moves to another one."""
    turns = [[(k + shift) % 7 for k in range(7)] for shift in range(6)]
    outcomes, state = play([offence(ids, [2]) for ids in turns])
    for ids, outcome in zip(turns, outcomes, strict=True):
        assert accepted_by(outcome) == [client != 2 for client in ids]
    assert [is_blocked(client, state) for client in range(8)] == [k == 2 for k in range(8)]
    outcome, _ = step((7, 6, 5, 4, 3, 2, 1, 0), torch.ones(8, 2), state)
    # Kept in six rounds: 9/12. Client 7 is new: 3/6. The ratio is 3 to 2.
    assert outcome.weights.tolist() == pytest.approx([k / 20 for k in (2, 3, 3, 3, 3, 0, 3, 3)])


def test_reputation_continues_after_absence() -> None:
    drop, away = offence(range(5), [2]), offence((0, 1, 3, 4), [])
    _, state = play([drop, away, drop, drop, away, away, drop, drop])
    assert not is_blocked(2, state)
    assert is_blocked(2, step(*drop, state)[1])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("alpha0", 0), ("alpha0", -1), ("beta0", 0), ("beta0", -2)],
        *[("xi", 0.0), ("xi", -1.0), ("xi", math.nan), ("xi", math.inf)],
        *[("xi_step", -0.5), ("xi_step", math.nan), ("xi_step", math.inf)],
        *[("block", 0.0), ("block", -0.1), ("block", 1.1), ("block", math.nan)],
    ],
)
def test_rejects_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{setting} must be .+, got {re.escape(str(value))}"):
        AFA(**{setting: value})


def test_rejects_a_threshold_that_blocks_new_clients() -> None:
    with pytest.raises(ValueError, match=r"block must .+, got 0\.95"):
        AFA(alpha0=3, beta0=9)
    AFA(alpha0=3, beta0=8)


def test_defaults_are_the_settings_of_the_paper() -> None:
    assert AFA() == AFA(alpha0=3, beta0=3, xi=2.0, xi_step=0.5, block=0.95)


@pytest.mark.parametrize("size", [1e2, 1e8, 1e15, 1e30])
def test_opposite_clients_cannot_hide_the_direction_of_the_others(size: float) -> None:
    """Exactly, they cancel: the sum is that of the honest rows, orthogonal to theirs."""
    rows = torch.zeros(8, 5)
    rows[0, 4], rows[1, 4] = size, -size
    rows[2:, :3] = 1 + 0.1 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    outcome = afa(rows)
    assert accepted_by(outcome) == [False] * 2 + [True] * 6
    assert torch.allclose(outcome.update, rows[2:].mean(dim=0))


@pytest.mark.parametrize("name", ["alpha0", "beta0"])
def test_counts_of_new_clients_are_bounded(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be between 1 and 10000, got 1000000$"):
        AFA(**{name: 1_000_000})


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = ({"name": "afa", "xi": 0.5, "xi_step": 0.25, "block": 0.6},)
    invalid: ClassVar[Any] = {
        "alpha0": [0, -3, 10_001],
        "beta0": [0, -3, 10_001],
        "xi": [-0.5, math.nan, math.inf, -math.inf],
        "xi_step": [-0.5, math.nan, math.inf, -math.inf],
        "block": [-0.1, 1.1, math.nan, math.inf, -math.inf],
    }
