"""A few tries of the soak test of run directories."""

from __future__ import annotations

from tests.soak.run_folders import soak


def test_broken_run_directories_are_never_used() -> None:
    outcomes = [*soak(times=8, seed=0)]
    assert [outcome.failure for outcome in outcomes if outcome.failure is not None] == []
    assert len(outcomes) == 8
