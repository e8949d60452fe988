"""Every defense survives updates that are hostile but finite, round after round."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import shipped

from fedbench.defense import DEFENSES
from fedbench.testing.rounds import SMALL, honest, view_of
from fedbench.testing.verify import verify_result, verify_state

HONEST = honest(4)  # [4, P]
GLOBAL = view_of(HONEST).global_params
ROWS = torch.cat(  # [K, P] to choose from, and to scale
    [
        HONEST,
        HONEST[:1] * (1 + 1e-4 * honest(2, seed=1)),  # nearly equal to the first
        HONEST[:2].sign(),
        torch.eye(SMALL.n_params, dtype=torch.float64)[-1:],  # one coordinate
        GLOBAL[None],
        torch.zeros(1, SMALL.n_params, dtype=torch.float64),
    ]
)
SIZES = (1.0, 1e-45, 1e-38, 1e-30, 1e-9, 1e-4, 1e4, 1e9, 1e19, 1e30, 1e36)
rows = st.tuples(st.integers(0, len(ROWS) - 1), st.sampled_from(SIZES), st.sampled_from((1, -1)))
rounds_of_rows = st.lists(st.lists(rows, min_size=1, max_size=8), min_size=1, max_size=3)


@pytest.mark.parametrize("name", shipped(DEFENSES))
@settings(max_examples=25, deadline=None)
@given(rounds=rounds_of_rows)
def test_results_of_hostile_rounds_are_finite_and_consistent(
    name: str, rounds: list[list[tuple[int, float, int]]]
) -> None:
    """Without an exception or a warning. The harness, too, skips rounds of too few clients."""
    defense = DEFENSES.build({"name": name})
    state: Any = defense.init()
    for index, drawn in enumerate(rounds):
        updates = torch.stack([sign * size * ROWS[row] for row, size, sign in drawn]).float()
        try:
            defense.check(len(updates))
        except ValueError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome, state = defense.aggregate(updates, state, view_of(updates, index=index))
        verify_result(outcome, updates)
        verify_state(state)
