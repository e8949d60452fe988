"""A few tries of the soak test."""

from tests.soak import configs


def test_generated_configurations_are_valid_or_refused_in_one_line() -> None:
    found = [*configs.soak(20, seed=1)]
    assert len(found) == 20
    assert [outcome for outcome in found if outcome.failure is not None] == []
