"""Which rank trains which clients."""

from __future__ import annotations

from collections.abc import Sequence


def balance(costs: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Split items into `n_ranks` parts of similar cost: costliest first, to the least loaded."""
    parts: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        parts[rank].append(i)
        loads[rank] += costs[i]
    return parts
