"""One try of the soak test `kill`; `python -m tests.soak kill` makes fifty."""

from __future__ import annotations

import sys

import pytest

from tests.soak import kill


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_killed_sweep_leaves_no_process_and_resumes_to_the_bit() -> None:
    assert [outcome.failure for outcome in kill.soak(1, seed=0)] == [None]
