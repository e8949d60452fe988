"""Pure functions on updates [N, P], exact enough for rows that are nearly equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

DOUBLES = 1 << 18  # values in float64 at a time: they stay in the cache
BLOCK = 32  # rows at a time, at most
NEAR = 1e-9  # computed distances of equal rows are far below this
EXCHANGED = 1 << 21  # values at a time, of all rows together: about what a cache holds


def in_double(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Goes through [N, P] by columns: where they stand, and a float64 copy that may be written to.

    The next copy takes its place. A few columns at a time stay in the cache, so that float64 costs
    no further pass over memory.
    """
    n, p = updates.shape
    width = min(p, DOUBLES // n + 1)
    buffer = updates.new_empty(n, width, dtype=torch.float64)
    for start in range(0, p, width):
        columns = slice(start, min(start + width, p))
        yield columns, buffer[:, : columns.stop - start].copy_(updates[:, columns])


def row_norms(updates: Tensor) -> Tensor:
    """L2 norm of each row: [N, P] -> [N], float64; the same for equal rows."""
    squared = updates.new_zeros(len(updates), dtype=torch.float64)
    for _, rows in in_double(updates):
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return squared.sqrt()


def norms_and_cosines(updates: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """|u_i|, and the cosine of u_i with the sum of the other u_j, j in `rows`: [N] each, float64.

    0 where a vector has no direction. Every sum of products is over float64 columns.
    """
    inside = updates.new_zeros(len(updates), dtype=torch.float64)
    inside[[*rows]] = 1
    squares, products, length_sq = (torch.zeros_like(inside) for _ in range(3))
    for _, columns in in_double(updates):
        total = inside @ columns
        squares += torch.linalg.vector_norm(columns, dim=1) ** 2
        products += columns @ total
        length_sq += total @ total
    # Of the sum without u_i: its product with u_i, and its length.
    others = (length_sq - inside * (2 * products - squares)).clamp_min(0)
    lengths = squares.sqrt() * others.sqrt()
    cosines = torch.where(lengths > 0, (products - inside * squares) / lengths, 0)
    return squares.sqrt(), cosines.clamp(-1, 1)


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
    origin = updates[_middle_row(norms)]
    centred = (rows.sub_(origin[columns]) for columns, rows in in_double(updates))
    distances = _sq_dist(_gram(centred))
    return _as_of_equals(distances, updates, norms, near=distances <= NEAR * norms**2)


def pairwise_cosine_dist(updates: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cos between the rows a_i = offset + u_i, and the |u_i|: [N, N] and [N], float64.

    In 0..2; 0 exactly for equal rows, 1 to a row without a direction. It is half the squared
    distance of the unit vectors a_i / |a_i|. These are nearly equal when updates are short against
    the offset, so that of a middle row m is taken from all, as above, before they are scaled:
    a_i / |a_i| - a_m / |a_m| = (a_i - |a_i| / |a_m| a_m) / |a_i|.
    """
    norms, lengths = updates.new_zeros(2, len(updates), dtype=torch.float64)
    for columns, rows in in_double(updates):
        norms += torch.linalg.vector_norm(rows, dim=1) ** 2
        lengths += torch.linalg.vector_norm(rows.add_(offset[columns]), dim=1) ** 2
    norms, lengths = norms.sqrt(), lengths.sqrt()
    m = _middle_row(lengths)
    ratio = (lengths / lengths[m]).nan_to_num(0, 0)  # of no use if m has no direction
    factors = torch.stack([torch.ones_like(ratio), -ratio], dim=1)  # [N, 2]

    def centred() -> Iterator[Tensor]:
        for columns, rows in in_double(updates):
            away = torch.stack([offset[columns].double(), offset[columns] + rows[m]])
            yield rows.addmm_(factors, away)

    shrink = torch.where(lengths > 0, 1 / lengths, 0)
    products = _gram(centred()) * (shrink[:, None] * shrink[None, :])
    distances = _sq_dist(products).clamp_max(4) / 2
    aimless = lengths == 0
    distances[aimless, :] = 1
    distances[:, aimless] = 1
    near = (distances <= NEAR) | (aimless[:, None] & aimless[None, :])
    return _as_of_equals(distances, updates, norms, near), norms


def _gram(parts: Iterable[Tensor]) -> Tensor:
    """The sum of part @ part.T over parts [N, columns].

    In blocks of rows from the diagonal down: what is above it is the same again.
    """
    total = None
    for part in parts:
        n = len(part)
        height = math.ceil(n / math.ceil(n / BLOCK))
        total = part.new_zeros(n, n) if total is None else total
        for start in range(0, n, height):
            end = start + height
            total[start:end, :end].addmm_(part[start:end], part[:end].T)
    assert total is not None
    below = total.tril()
    return below + below.tril(-1).T


def _sq_dist(products: Tensor) -> Tensor:
    squares = products.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * products).clamp_min(0)


def _middle_row(norms: Tensor) -> int:
    return int(norms.argsort()[(len(norms) - 1) // 2])


def _as_of_equals(distances: Tensor, updates: Tensor, norms: Tensor, near: Tensor) -> Tensor:
    """The distances with those of equal rows made equal, and 0 between them."""
    first: dict[float, list[int]] = {}  # norm -> rows of that norm that differ
    candidates = near.tolist()
    stands_for = []
    for i, norm in enumerate(norms.tolist()):
        known = first.setdefault(norm, [])
        alike = (j for j in known if candidates[i][j])
        same = next((j for j in alike if torch.equal(updates[i], updates[j])), None)
        if same is None:
            known.append(i)
        stands_for.append(i if same is None else same)
    rows = torch.tensor(stands_for, device=distances.device)
    return distances.fill_diagonal_(0)[rows][:, rows]


def clipped_sum(updates: Tensor, weights: Tensor, norms: Tensor, bound: float | Tensor) -> Tensor:
    """sum_i w_i u_i with every u_i of norm above the bound scaled down to it: [P]."""
    factors = weights.double() * torch.where(norms > bound, bound / norms, 1.0)  # [N]
    # Rows so long that float32 could not hold their factor are scaled in float64.
    longest = (factors < torch.finfo(updates.dtype).tiny) & (weights > 0)
    total = torch.where(longest, 0, factors).to(updates.dtype) @ updates
    for i in longest.nonzero()[:, 0].tolist():
        total += (updates[i].double() * factors[i]).to(updates.dtype)
    return total


def gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal noise; drawn on the CPU, so that devices do not change it."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)


def median(values: Tensor) -> Tensor:
    """Median of [N], the mean of the two middle values for even N."""
    return values.quantile(0.5)


def two_means(values: Tensor) -> tuple[Tensor, Tensor]:
    """Exact 2-means of each column of [N, F].

    Returns how far the two centres are apart [F], and who is in the lower cluster [N, F]. Of two
    equally good splits the one with fewer low values counts.
    """
    n = len(values)
    by_column, order = values.double().T.contiguous().sort(dim=1)  # [F, N]
    ranked = by_column - by_column[:, :1]  # from the lowest: equal values are zeros exactly
    if n < 2:
        return ranked.new_zeros(len(ranked)), torch.ones_like(values, dtype=torch.bool)
    size = torch.arange(1, n, dtype=torch.float64, device=values.device)  # of the lower cluster
    sums = ranked.cumsum(dim=1)
    sizes = size * (n - size)
    apart = size * sums[:, -1:] - n * sums[:, :-1]  # the centres' distance times both sizes
    # The squares within clusters are least where those between them are largest.
    best = (apart**2 / sizes).argmax(dim=1, keepdim=True)  # [F, 1]
    is_lower = torch.arange(n, device=values.device) <= best  # [F, N] in sorted order
    gaps = (apart / sizes).gather(1, best)[:, 0]
    return gaps, torch.zeros_like(is_lower).scatter(1, order, is_lower).T


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
