"""min_max: as far from the honest updates as any two of them are from each other."""

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
    centers,
    dtypes,
    nearly_equal,
    sent_by,
    sent_updates,
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


def diameter(rows: np.ndarray) -> float:
    return max(farthest(row, rows) for row in rows)


def by_definition(rows: np.ndarray, perturbation: str) -> np.ndarray:
    """Find gamma by bisection, in the spirit of Shejwalkar and Houmansadr."""
    mean, step, reach = rows.mean(axis=0), direction_of(rows, perturbation), diameter(rows)
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


def assert_largest(sent: Tensor, honest: Tensor, perturbation: str, rel: float = 1e-5) -> None:
    """The row meets the constraint up to `rel` and lies along p; 1.001 * gamma is too large."""
    rows, row = in_numpy(honest), in_numpy(sent)
    mean, reach = rows.mean(axis=0), diameter(rows)
    assert farthest(row, rows) <= reach * (1 + rel)
    assert farthest(mean + 1.001 * (row - mean), rows) > reach * (1 + rel)
    way, step = row - mean, direction_of(rows, perturbation)
    assert way @ step / math.sqrt((way @ way) * (step @ step)) > 1 - 1e-5


def test_by_hand() -> None:
    # The mean of (0, 3) and (2, 3) is (1, 3). They are 2 apart, so x may be 2 from each.
    #   std:  x = (1 - t, 3),          from (2, 3): (1 + t)^2          = 4, t = 1
    #   unit: x = (1 - t, 3 - 3 t),    from (2, 3): (1 + t)^2 + 9 t^2  = 4, t = (-1 + sqrt(31)) / 10
    #   sign: x = (1 - t, 3 - t),      from (2, 3): (1 + t)^2 + t^2    = 4, t = (-1 + sqrt(7)) / 2
    # (0, 3) would allow more: t = 3, (1 + sqrt(31)) / 10 and (1 + sqrt(7)) / 2.
    honest = torch.tensor([[0.0, 3.0], [2.0, 3.0]])
    expected = {"std": [0, 3], "unit": [0.543224, 1.629671], "sign": [0.177124, 2.177124]}
    for perturbation, row in expected.items():
        attack = MinMax(perturbation=perturbation)
        sent = attack.collude(torch.full((3, 2), 99.0), view_of(5, 3, honest))
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
    """Integers have means that are exactly 0, and many equal rows."""
    honest = torch.tensor(rows, dtype=dtype)
    attack = MinMax(omniscient=omniscient, perturbation=perturbation)
    sent = sent_by(attack, honest, n_others)
    error = 100 * torch.finfo(dtype).eps * 3
    np.testing.assert_allclose(
        in_numpy(sent), by_definition(rows, perturbation), rtol=0, atol=error
    )


@settings(derandomize=True, deadline=None, max_examples=300)
@given(spreads, centers, perturbations, dtypes)
def test_on_floats(
    spread: np.ndarray, center: float, perturbation: str, dtype: torch.dtype
) -> None:
    """Includes rows far from the origin, which differ only in their last bits."""
    honest = torch.tensor(spread + center, dtype=dtype)
    rows = in_numpy(honest)
    largest, eps = float(np.abs(rows).max()), torch.finfo(dtype).eps
    if perturbation != "std":  # the sign of the mean must not depend on rounding
        assume(np.abs(rows.mean(axis=0)).min() > 1e-3 * largest)
    sent = sent_by(MinMax(perturbation=perturbation), honest, 3)
    expected = by_definition(rows, perturbation)
    np.testing.assert_allclose(in_numpy(sent), expected, rtol=0, atol=100 * eps * largest + 1e-30)


@every_perturbation
@pytest.mark.parametrize("n", [2, 3, 10, 30])
def test_gamma_is_the_largest_for_nearly_equal_updates(perturbation: str, n: int) -> None:
    """Float32 rows that differ by 1e-4 of their size; 30 rows are summed in several chunks."""
    # With sign, all coordinates in one binade move by the same amount and round to float32 with the
    # same error, so errors add up. In float64 they are negligible.
    single = 2e-4 if perturbation == "sign" else 1e-5
    for seed in range(2):
        honest = nearly_equal(n, 20_000, seed)
        for rows, rel in ((honest, single), (honest.double(), 1e-11)):
            sent = sent_by(MinMax(perturbation=perturbation), rows, 6)
            assert_largest(sent, rows, perturbation, rel)


@every_perturbation
@pytest.mark.parametrize("omniscient", [True, False])
def test_gamma_is_the_largest_in_a_round(
    federation: Make, perturbation: str, omniscient: bool
) -> None:
    attacked = sent_updates(
        federation, MinMax(omniscient=omniscient, perturbation=perturbation), pmr=0.5
    )
    honest, others = attacked.honest, attacked.clean
    if not omniscient:
        honest, others = others, honest
    for row in attacked.sent:
        assert_largest(row, honest, perturbation)
        expected = by_definition(in_numpy(honest), perturbation)
        np.testing.assert_allclose(in_numpy(row), expected, rtol=1e-4, atol=1e-6)
        assert np.abs(in_numpy(row) - by_definition(in_numpy(others), perturbation)).max() > 1e-3


@every_perturbation
@pytest.mark.parametrize("omniscient", [True, False])
def test_every_client_malicious(federation: Make, perturbation: str, omniscient: bool) -> None:
    attacked = sent_updates(
        federation, MinMax(omniscient=omniscient, perturbation=perturbation), pmr=1.0
    )
    assert len(attacked.sent) == 6
    for row in attacked.sent:
        assert row.isfinite().all()
        assert_largest(row, attacked.clean, perturbation)


@every_perturbation
def test_equal_updates_leave_no_room(federation: Make, perturbation: str) -> None:
    honest = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(4, -1)
    sent = sent_by(MinMax(perturbation=perturbation), honest, 2)
    torch.testing.assert_close(sent, honest[0])
    alone = sent_updates(federation, MinMax(omniscient=False, perturbation=perturbation), pmr=0.17)
    assert torch.equal(alone.sent, alone.clean)  # one client has one update


@pytest.mark.parametrize("perturbation", ["unit", "sign"])
def test_if_the_mean_is_zero_it_is_sent(perturbation: str) -> None:
    honest = torch.tensor([[1.0, -2.0], [-1.0, 2.0]])
    assert sent_by(MinMax(perturbation=perturbation), honest, 2).tolist() == [0, 0]


def test_ma_falls(after_rounds: Callable[..., Record]) -> None:
    """A stealthy attack does little in four rounds, so this averages over three seeds."""
    learning, attacked = (
        sum(after_rounds(attack, pmr=0.5, seed=seed)["MA"] for seed in range(3)) / 3
        for attack in (ATTACKS.build({"name": "none"}), MinMax())
    )
    assert learning > 0.55
    assert attacked < learning - 0.05


@pytest.mark.parametrize("perturbation", ["Std", "uv", "", "std "])
def test_an_unknown_perturbation_is_refused(perturbation: str) -> None:
    assert_refused("min_max", "perturbation", perturbation)
