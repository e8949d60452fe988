"""Median: a majority of the clients decides each coordinate, whatever the others send."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, ServerView

Median = DEFENSES.get("median")
floats = st.floats(-(2.0**100), 2.0**100, width=32)
shapes = st.tuples(st.integers(1, 11), st.integers(1, 3))


def median(updates: Tensor) -> Aggregate:
    n, p = updates.shape
    zeros = torch.zeros(p)
    view = ServerView(0, torch.arange(n), zeros, zeros, {"w": slice(0, p)}, torch.Generator())
    return Median().aggregate(updates, None, view)[0]


def test_by_hand() -> None:
    # Columns 1 2 4 10 and -3 0 0 5: the middle values are 2 4 and 0 0, their means 3 and 0.
    rows = torch.tensor([[10.0, 0.0], [1.0, -3.0], [4.0, 5.0], [2.0, 0.0]])
    outcome = median(rows)
    assert outcome.update.tolist() == [3, 0]
    assert outcome.weights.tolist() == [0.25] * 4
    assert outcome.accepted is None  # it does not judge clients
    assert outcome.scores is None
    assert median(rows[:3]).update.tolist() == [4, 0]  # 1 4 10 and -3 0 5


def exact_median(column: list[float]) -> tuple[float, float]:
    """The median and the largest absolute middle value, which bounds the rounding error."""
    ordered = sorted(map(Fraction, column))
    half = len(ordered) // 2
    middle = [ordered[half]] if len(ordered) % 2 else ordered[half - 1 : half + 1]
    return float(sum(middle) / len(middle)), float(max(map(abs, middle)))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(hnp.arrays(np.float64, shapes, elements=floats), st.sampled_from(["float32", "float64"]))
def test_against_exact_arithmetic(rows: np.ndarray, dtype: str) -> None:
    """Elements are float32 numbers, so both dtypes represent them exactly."""
    update = median(torch.tensor(rows, dtype=getattr(torch, dtype))).update.tolist()
    for column, found in zip(rows.T, update, strict=True):
        expected, largest = exact_median(column.tolist())
        tolerance = np.finfo(dtype).eps * largest + np.finfo(dtype).tiny
        assert abs(found - expected) <= (tolerance if len(column) % 2 == 0 else 0)


def poisoned(n: int, n_malicious: int) -> tuple[Tensor, Tensor]:
    """The honest rows, between -1 and 1, and all rows: malicious ones come first and are 1000."""
    rows = torch.rand(n, 50, generator=torch.Generator().manual_seed(n)) * 2 - 1
    rows[:n_malicious] = 1000
    return rows[n_malicious:], rows


@pytest.mark.parametrize(("n", "n_malicious"), [(3, 1), (9, 4), (10, 4), (30, 14)])
def test_a_minority_cannot_move_the_update_out_of_the_honest_range(
    n: int, n_malicious: int
) -> None:
    honest, rows = poisoned(n, n_malicious)
    update = median(rows).update
    assert (update >= honest.min(dim=0).values).all()
    assert (update <= honest.max(dim=0).values).all()


@pytest.mark.parametrize(("n", "n_malicious"), [(3, 2), (9, 5), (10, 6), (30, 16)])
def test_a_majority_decides(n: int, n_malicious: int) -> None:
    assert (median(poisoned(n, n_malicious)[1]).update == 1000).all()


def test_half_of_the_clients_move_the_update_halfway() -> None:
    update = median(poisoned(10, 5)[1]).update
    assert (update > 400).all()
    assert (update < 600).all()
