"""A few tries of the soak test of hostile answers."""

from __future__ import annotations

from tests.soak.plugins import TIMES, answers, soak


def test_hostile_answers_are_refused_in_one_line_or_valid() -> None:
    outcomes = [*soak(60, seed=0)]
    assert [outcome.failure for outcome in outcomes if outcome.failure] == []
    assert len({outcome.kind for outcome in outcomes}) == 2


def test_the_command_tries_every_answer_of_every_method() -> None:
    assert len(answers()) <= TIMES
