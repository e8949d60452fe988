"""Rounds from the end of an attack to an event: by hand, and against a slow oracle."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench.results.after_attack import (
    LIFESPANS,
    ROUNDS_AFTER,
    Wait,
    censored_lifespans,
    lifespan,
    rounds_after_attack,
    wait_after_attack,
)

ATTACKED = [False, True, True, False, False, False]  # the attack ends with round 2


@pytest.mark.parametrize(
    ("attacked", "n"),
    [
        (ATTACKED, 3),
        ([True, False, True], 0),
        ([True, False, False, True, False], 1),  # from the last attacked round on
        ([False, False], None),
    ],
)
def test_rounds_after_the_attack(attacked: list[bool], n: int | None) -> None:
    assert rounds_after_attack(attacked) == n


@pytest.mark.parametrize(
    ("accuracies", "rounds", "censored"),
    [
        # Round 2 is the last attacked one. BA of round 2 + k is the first below 50 %: k rounds.
        ([0.0, 1.0, 0.4, 0.9, 0.9, 0.9], 0, False),
        ([0.0, 0.1, 1.0, 0.4, 0.9, 0.9], 1, False),  # what comes later does not count
        ([0.0, 0.1, 1.0, 0.9, 0.4, 0.0], 2, False),
        ([0.0, 0.1, 1.0, 0.9, 0.8, 0.4], 3, False),  # as long as the run, but it did end
        ([0.0, 0.1, 1.0, 0.9, 0.8, 0.5], 3, True),  # 50 % is not below 50 %
        # evaluate_every=3: rounds 2 and 5
        ([None, None, 1.0, None, None, 0.4], 3, False),
        ([None, None, 1.0, None, None, 0.9], 3, True),
        ([None, None, 0.1, None, None, 0.9], 0, False),
        # evaluate_every=4: rounds 3 and 5, not the last attacked one
        ([None, None, None, 0.1, None, 0.1], 1, False),
    ],
)
def test_a_lifespan_by_hand(accuracies: list[float | None], rounds: int, censored: bool) -> None:
    below = [None if ba is None else ba < 0.5 for ba in accuracies]
    assert wait_after_attack(ATTACKED, below) == Wait(rounds, censored)
    assert lifespan(ATTACKED, accuracies, 0.5) == rounds
    metrics = {"BA": accuracies[-1], "lifespan_50": rounds, ROUNDS_AFTER: 3}
    assert censored_lifespans(metrics) == {*["lifespan_50"] * censored}


@pytest.mark.parametrize(
    ("attacked", "accuracies"),
    [
        ([False, False, False], [0.0, 0.0, 0.0]),  # no attack
        ([False, True, True], [0.0, 1.0, 0.2]),  # no round after it
        ([True, True, False], [None, None, None]),  # no backdoor
        ([True, True, False], [0.9, None, None]),  # none when it ended
    ],
)
def test_nothing_to_observe(attacked: list[bool], accuracies: list[float | None]) -> None:
    assert lifespan(attacked, accuracies, 0.5) is None


def test_runs_of_older_versions_have_no_lower_bounds() -> None:
    assert censored_lifespans({"BA": 0.9, "MA": 0.8}) == frozenset()
    assert censored_lifespans({"BA": 0.9, "lifespan_50": None, ROUNDS_AFTER: None}) == frozenset()
    assert censored_lifespans({"BA": None, "lifespan_50": 3, ROUNDS_AFTER: 3}) == frozenset()


def oracle(rounds: list[tuple[bool, float | None]], threshold: float) -> tuple[int, bool] | None:
    """Walk through the rounds one by one."""
    last = None
    for index, (attacked, _) in enumerate(rounds):
        if attacked:
            last = index
    if last is None or last == len(rounds) - 1:
        return None
    n_evaluated = 0
    for index, (_, ba) in enumerate(rounds):
        if index >= last and ba is not None:
            n_evaluated += 1
            if ba < threshold:
                return index - last, False
    return (len(rounds) - 1 - last, True) if n_evaluated else None


ROUNDS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, 0.0, 0.05, 0.1, 0.3, 0.5, 0.9])),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROUNDS, st.sampled_from([0.0, 0.2, 0.5, 0.95]))
def test_lifespans_equal_a_walk_through_the_rounds(
    rounds: list[tuple[bool, float | None]], final: float
) -> None:
    rounds[-1] = rounds[-1][0], final  # the last round is always evaluated
    attacked, accuracies = [pair[0] for pair in rounds], [pair[1] for pair in rounds]
    metrics: dict[str, float | None] = {"BA": final, ROUNDS_AFTER: rounds_after_attack(attacked)}
    expected = {key: oracle(rounds, threshold) for key, threshold in LIFESPANS.items()}
    for key, threshold in LIFESPANS.items():
        metrics[key] = lifespan(attacked, accuracies, threshold)
        found = expected[key]
        assert metrics[key] == (None if found is None else found[0])
    assert censored_lifespans(metrics) == {
        key for key, found in expected.items() if found and found[1]
    }
    long, short = metrics["lifespan_10"], metrics["lifespan_50"]
    assert (long is None) == (short is None)
    assert long is None or short is None or long >= short
