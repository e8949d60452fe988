"""fedbench.ops: as exact as it says, on rows that are nearly equal, huge, or many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench import ops
from fedbench.ops import CHUNK, column_median, pairwise_sq_dist


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_difference(updates: Tensor) -> Tensor:
    """Squared distances from the differences themselves, pair by pair, in float64."""
    rows = updates.double()
    return torch.stack([(rows - row).square().sum(dim=1) for row in rows])


def assert_relative(found: Tensor, expected: Tensor, rtol: float) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 25, 26, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_of_unlike_rows(n: int, dtype: torch.dtype) -> None:
    updates = randn(n, 300, dtype=dtype)
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-13)


@pytest.mark.parametrize("relative", [1e-4, 1e-6])
@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_of_nearly_equal_rows(n: int, relative: float, dtype: torch.dtype) -> None:
    """Distances of 1e-4 and 1e-6 of the norm come out to 1e-9; float32 short cuts lose them."""
    updates = randn(1000, dtype=dtype) * (1 + relative * randn(n, 1000, seed=1, dtype=dtype))
    expected = by_difference(updates)
    assert_relative(pairwise_sq_dist(updates), expected, rtol=1e-9)
    if n == 30 and dtype == torch.float32:
        short_cut = torch.cdist(updates, updates).double().square()
        assert ((short_cut - expected).abs() > 0.01 * expected).any()


@pytest.mark.parametrize("huge", [1e6, 1e30, 3e38])
@pytest.mark.parametrize("n", [2, 3, 4, 7, 30])
@pytest.mark.parametrize("place", [0, -1])
def test_a_huge_row_does_not_blur_the_others(n: int, huge: float, place: int) -> None:
    updates = randn(200) * (1 + 1e-4 * randn(n, 200, seed=1))
    updates[place] = huge * updates[place].sign()
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10, 30])
def test_half_the_rows_huge_do_not_blur_the_others(n: int) -> None:
    updates = randn(n, 200)
    updates[n - n // 2 :] *= 1e30
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)


@pytest.mark.parametrize("n_params", [10, 1000, 10_000])
def test_distances_of_equal_rows(n_params: int) -> None:
    """Zero, or 1e-13 of the squared norms: what float64 leaves of |a|^2 + |b|^2 - 2 a.b."""
    updates = randn(60, n_params)
    updates[30:] = updates[:30]
    distances = pairwise_sq_dist(updates)
    norms = updates.double().square().sum(dim=1)
    assert (distances[range(30), range(30, 60)] <= 1e-13 * norms.max()).all()
    same = updates[:1].expand(20, -1)
    assert (pairwise_sq_dist(same) == 0).all()


def test_distances_are_never_negative() -> None:
    """Pairs that differ by 1e-9 of their norm: less than float64 leaves of the squares."""
    twins = randn(20, 500, dtype=torch.float64)
    twins = torch.cat([twins, twins * (1 + 1e-9)])
    assert (pairwise_sq_dist(twins) >= 0).all()


def test_two_far_groups_of_near_rows() -> None:
    """In the group without the reference row the error is 1e-13 of the squared way between them."""
    updates = randn(30, 500) * 1e-3
    updates[20:] += 10
    distances, expected = pairwise_sq_dist(updates), by_difference(updates)
    way = float(expected.max())
    assert ((distances - expected).abs() <= 1e-13 * way).all()
    assert_relative(distances[:20, :20], expected[:20, :20], rtol=1e-9)


@pytest.mark.parametrize("n", [3, 10, 30])
def test_distances_are_symmetric_to_the_bit(n: int) -> None:
    """Else equal scores are told apart by rounding."""
    for seed in range(5):
        distances = pairwise_sq_dist(randn(n, 500, seed=seed))
        assert torch.equal(distances, distances.T)
        assert (distances.diagonal() == 0).all()


@pytest.mark.parametrize(
    ("n", "n_params"), [(4, CHUNK - 1), (4, CHUNK), (26, CHUNK + 1), (4, 2 * CHUNK + 7)]
)
def test_distances_over_many_columns(n: int, n_params: int) -> None:
    updates = randn(n_params) * (1 + 1e-4 * randn(n, n_params, seed=1))
    before = updates.clone()
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)
    assert torch.equal(updates, before)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(
        np.int64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.integers(-1000, 1000)
    )
)
def test_distances_of_whole_numbers_are_exact(rows: np.ndarray) -> None:
    expected = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    assert pairwise_sq_dist(torch.tensor(rows, dtype=torch.float32)).tolist() == expected.tolist()


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("n_params", [1, 7, 8, 9, 16, 17])
def test_median_across_chunks(n: int, n_params: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "CHUNK", 8)
    updates = randn(n, n_params, seed=n)
    before = updates.clone()
    expected = np.median(updates.double().numpy(), axis=0)
    np.testing.assert_allclose(column_median(updates).numpy(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(updates, before)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("n_params", [CHUNK - 1, CHUNK, CHUNK + 1])
def test_median_at_the_size_of_a_chunk(n: int, n_params: int) -> None:
    updates = randn(n, n_params)
    found = column_median(updates)
    expected = np.median(updates.double().numpy(), axis=0)
    assert found.dtype == updates.dtype
    assert found.shape == (n_params,)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-7)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 9), st.integers(1, 3)),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_median_against_numpy(rows: np.ndarray, dtype: torch.dtype) -> None:
    found = column_median(torch.tensor(rows, dtype=dtype)).double().numpy()
    tolerance = torch.finfo(dtype).eps * np.abs(rows).max() + torch.finfo(dtype).tiny
    np.testing.assert_allclose(found, np.median(rows, axis=0), rtol=0, atol=tolerance)
    ordered = np.sort(rows, axis=0)
    n = len(rows)
    assert (found >= ordered[(n - 1) // 2]).all()
    assert (found <= ordered[n // 2]).all()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([-3e38, 3e38], 0.0),
        ([-3e38, -3e38, 3e38, 3e38], 0.0),
        ([3e38, 3e38], 3e38),
        ([1e38, 3e38], 2e38),
        ([-1e38, 3e38], 1e38),
        ([0.0, 1.0, 3e38], 1.0),
    ],
)
def test_median_of_the_largest_numbers(column: list[float], expected: float) -> None:
    found = column_median(torch.tensor(column)[:, None])
    assert found.item() == pytest.approx(expected, rel=1e-6)
