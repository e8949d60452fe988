"""Pure functions on updates [N, P], accurate even if the rows are nearly equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

FLOAT64_CHUNK = 1 << 18  # values to convert to float64 at a time: they stay in the cache
MEDIAN_CHUNK = 1 << 21  # values to sort at a time, over all rows: about the size of a cache
BLOCK_ROWS = 32  # maximum height of a block of the Gram matrix
EQUAL = 1e-9  # relative to the squared norm, equal rows have computed distances far below this


def in_double(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over [N, P] in chunks of columns: their slice of P, and a writable float64 copy.

    All chunks share one buffer, so each overwrites the one before. A chunk fits in the cache, so
    float64 costs no extra pass over memory.
    """
    n, p = updates.shape
    width = min(p, FLOAT64_CHUNK // n + 1)
    buffer = updates.new_empty(n, width, dtype=torch.float64)
    for start in range(0, p, width):
        columns = slice(start, min(start + width, p))
        yield columns, buffer[:, : columns.stop - start].copy_(updates[:, columns])


def row_norms(updates: Tensor) -> Tensor:
    """L2 norm of each row: [N, P] -> [N], float64. Equal rows have equal norms, to the bit."""
    squared = updates.new_zeros(len(updates), dtype=torch.float64)
    for _, rows in in_double(updates):
        squared += torch.linalg.vector_norm(rows, dim=1) ** 2
    return squared.sqrt()


def norms_and_cosines(updates: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """|u_i|, and the cosine of u_i with the sum of the other u_j, j in `rows`: [N] each, float64.

    The cosine is 0 if either vector is zero. All sums of products are in float64.
    """
    inside = updates.new_zeros(len(updates), dtype=torch.float64)
    inside[[*rows]] = 1
    squares, products, length_sq = (torch.zeros_like(inside) for _ in range(3))
    for _, columns in in_double(updates):
        total = inside @ columns
        squares += torch.linalg.vector_norm(columns, dim=1) ** 2
        products += columns @ total
        length_sq += total @ total
    # Remove u_i from the sum: from its length, and from its product with u_i.
    others = (length_sq - inside * (2 * products - squares)).clamp_min(0)
    lengths = squares.sqrt() * others.sqrt()
    cosines = torch.where(lengths > 0, (products - inside * squares) / lengths, 0)
    return squares.sqrt(), cosines.clamp(-1, 1)


def gram(updates: Tensor) -> Tensor:
    """Gram matrix of the rows, summed in float64: [N, P] -> [N, N]."""
    return _gram(rows for _, rows in in_double(updates))


def pairwise_sq_dist(updates: Tensor) -> Tensor:
    """Squared L2 distances between rows: [N, P] -> [N, N], float64; exactly 0 for equal rows.

    In float32, |a|^2 + |b|^2 - 2 a.b cancels catastrophically for nearly equal rows. The products
    are therefore summed in float64, after subtracting the row of median norm from all rows. This
    preserves small differences, and the median row is not a huge one unless most rows are huge.
    """
    norms = row_norms(updates)
    origin = updates[_median_row(norms)]
    centered = (rows.sub_(origin[columns]) for columns, rows in in_double(updates))
    distances = _sq_dist(_gram(centered))
    return _unify_equal_rows(distances, updates, norms, near=distances <= EQUAL * norms**2)


def pairwise_cosine_dist(updates: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cos between the rows a_i = offset + u_i, and the norms |u_i|: [N, N] and [N], float64.

    Distances are in 0..2, exactly 0 for equal rows, and 1 to a row of zeros. 1 - cos is half the
    squared distance of the unit vectors a_i / |a_i|. These are nearly equal if the updates are
    short compared with the offset. As above, the unit vector of a median row m is therefore
    subtracted from all of them, before the rows are scaled:
    a_i / |a_i| - a_m / |a_m| = (a_i - |a_i| / |a_m| a_m) / |a_i|.
    """
    norms, lengths = updates.new_zeros(2, len(updates), dtype=torch.float64)
    for columns, rows in in_double(updates):
        norms += torch.linalg.vector_norm(rows, dim=1) ** 2
        lengths += torch.linalg.vector_norm(rows.add_(offset[columns]), dim=1) ** 2
    norms, lengths = norms.sqrt(), lengths.sqrt()
    m = _median_row(lengths)
    ratio = (lengths / lengths[m]).nan_to_num(0, 0)  # 0 if row m is zero: subtract nothing
    factors = torch.stack([torch.ones_like(ratio), -ratio], dim=1)  # [N, 2]

    def centered() -> Iterator[Tensor]:
        for columns, rows in in_double(updates):
            away = torch.stack([offset[columns].double(), offset[columns] + rows[m]])
            yield rows.addmm_(factors, away)

    inverse = torch.where(lengths > 0, 1 / lengths, 0)
    products = _gram(centered()) * (inverse[:, None] * inverse[None, :])
    distances = _sq_dist(products).clamp_max(4) / 2
    is_zero = lengths == 0
    distances[is_zero, :] = 1
    distances[:, is_zero] = 1
    near = (distances <= EQUAL) | (is_zero[:, None] & is_zero[None, :])
    return _unify_equal_rows(distances, updates, norms, near), norms


def _gram(parts: Iterable[Tensor]) -> Tensor:
    """Sum of part @ part.T over parts [N, columns].

    Computes blocks of rows up to the diagonal and mirrors them.
    """
    total = None
    for part in parts:
        n = len(part)
        height = math.ceil(n / math.ceil(n / BLOCK_ROWS))
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


def _median_row(norms: Tensor) -> int:
    return int(norms.argsort()[(len(norms) - 1) // 2])


def _unify_equal_rows(distances: Tensor, updates: Tensor, norms: Tensor, near: Tensor) -> Tensor:
    """Give equal updates the same row of distances, to the bit, and distance 0 to each other.

    Only pairs in `near` [N, N] are compared.
    """
    distinct: dict[float, list[int]] = {}  # norm -> distinct rows with that norm
    candidates = near.tolist()
    representatives = []
    for i, norm in enumerate(norms.tolist()):
        known = distinct.setdefault(norm, [])
        similar = (j for j in known if candidates[i][j])
        same = next((j for j in similar if torch.equal(updates[i], updates[j])), None)
        if same is None:
            known.append(i)
        representatives.append(i if same is None else same)
    rows = torch.tensor(representatives, device=distances.device)
    return distances.fill_diagonal_(0)[rows][:, rows]


def clipped_sum(updates: Tensor, weights: Tensor, norms: Tensor, bound: float | Tensor) -> Tensor:
    """sum_i w_i u_i, with every u_i of norm above the bound scaled down to it: [P]."""
    factors = weights.double() * torch.where(norms > bound, bound / norms, 1.0)  # [N]
    # Some rows are so long that their factor underflows in float32: scale them in float64.
    longest = (factors < torch.finfo(updates.dtype).tiny) & (weights > 0)
    total = torch.where(longest, 0, factors).to(updates.dtype) @ updates
    for i in longest.nonzero()[:, 0].tolist():
        total += (updates[i].double() * factors[i]).to(updates.dtype)
    return total


def gaussian(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal noise, drawn on the CPU so that it is the same on every device."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)


def median(values: Tensor) -> Tensor:
    """Median of [N]; the mean of the two middle values for even N."""
    return values.quantile(0.5)


def two_means(values: Tensor) -> tuple[Tensor, Tensor]:
    """Exact 2-means of each column of [N, F].

    Returns the distance of the two centers [F] and the members of the lower cluster [N, F]. Of two
    equally good splits, takes the one with the smaller lower cluster.
    """
    n = len(values)
    by_column, order = values.double().T.contiguous().sort(dim=1)  # [F, N]
    ranked = by_column - by_column[:, :1]  # relative to the lowest: equal values are exactly 0
    if n < 2:
        return ranked.new_zeros(len(ranked)), torch.ones_like(values, dtype=torch.bool)
    size = torch.arange(1, n, dtype=torch.float64, device=values.device)  # of the lower cluster
    sums = ranked.cumsum(dim=1)
    sizes = size * (n - size)
    apart = size * sums[:, -1:] - n * sums[:, :-1]  # distance of the centers times both sizes
    # The sum of squares within clusters is smallest where the one between them is largest.
    best = (apart**2 / sizes).argmax(dim=1, keepdim=True)  # [F, 1]
    is_lower = torch.arange(n, device=values.device) <= best  # [F, N] in sorted order
    gaps = (apart / sizes).gather(1, best)[:, 0]
    return gaps, torch.zeros_like(is_lower).scatter(1, order, is_lower).T


def column_median(updates: Tensor) -> Tensor:
    """Median of each column, the mean of the two middle values for even N: [N, P] -> [P].

    A sorting network compares and exchanges whole rows by minimum and maximum. It is as exact as
    `sort` and many times faster for many short columns.
    """
    n = len(updates)
    exchanges = _exchanges(n, wanted=frozenset(((n - 1) // 2, n // 2)))
    parts = []
    for columns in updates.split(MEDIAN_CHUNK // n + 1, dim=1):
        rows = [row.clone() for row in columns]
        spare = torch.empty_like(rows[0])
        for low, high in exchanges:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        lower, upper = rows[(n - 1) // 2].double(), rows[n // 2].double()  # their sum fits float64
        parts.append(((lower + upper) / 2).to(updates.dtype))
    return torch.cat(parts)


@lru_cache(maxsize=8)
def _exchanges(n: int, wanted: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Exchanges of Batcher's odd-even merge sort of n rows that affect the `wanted` ranks.

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
