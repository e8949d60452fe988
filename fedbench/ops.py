"""Pure functions on updates [N, P], exact enough for rows that are nearly equal."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 1 << 16  # columns at a time: what float64 copies of them need stays small
EXCHANGED = 1 << 21  # values at a time, of all rows together: about what a cache holds


def pairwise_sq_dist(updates: Tensor) -> Tensor:
    """Squared L2 distances between rows: [N, P] -> [N, N], float64.

    |a - b|^2 = |a|^2 + |b|^2 - 2 a.b loses everything in float32 when rows are nearly equal, so the
    Gram matrix is summed in float64 over rows from which the row of median norm was taken: it keeps
    the small differences, and unless most rows are huge, no huge one can be that row.
    """
    norms = torch.stack([row.double().norm() for row in updates])
    origin = updates[norms.argsort()[(len(norms) - 1) // 2]]
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for columns, start in zip(updates.split(CHUNK, dim=1), origin.split(CHUNK), strict=True):
        centred = columns.double() - start.double()
        gram.addmm_(centred, centred.T)
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None, :] - (gram + gram.T)).clamp_min(0)
    return distances.fill_diagonal_(0)


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
