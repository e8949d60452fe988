"""A few tries of the soak test."""

from tests.soak import data_files


def test_mutated_files_are_read_or_refused_in_one_line() -> None:
    found = [*data_files.soak(150, seed=1)]
    assert len(found) == 150
    assert [outcome for outcome in found if outcome.failure is not None] == []
