"""Which rank trains which clients."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from lightning.fabric import Fabric

from fedbench.engine.shared_memory import SharedMemory


class Assignment(ABC):
    """Assigns the groups of a round to the first `n_ranks` ranks."""

    @abstractmethod
    def groups(self, costs: Sequence[int], n_ranks: int) -> Iterator[int]:
        """Groups that this rank trains, by position, given the cost of each group."""

    def end_round(self) -> None:
        """Called once on rank 0 when all ranks have finished the round."""


class StaticAssignment(Assignment):
    """Groups are assigned beforehand by cost: for GPUs and processes without shared memory."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank = fabric.global_rank

    def groups(self, costs: Sequence[int], n_ranks: int) -> Iterator[int]:
        return iter(balance(costs, n_ranks)[self.rank] if self.rank < n_ranks else ())


class WorkQueue(Assignment):
    """Each idle rank takes the costliest group left, so that a slowed-down core gets less work."""

    def __init__(self, fabric: Fabric) -> None:
        self.rank = fabric.global_rank
        self._memory = SharedMemory(fabric, n_bytes=8)
        self._n_taken = torch.frombuffer(self._memory.buffer, dtype=torch.int64)

    def groups(self, costs: Sequence[int], n_ranks: int) -> Iterator[int]:
        if self.rank >= n_ranks:
            return
        by_cost = sorted(range(len(costs)), key=lambda i: -costs[i])
        while (turn := self._next_turn()) < len(by_cost):
            yield by_cost[turn]

    def end_round(self) -> None:
        self._n_taken.zero_()

    def _next_turn(self) -> int:
        """A number that no other rank gets."""
        os.lockf(self._memory.file, os.F_LOCK, 0)
        try:
            turn = int(self._n_taken)
            self._n_taken += 1
            return turn
        finally:
            os.lockf(self._memory.file, os.F_ULOCK, 0)


def balance(costs: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Split items into `n_ranks` parts of similar cost: costliest first, to the least loaded."""
    parts: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        parts[rank].append(i)
        loads[rank] += costs[i]
    return parts
