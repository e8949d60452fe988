"""Pure functions on updates [N, P], exact enough for rows that are nearly equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 1 << 13  # columns at a time, so that their float64 copies stay in the cache
EXCHANGED = 1 << 21  # values at a time, of all rows together: about what a cache holds


def in_double(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Goes through [N, P] by columns: where they stand, and a float64 copy that may be written to.

    The next copy takes its place. A few columns at a time stay in the cache, so that float64 costs
    no further pass over memory.
    """
    n, p = updates.shape
    buffer = updates.new_empty(n, min(p, CHUNK), dtype=torch.float64)
    for start in range(0, p, CHUNK):
        columns = slice(start, min(start + CHUNK, p))
        yield columns, buffer[:, : columns.stop - start].copy_(updates[:, columns])


def row_norms(updates: Tensor) -> Tensor:
    """L2 norm of each row: [N, P] -> [N], float64; the same for equal rows."""
    squared = updates.new_zeros(len(updates), dtype=torch.float64)
    for _, rows in in_double(updates):
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return squared.sqrt()


def gram(updates: Tensor) -> Tensor:
    """Products of the rows, summed in float64: [N, P] -> [N, N]."""
    return _gram(rows for _, rows in in_double(updates))


def pairwise_sq_dist(updates: Tensor) -> Tensor:
    """Squared L2 distances between rows: [N, P] -> [N, N], float64; 0 exactly for equal rows.

    |a - b|^2 = |a|^2 + |b|^2 - 2 a.b loses everything in float32 when rows are nearly equal, so the
    products are summed in float64 over rows from which the row of median norm was taken: it keeps
    the small differences, and unless most rows are huge, no huge one can be that row.
    """
    norms = row_norms(updates)
    origin = updates[_middle(norms)]
    centred = (rows.sub_(origin[columns]) for columns, rows in in_double(updates))
    return _as_of_equals(_sq_dist(_gram(centred)), updates, norms)


def pairwise_cosine_dist(updates: Tensor, offset: Tensor) -> Tensor:
    """1 - cos between the rows offset + u_i: [N, P] and [P] -> [N, N], float64 in 0..2.

    0 exactly for equal rows, 1 to a row without a direction. It is half the squared distance of the
    unit vectors. These are nearly equal when updates are short against the offset, so one of them
    is taken from all, as above.
    """
    squared = updates.new_zeros(len(updates), dtype=torch.float64)
    for columns, rows in in_double(updates):
        squared += torch.linalg.vector_norm(rows.add_(offset[columns]), dim=1) ** 2
    lengths = squared.sqrt()
    shrink = torch.where(lengths > 0, 1 / lengths, 0)[:, None]  # [N, 1]
    middle = _middle(lengths)

    def centred_units() -> Iterator[Tensor]:
        for columns, rows in in_double(updates):
            units = rows.add_(offset[columns]).mul_(shrink)
            yield units.sub_(units[middle].clone())

    distances = _sq_dist(_gram(centred_units())).clamp_max(4) / 2
    aimless = lengths == 0
    distances[aimless, :] = 1
    distances[:, aimless] = 1
    return _as_of_equals(distances, updates, lengths)


def _gram(parts: Iterable[Tensor]) -> Tensor:
    """The sum of part @ part.T over parts [N, columns]."""
    total: Tensor | None = None
    for part in parts:
        total = part @ part.T if total is None else total.addmm_(part, part.T)
    assert total is not None
    return (total + total.T) / 2


def _sq_dist(products: Tensor) -> Tensor:
    squares = products.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * products).clamp_min(0)


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
