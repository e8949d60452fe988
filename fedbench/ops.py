"""Pure functions on updates [N, P], exact enough for rows that are nearly equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 1 << 13  # columns at a time, so that their float64 copies stay in the cache
EXCHANGED = 1 << 21  # values at a time, of all rows together: about what a cache holds


def in_double(updates: Tensor, n_more: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Goes through [N, P] by columns: where they stand, and a float64 copy [N + n_more, CHUNK].

    The copy is overwritten by the next one; what stands in its `n_more` last rows is left to the
    caller. A few columns at a time stay in the cache: float64 costs no pass over memory more.
    """
    n, p = updates.shape
    buffer = updates.new_empty(n + n_more, min(p, CHUNK), dtype=torch.float64)
    for start in range(0, p, CHUNK):
        columns = slice(start, min(start + CHUNK, p))
        rows = buffer[:, : columns.stop - start]
        rows[:n].copy_(updates[:, columns])
        yield columns, rows


def row_norms(updates: Tensor) -> Tensor:
    """L2 norm of each row: [N, P] -> [N], float64; the same for equal rows."""
    squared = updates.new_zeros(len(updates), dtype=torch.float64)
    for _, rows in in_double(updates):
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return squared.sqrt()


def gram(updates: Tensor, origin: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
    """Products of the rows, summed in float64: [N, P] -> [N, N].

    With `origin` [P], of the rows minus it; with `offset` [P] too, which then makes one row more.
    """
    n = len(updates)
    n_rows = n + (offset is not None)
    products = updates.new_zeros(n_rows, n_rows, dtype=torch.float64)
    for columns, rows in in_double(updates, n_rows - n):
        if origin is not None:
            rows[:n].sub_(origin[columns].double())
        if offset is not None:
            rows[n].copy_(offset[columns])
        products.addmm_(rows, rows.T)
    return (products + products.T) / 2


def pairwise_sq_dist(updates: Tensor) -> Tensor:
    """Squared L2 distances between rows: [N, P] -> [N, N], float64; 0 exactly for equal rows.

    |a - b|^2 = |a|^2 + |b|^2 - 2 a.b loses everything in float32 when rows are nearly equal, so the
    products are summed in float64 over rows from which the row of median norm was taken: it keeps
    the small differences, and unless most rows are huge, no huge one can be that row.
    """
    norms = row_norms(updates)
    products = gram(updates, origin=updates[_middle(norms)])
    squares = products.diagonal()
    distances = squares[:, None] + squares[None, :] - 2 * products
    return _as_of_equals(distances.clamp_min(0), updates, norms)


def pairwise_cosine_dist(updates: Tensor, norms: Tensor, offset: Tensor) -> Tensor:
    """1 - cos between the rows offset + u_i, given the |u_i|: [N, N], float64 in 0..2.

    0 exactly for equal rows, 1 to a row without a direction. Half the squared distance between
    the rows' unit vectors, which are nearly equal when updates are short against the offset. So
    each is written as what it differs by from a middle one, the unit vector of c = offset + u_m:

        a_i = c + d_i,  a_i/|a_i| - c/|c| = d_i / |a_i| + c (1/|a_i| - 1/|c|)

    whose distances need only the products of the d_i and c.
    """
    n = len(updates)
    origin = updates[_middle(norms)]
    products = gram(updates, origin, offset.double() + origin)
    d, with_c, c_squared = products[:n, :n], products[:n, n], products[n, n]  # d.d, d.c, c.c
    longer = 2 * with_c + d.diagonal()  # |a_i|^2 - |c|^2
    squared = c_squared + longer
    vanished = squared <= 1e-14 * (c_squared + d.diagonal())  # what rounding leaves of zero
    length, c_length = squared.clamp_min(0).sqrt(), c_squared.sqrt()
    by_d = torch.where(vanished, 0, 1 / length)
    by_c = -longer / (length * c_length * (length + c_length))
    by_c = torch.where(vanished | (c_squared == 0), 0, by_c)
    # |x_i - x_j|^2 of x_i = by_d_i d_i + by_c_i c
    own, along = by_d**2 * d.diagonal(), by_d * with_c
    apart = by_c[:, None] - by_c[None, :]
    distances = (own[:, None] + own[None, :] - 2 * by_d[:, None] * by_d[None, :] * d) / 2
    distances += apart * (along[:, None] - along[None, :]) + apart**2 * c_squared / 2
    distances[vanished, :] = 1
    distances[:, vanished] = 1
    return _as_of_equals(distances.clamp(0, 2), updates, norms)


def _middle(norms: Tensor) -> int:
    return int(norms.argsort()[(len(norms) - 1) // 2])


def _as_of_equals(distances: Tensor, updates: Tensor, norms: Tensor) -> Tensor:
    """The distances with those of equal rows made equal, and 0 between them."""
    first: dict[float, list[int]] = {}  # norm -> rows of that norm that differ
    stands_for = []
    for i, norm in enumerate(norms.tolist()):
        known = first.setdefault(norm, [])
        same = next((j for j in known if torch.equal(updates[i], updates[j])), None)
        if same is None:
            known.append(i)
        stands_for.append(i if same is None else same)
    rows = torch.tensor(stands_for, device=distances.device)
    return distances.fill_diagonal_(0)[rows][:, rows]


def clip_factors(norms: Tensor, bound: float | Tensor) -> Tensor:
    """What to multiply rows of these norms with so that none is longer than the bound: [N]."""
    return torch.where(norms > bound, bound / norms, 1.0)


def gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal noise; drawn on the CPU, so that devices do not change it."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)


def middle(values: Tensor) -> Tensor:
    """Median of [N], the mean of the two middle values for even N."""
    return values.quantile(0.5)


def column_median(updates: Tensor) -> Tensor:
    """Median of each column, the mean of the two middle values for even N: [N, P] -> [P].

    A sorting network exchanges whole rows by minimum and maximum: as exact as `sort`, and many
    times faster on a tall stack of short columns.
    """
    n = len(updates)
    exchanges = _exchanges(n, wanted=frozenset(((n - 1) // 2, n // 2)))
    parts = []
    for columns in updates.split(EXCHANGED // n + 1, dim=1):
        rows = [row.clone() for row in columns]
        spare = torch.empty_like(rows[0])
        for low, high in exchanges:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        lower, upper = rows[(n - 1) // 2].double(), rows[n // 2].double()  # no overflow
        parts.append(((lower + upper) / 2).to(updates.dtype))
    return torch.cat(parts)


@lru_cache(maxsize=8)
def _exchanges(n: int, wanted: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """The exchanges of Batcher's odd-even merge sort of n rows that decide the `wanted` ranks.

    Batcher, Sorting networks and their applications, 1968.
    """
    exchanges = []
    size = 1
    while size < n:
        step = size
        while step:
            for start in range(step % size, n - step, 2 * step):
                for low in range(start, min(start + step, n - step)):
                    if low // (2 * size) == (low + step) // (2 * size):
                        exchanges.append((low, low + step))
            step //= 2
        size *= 2
    needed, kept = set(wanted), []
    for low, high in reversed(exchanges):
        if low in needed or high in needed:
            needed |= {low, high}
            kept.append((low, high))
    return tuple(reversed(kept))
