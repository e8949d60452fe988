"""Pure functions on updates [N, P], exact enough for rows that are nearly equal."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 16  # columns at a time: what float64 copies of them need stays small


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
    """Median of each column, the mean of the two middle values for even N: [N, P] -> [P]."""
    n = len(updates)
    parts = []
    for columns in updates.split(CHUNK, dim=1):
        ordered = columns.sort(dim=0).values
        lower, upper = ordered[(n - 1) // 2].double(), ordered[n // 2].double()
        parts.append(((lower + upper) / 2).to(updates.dtype))
    return torch.cat(parts)
