"""min_max: as far from honest updates as any two of them are from each other, and no further."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from untargeted import (
    Make,
    assert_refused,
    centres,
    dtypes,
    exchange,
    nearly_equal,
    sent_by,
    spreads,
    view_of,
)

from fedbench.attack import ATTACKS
from fedbench.results.run_dir import Record

MinMax: Any = ATTACKS.get("min_max")
PERTURBATIONS = ("std", "unit", "sign")
every_perturbation = pytest.mark.parametrize("perturbation", PERTURBATIONS)
perturbations = st.sampled_from(PERTURBATIONS)


def direction_of(rows: np.ndarray, perturbation: str) -> np.ndarray:
    mean = rows.mean(axis=0)
    if perturbation == "sign":
        return -np.sign(mean)
    if perturbation == "std":
        return -rows.std(axis=0, ddof=1) if len(rows) > 1 else 0 * mean
    length = np.sqrt((mean**2).sum())
    return -mean / length if length else 0 * mean


def farthest(row: np.ndarray, rows: np.ndarray) -> float:
    return float(np.sqrt(((rows - row) ** 2).sum(axis=1)).max())


def reach_of(rows: np.ndarray) -> float:
    return max(farthest(row, rows) for row in rows)


def by_definition(rows: np.ndarray, perturbation: str) -> np.ndarray:
    """Shejwalkar and Houmansadr: gamma by halving an interval that holds it."""
    mean, step, reach = rows.mean(axis=0), direction_of(rows, perturbation), reach_of(rows)
    if not step.any():
        return mean
    low, high = 0.0, 1e-30
    while farthest(mean + high * step, rows) <= reach:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if farthest(mean + middle * step, rows) <= reach:
            low = middle
        else:
            high = middle
    return mean + low * step


def in_numpy(rows: Tensor) -> np.ndarray:
    return rows.double().numpy()


def assert_largest(sent: Tensor, known: Tensor, perturbation: str, rel: float = 1e-5) -> None:
    """Keeps the constraint to `rel`, would not with a gamma 0.1% larger, and lies along p."""
    rows, row = in_numpy(known), in_numpy(sent)
    mean, reach = rows.mean(axis=0), reach_of(rows)
    assert farthest(row, rows) <= reach * (1 + rel)
    assert farthest(mean + 1.001 * (row - mean), rows) > reach * (1 + rel)
    way, step = row - mean, direction_of(rows, perturbation)
    assert way @ step / math.sqrt((way @ way) * (step @ step)) > 1 - 1e-5


def test_by_hand() -> None:
    # The mean of (0, 3) and (2, 3) is (1, 3); they are 2 apart, so that x may be 2 from each.
    #   std:  x = (1 - t, 3),          from (2, 3): (1 + t)^2          = 4, t = 1
    #   unit: x = (1 - t, 3 - 3 t),    from (2, 3): (1 + t)^2 + 9 t^2  = 4, t = (-1 + sqrt(31)) / 10
    #   sign: x = (1 - t, 3 - t),      from (2, 3): (1 + t)^2 + t^2    = 4, t = (-1 + sqrt(7)) / 2
    # (0, 3) would allow more: t = 3, (1 + sqrt(31)) / 10 and (1 + sqrt(7)) / 2.
    known = torch.tensor([[0.0, 3.0], [2.0, 3.0]])
    expected = {"std": [0, 3], "unit": [0.543224, 1.629671], "sign": [0.177124, 2.177124]}
    for perturbation, row in expected.items():
        attack = MinMax(perturbation=perturbation)
        sent = attack.collude(torch.full((3, 2), 99.0), view_of(5, 3, known))
        assert len(sent) == 3
        for one in sent:
            assert one.tolist() == pytest.approx(row, abs=1e-5)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 8), st.integers(1, 5)),
        elements=st.integers(-3, 3).map(float),
    ),
    perturbations,
    st.integers(1, 10),
    dtypes,
    st.booleans(),
)
def test_on_whole_numbers(
    rows: np.ndarray, perturbation: str, n_others: int, dtype: torch.dtype, omniscient: bool
) -> None:
    """Where it is certain which coordinates of the mean are 0, and many rows are equal."""
    known = torch.tensor(rows, dtype=dtype)
    attack = MinMax(omniscient=omniscient, perturbation=perturbation)
    sent = sent_by(attack, known, n_others)
    error = 100 * torch.finfo(dtype).eps * 3
    np.testing.assert_allclose(
        in_numpy(sent), by_definition(rows, perturbation), rtol=0, atol=error
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(spreads, centres, perturbations, dtypes)
def test_on_any_numbers(
    spread: np.ndarray, centre: float, perturbation: str, dtype: torch.dtype
) -> None:
    """Far from the origin too, where rows differ in their last bits only."""
    known = torch.tensor(spread + centre, dtype=dtype)
    rows = in_numpy(known)
    largest, eps = float(np.abs(rows).max()), torch.finfo(dtype).eps
    if perturbation != "std":  # which side a coordinate is on must not depend on rounding
        assume(np.abs(rows.mean(axis=0)).min() > 1e-3 * largest)
    sent = sent_by(MinMax(perturbation=perturbation), known, 3)
    expected = by_definition(rows, perturbation)
    np.testing.assert_allclose(in_numpy(sent), expected, rtol=0, atol=100 * eps * largest + 1e-30)


@every_perturbation
@pytest.mark.parametrize("n", [2, 3, 10, 30])
def test_the_largest_of_nearly_equal_updates(perturbation: str, n: int) -> None:
    """Rows of float32 numbers, 1e-4 of their size apart; 30 of them are summed in several parts."""
    # Along the signs all coordinates of one binade are moved by the same length and rounded to
    # float32 by the same error, so that the errors add up; in float64 there are none to speak of.
    single = 2e-4 if perturbation == "sign" else 1e-5
    for seed in range(2):
        known = nearly_equal(n, 20_000, seed)
        for rows, rel in ((known, single), (known.double(), 1e-11)):
            sent = sent_by(MinMax(perturbation=perturbation), rows, 6)
            assert_largest(sent, rows, perturbation, rel)


@every_perturbation
@pytest.mark.parametrize("omniscient", [True, False])
def test_what_is_sent_is_the_largest_in_a_round(
    federation: Make, perturbation: str, omniscient: bool
) -> None:
    attacked = exchange(
        federation, MinMax(omniscient=omniscient, perturbation=perturbation), pmr=0.5
    )
    known, others = attacked.honest, attacked.own
    if not omniscient:
        known, others = others, known
    for row in attacked.sent:
        assert_largest(row, known, perturbation)
        expected = by_definition(in_numpy(known), perturbation)
        np.testing.assert_allclose(in_numpy(row), expected, rtol=1e-4, atol=1e-6)
        assert np.abs(in_numpy(row) - by_definition(in_numpy(others), perturbation)).max() > 1e-3


@every_perturbation
@pytest.mark.parametrize("omniscient", [True, False])
def test_every_client_malicious(federation: Make, perturbation: str, omniscient: bool) -> None:
    attacked = exchange(
        federation, MinMax(omniscient=omniscient, perturbation=perturbation), pmr=1.0
    )
    assert len(attacked.sent) == 6
    for row in attacked.sent:
        assert row.isfinite().all()
        assert_largest(row, attacked.own, perturbation)


@every_perturbation
def test_where_all_are_alike_there_is_no_room(federation: Make, perturbation: str) -> None:
    known = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(4, -1)
    sent = sent_by(MinMax(perturbation=perturbation), known, 2)
    torch.testing.assert_close(sent, known[0])
    alone = exchange(federation, MinMax(omniscient=False, perturbation=perturbation), pmr=0.17)
    assert torch.equal(alone.sent, alone.own)  # one client knows one row


@pytest.mark.parametrize("perturbation", ["unit", "sign"])
def test_without_a_direction_the_mean_is_sent(perturbation: str) -> None:
    known = torch.tensor([[1.0, -2.0], [-1.0, 2.0]])
    assert sent_by(MinMax(perturbation=perturbation), known, 2).tolist() == [0, 0]


def test_the_accuracy_falls(after_rounds: Callable[..., Record]) -> None:
    """By as little as an attack that hides can do in four rounds: on average over three seeds."""
    learning, attacked = (
        sum(after_rounds(attack, pmr=0.5, seed=seed)["MA"] for seed in range(3)) / 3
        for attack in (ATTACKS.build({"name": "none"}), MinMax())
    )
    assert learning > 0.55
    assert attacked < learning - 0.05


@pytest.mark.parametrize("perturbation", ["Std", "uv", "", "std "])
def test_a_perturbation_out_of_range_is_refused(perturbation: str) -> None:
    assert_refused("min_max", "perturbation", perturbation)
