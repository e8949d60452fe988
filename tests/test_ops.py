"""fedbench.ops: accuracy on nearly equal, huge and many rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench import ops
from fedbench.ops import column_median, gram, pairwise_cosine_dist, pairwise_sq_dist, row_norms


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_difference(updates: Tensor) -> Tensor:
    """Squared distances from the differences of each pair of rows, in float64."""
    rows = updates.double()
    return torch.stack([(rows - row).square().sum(dim=1) for row in rows])


def assert_relative(found: Tensor, expected: Tensor, rtol: float) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 25, 26, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_of_random_rows(n: int, dtype: torch.dtype) -> None:
    updates = randn(n, 300, dtype=dtype)
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-13)


@pytest.mark.parametrize("relative", [1e-4, 1e-6])
@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_of_nearly_equal_rows(n: int, relative: float, dtype: torch.dtype) -> None:
    """Distances of 1e-4 and 1e-6 of the norm are accurate to 1e-9, unlike float32 torch.cdist."""
    updates = randn(1000, dtype=dtype) * (1 + relative * randn(n, 1000, seed=1, dtype=dtype))
    expected = by_difference(updates)
    assert_relative(pairwise_sq_dist(updates), expected, rtol=1e-9)
    if n == 30 and dtype == torch.float32:
        by_cdist = torch.cdist(updates, updates).double().square()
        assert ((by_cdist - expected).abs() > 0.01 * expected).any()


@pytest.mark.parametrize("huge", [1e6, 1e30, 3e38])
@pytest.mark.parametrize("n", [2, 3, 4, 7, 30])
@pytest.mark.parametrize("place", [0, -1])
def test_one_huge_row_does_not_affect_other_distances(n: int, huge: float, place: int) -> None:
    updates = randn(200) * (1 + 1e-4 * randn(n, 200, seed=1))
    updates[place] = huge * updates[place].sign()
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10, 30])
def test_a_huge_half_does_not_affect_other_distances(n: int) -> None:
    updates = randn(n, 200)
    updates[n - n // 2 :] *= 1e30
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)


@pytest.mark.parametrize("n_params", [10, 1000, 10_000])
def test_distances_of_equal_rows(n_params: int) -> None:
    """At most 1e-13 of the squared norms, the float64 rounding error of |a|^2 + |b|^2 - 2 a.b."""
    updates = randn(60, n_params)
    updates[30:] = updates[:30]
    distances = pairwise_sq_dist(updates)
    norms = updates.double().square().sum(dim=1)
    assert (distances[range(30), range(30, 60)] <= 1e-13 * norms.max()).all()
    same = updates[:1].expand(20, -1)
    assert (pairwise_sq_dist(same) == 0).all()


def test_distances_are_never_negative() -> None:
    """For pairs that differ by 1e-9 of their norm, below the rounding error of their squares."""
    twins = randn(20, 500, dtype=torch.float64)
    twins = torch.cat([twins, twins * (1 + 1e-9)])
    assert (pairwise_sq_dist(twins) >= 0).all()


def test_two_distant_groups_of_similar_rows() -> None:
    """The group without the reference row has an error of 1e-13 of the squared gap."""
    updates = randn(30, 500) * 1e-3
    updates[20:] += 10
    distances, expected = pairwise_sq_dist(updates), by_difference(updates)
    gap = float(expected.max())
    assert ((distances - expected).abs() <= 1e-13 * gap).all()
    assert_relative(distances[:20, :20], expected[:20, :20], rtol=1e-9)


@pytest.mark.parametrize("n", [3, 10, 30])
def test_distances_are_symmetric_to_the_bit(n: int) -> None:
    """Otherwise rounding error would break ties between equal scores."""
    for seed in range(5):
        distances = pairwise_sq_dist(randn(n, 500, seed=seed))
        assert torch.equal(distances, distances.T)
        assert (distances.diagonal() == 0).all()


@pytest.mark.parametrize("n", [4, 31, 32, 33, 65, 100])
@pytest.mark.parametrize("n_params", [7, 8, 9, 16, 100])
def test_results_do_not_depend_on_blocks_and_chunks(
    n: int, n_params: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "FLOAT64_CHUNK", 7 * n)  # eight columns at a time
    updates = randn(n_params) * (1 + 1e-4 * randn(n, n_params, seed=1))
    before = updates.clone()
    offset = 100 * randn(n_params, seed=2)
    assert_relative(pairwise_sq_dist(updates), by_difference(updates), rtol=1e-9)
    distances, norms = pairwise_cosine_dist(updates, offset)
    assert_relative(distances, by_angle(updates.double() + offset), rtol=1e-5)
    assert_relative(norms, updates.double().norm(dim=1), rtol=1e-14)
    assert torch.equal(norms, row_norms(updates))
    assert_relative(gram(updates), updates.double() @ updates.double().T, rtol=1e-12)
    assert torch.equal(updates, before)


def by_angle(rows: Tensor) -> Tensor:
    """1 - cos from the differences of unit vectors, in long double."""
    units = rows.numpy().astype(np.longdouble)
    units /= np.sqrt((units**2).sum(axis=1, keepdims=True))
    halves = [((units - unit) ** 2).sum(axis=1) / 2 for unit in units]
    return torch.from_numpy(np.stack(halves).astype(np.float64))


@pytest.mark.parametrize("n_huge", [0, 1, 5, 6, 9])
@pytest.mark.parametrize("scale", [1e3, 1e9, 1e30])
@pytest.mark.parametrize("short", [1.0, 1e-2, 1e-6])
def test_cosine_distances_of_rows_of_any_length(n_huge: int, scale: float, short: float) -> None:
    offset = randn(50, seed=3)
    updates = short * (randn(50) + 1e-2 * randn(10, 50, seed=1))
    updates[:n_huge] = scale * randn(n_huge, 50, seed=2)
    distances, _ = pairwise_cosine_dist(updates, offset)
    expected = by_angle(updates.double() + offset.double())
    rounding = 1e-15 if n_huge > 5 else 0  # then the median row is far from the short ones
    torch.testing.assert_close(distances, expected, rtol=1e-6, atol=rounding)


def test_cosine_distances_of_equal_opposite_and_zero_rows() -> None:
    offset = torch.tensor([1.0, 2.0])
    rows = torch.tensor([[1.0, 2.0], [2.0, 4.0], [-1.0, -2.0], [0.0, 0.0], [2.0, -1.0], [1.0, 2.0]])
    distances, norms = pairwise_cosine_dist(rows - offset, offset)
    expected = [
        [0, 0, 2, 1, 1, 0],
        [0, 0, 2, 1, 1, 0],
        [2, 2, 0, 1, 1, 2],
        [1, 1, 1, 0, 1, 1],
        [1, 1, 1, 1, 0, 1],
        [0, 0, 2, 1, 1, 0],
    ]
    np.testing.assert_allclose(distances.numpy(), expected, atol=1e-15)
    assert float(distances[0, 5]) == 0
    assert torch.equal(distances[0], distances[5])
    np.testing.assert_allclose(norms.numpy(), (rows - offset).norm(dim=1).numpy(), rtol=1e-6)


@pytest.mark.parametrize("n_params", [5, 3000, 70000])
def test_equal_rows_have_distance_zero_and_equal_distances_to_others(n_params: int) -> None:
    updates = randn(40, n_params) * 0.1 + 1
    updates[[3, 17, 39]] = updates[8].clone()
    updates[20] = updates[8] * (1 + 2e-7)  # nearly equal is not equal
    for distances in (
        pairwise_sq_dist(updates),
        pairwise_cosine_dist(updates, randn(n_params, seed=9))[0],
    ):
        same = [3, 8, 17, 39]
        assert (distances[same][:, same] == 0).all()
        assert (distances[same] == distances[8]).all()
        assert float(distances[8, 20]) > 0


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(
        np.int64, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.integers(-1000, 1000)
    )
)
def test_distances_of_integers_are_exact(rows: np.ndarray) -> None:
    expected = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    assert pairwise_sq_dist(torch.tensor(rows, dtype=torch.float32)).tolist() == expected.tolist()


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("n_params", [1, 7, 8, 9, 16, 17])
def test_column_median_across_chunks(
    n: int, n_params: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "MEDIAN_CHUNK", 7 * n)  # eight columns at a time
    updates = randn(n, n_params, seed=n)
    before = updates.clone()
    expected = np.median(updates.double().numpy(), axis=0)
    np.testing.assert_allclose(column_median(updates).numpy(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(updates, before)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 9), st.integers(1, 3)),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_column_median_against_numpy(rows: np.ndarray, dtype: torch.dtype) -> None:
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
def test_column_median_of_the_largest_numbers(column: list[float], expected: float) -> None:
    found = column_median(torch.tensor(column)[:, None])
    assert found.item() == pytest.approx(expected, rel=1e-6)
