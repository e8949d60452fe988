"""The schedule: attacked rounds, the participants of a round, and pdr by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.attack import ATTACKS
from fedbench.config import RunConfig
from fedbench.engine.client_selection import Participant
from fedbench.errors import UserError
from fedbench.federation import Federation

Make = Callable[..., Federation]


def attacked_rounds(server: Federation, n_rounds: int = 8) -> list[int]:
    rounds = range(-2, n_rounds)
    return [i for i in rounds if any(p.malicious for p in server.rank_context.selection.select(i))]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"attack_start": 5}, [5, 6, 7]),
        ({"attack_rounds": [0]}, [0]),
        ({"attack_rounds": [3]}, [3]),  # a single shot
        ({"attack_rounds": [6, 1, 4]}, [1, 4, 6]),
        ({"attack_rounds": [4, 7], "attack_start": 4}, [4, 7]),
    ],
)
def test_exactly_the_listed_rounds_are_attacked(
    federation: Make, schedule: dict[str, Any], expected: list[int]
) -> None:
    server = federation(rounds=8, **schedule)
    assert attacked_rounds(server) == expected
    assert attacked_rounds(federation(attack=ATTACKS.build({"name": "none"}), **schedule)) == []


def test_a_round_without_an_attack_equals_a_benign_round(federation: Make) -> None:
    server = federation(rounds=4, attack_rounds=[1])
    benign = federation(attack=ATTACKS.build({"name": "none"}), rounds=4)
    state = replace(server.initial(), next_round=0)
    for expected in (False, True, False):
        quiet, _ = benign.round(state)
        end, record = server.round(state)
        assert record["attacked"] is expected
        assert (record["pdr"] == 0.5) is expected
        assert torch.equal(end.params, quiet.params) is not expected
        state = end


@pytest.mark.parametrize("schedule", [{}, {"attack_start": 2}, {"attack_rounds": [1, 3]}])
@pytest.mark.parametrize("malicious", ["fixed", "sampled"])
def test_participants_do_not_depend_on_the_attack(
    federation: Make, malicious: str, schedule: dict[str, Any]
) -> None:
    common = {"n_clients": [4, 8], "pool": 20, "malicious": malicious, "pmr": 0.3}
    attacked = federation(**common, **schedule).rank_context
    benign = federation(attack=ATTACKS.build({"name": "none"}), **common).rank_context
    for index in range(-2, 6):
        ids = [[p.client for p in run.selection.select(index)] for run in (attacked, benign)]
        assert ids[0] == ids[1]
        assert len(set(ids[0])) == attacked.config.n_clients_in(index)


def test_pmr_holds_in_every_round_of_a_range_of_clients(
    federation: Make,
) -> None:
    rank_context = federation(n_clients=[3, 9], pool=20, pmr=0.3).rank_context
    sizes = set()
    for index in range(-10, 40):
        participants = rank_context.selection.select(index)
        n = rank_context.config.n_clients_in(index)
        assert len({p.client for p in participants}) == len(participants) == n
        expected = int(0.3 * n + 0.5) if index >= 0 else 0
        assert sum(p.malicious for p in participants) == expected
        sizes.add((index < 0, n))
    assert {n for benign, n in sizes if not benign} == {*range(3, 10)}
    assert len({n for benign, n in sizes if benign}) > 2


@pytest.mark.parametrize("malicious", ["fixed", "sampled"])
def test_a_range_of_one_number_equals_that_number(federation: Make, malicious: str) -> None:
    number, range_ = (
        federation(n_clients=n, pool=20, malicious=malicious).rank_context.selection
        for n in (6, [6, 6])
    )
    assert [number.select(i) for i in range(-3, 9)] == [range_.select(i) for i in range(-3, 9)]


class TestMalicious:
    def drawn(
        self, federation: Make, malicious: str, n_rounds: int = 400
    ) -> list[list[Participant]]:
        server = federation(pool=20, n_clients=6, pmr=0.3, malicious=malicious)
        assert len(server.rank_context.selection.malicious) == 6
        return [server.rank_context.selection.select(index) for index in range(n_rounds)]

    def test_fixed_is_the_same_number_in_every_round(self, federation: Make) -> None:
        counts = {
            sum(p.malicious for p in participants)
            for participants in self.drawn(federation, "fixed")
        }
        assert counts == {2}

    def test_sampled_is_hypergeometric(self, federation: Make) -> None:
        """P(k) = C(6, k) C(14, 6 - k) / C(20, 6)."""
        drawn = self.drawn(federation, "sampled")
        share = {0: 0.0775, 1: 0.3099, 2: 0.3874, 3: 0.1878, 4: 0.0352, 5: 0.0022}
        counts = Counter(sum(p.malicious for p in participants) for participants in drawn)
        for k, expected in share.items():
            assert counts[k] / len(drawn) == pytest.approx(expected, abs=0.08)
        everyone = Counter(p.client for participants in drawn for p in participants)
        assert min(everyone.values()) > 0.7 * 400 * 6 / 20  # no client is drawn less often

    def test_both_are_equal_if_all_clients_take_part(self, federation: Make) -> None:
        fixed, sampled = (
            federation(malicious=kind).rank_context.selection.select(3)
            for kind in ("fixed", "sampled")
        )
        assert fixed == sampled

    def test_a_round_that_draws_no_malicious_client_is_benign(self, federation: Make) -> None:
        server = federation(pool=20, n_clients=6, pmr=0.1, malicious="sampled")
        index = next(
            i
            for i in range(50)
            if not any(p.malicious for p in server.rank_context.selection.select(i))
        )
        _, record = server.round(replace(server.initial(), next_round=index))
        assert (record["attacked"], record["pdr"], record["TPR"]) == (False, None, None)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # the three schedules in the paper's appendix on small changes
        ((0.1, 0.1, 0.75), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.75]),
        ((0.01, 0.01, 0.1), [0.01 * k for k in range(1, 11)] + [0.1]),
        ((0.1, 0.01, 0.2), [0.1 + 0.01 * k for k in range(11)] + [0.2]),
        ((0.4, 0.0, None), [0.4] * 4),
        ((0.6, 0.3, None), [0.6, 0.9, 1.0, 1.0]),
        ((0.5, -0.2, 0.05), [0.5, 0.3, 0.1, 0.05, 0.05]),
        ((0.3, -0.2, None), [0.3, 0.1, 0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("attack_start", [0, 3])
def test_pdr_by_round(
    schedule: tuple[float, float, float | None], expected: list[float], attack_start: int
) -> None:
    pdr, step, end = schedule
    config = RunConfig(pdr=pdr, pdr_step=step, pdr_end=end, attack_start=attack_start)
    config.check()
    rounds = range(attack_start, attack_start + len(expected))
    assert [config.pdr_in(index) for index in rounds] == pytest.approx(expected)


@settings(derandomize=True)
@given(st.floats(0, 1), st.floats(-1, 1), st.integers(0, 100))
def test_pdr_stays_between_0_and_1(pdr: float, step: float, index: int) -> None:
    config = RunConfig(pdr=pdr, pdr_step=step)
    assert 0 <= config.pdr_in(index) <= 1
    assert config.pdr_in(0) == pdr


def test_the_scheduled_pdr_is_applied_and_recorded(federation: Make) -> None:
    class Counting(type(ATTACKS.build({"name": "constrain_and_scale"}))):  # type: ignore[misc]
        def poison(self, x, y, poisoning):  # type: ignore[no-untyped-def]
            poisoned = super().poison(x, y, poisoning)
            seen.append((int((poisoned[0] != x).flatten(1).any(dim=1).sum()), len(y)))
            return poisoned

    seen: list[tuple[int, int]] = []
    server = federation(attack=Counting(), pdr=0.1, pdr_step=0.2, pdr_end=0.4)
    for index, share in enumerate([0.1, 0.3, 0.4, 0.4]):
        seen.clear()
        _, record = server.round(replace(server.initial(), next_round=index))
        assert record["pdr"] == pytest.approx(share)
        assert seen == [(int(share * n + 0.5), n) for _, n in seen]
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attack_rounds": [10]}, r"attack_rounds=\[10\]: must be rounds from .*=0 to 9"),
        ({"attack_rounds": [-1]}, r"attack_rounds=\[-1\]: must be rounds from"),
        ({"attack_rounds": []}, r"attack_rounds=\[\]: must be rounds from"),
        ({"attack_rounds": [2, 5], "attack_start": 3}, r"attack_rounds=\[2, 5\]: .*attack_start=3"),
        ({"pdr_step": float("nan")}, "pdr_step=nan: must be a finite number"),
        ({"pdr_step": 0.1, "pdr_end": 0.3}, r"pdr_end=0\.3: must be between pdr=0\.5 and 1"),
        ({"pdr_step": 0.1, "pdr_end": 1.5}, r"pdr_end=1\.5: must be between pdr=0\.5 and 1"),
        ({"pdr_step": -0.1, "pdr_end": 0.7}, r"pdr_end=0\.7: must be between 0 and pdr=0\.5"),
        ({"pdr_end": 0.7}, r"pdr_step=0\.0: must be other than 0, to reach pdr_end=0\.7"),
        ({"malicious": "some"}, "malicious=some: must be one of fixed, sampled"),
    ],
)
def test_an_impossible_schedule_is_a_user_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(RunConfig(), **values).check()
