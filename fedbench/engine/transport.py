"""How clients are dealt to the ranks of a run, and how what they send reaches rank 0."""

from __future__ import annotations

import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, distributed

from fedbench.engine.population import Rows

T = TypeVar("T")

PATIENCE = 30  # seconds for a process to be ended
HEAD = 64  # bytes before the rows of a board, for how many portions are taken


class Channel(ABC):
    """Between rank 0 and the others."""

    @abstractmethod
    def deal(
        self, portions: Sequence[Sequence[int]], costs: Sequence[int], n_ranks: int
    ) -> Iterator[int]:
        """The places in `portions` of those that this rank trains, one after another.

        A portion is clients by their numbers, from 0 on. Only the first n_ranks train.
        """

    @abstractmethod
    def place(self, client: int) -> Rows:
        """Where ranks other than 0 put what comes of a client's training."""

    @abstractmethod
    def collect(self, out: Sequence[Rows]) -> None:
        """Gives rank 0 what the others have put, when all ranks are done; `out` is by client."""


class Line(Channel):
    """Portions are dealt beforehand, by their costs; rows go through torch's process group."""

    def __init__(self, fabric: Fabric, like: Rows) -> None:
        self.ranks, self.rank = fabric.world_size, fabric.global_rank
        self.like = like
        self._clients: list[list[int]] = []  # of each rank
        self._rows: dict[int, Rows] = {}

    def deal(
        self, portions: Sequence[Sequence[int]], costs: Sequence[int], n_ranks: int
    ) -> Iterator[int]:
        shares = deal(range(len(portions)), costs, n_ranks)
        shares += [[]] * (self.ranks - n_ranks)
        self._clients = [[i for place in share for i in portions[place]] for share in shares]
        return iter(shares[self.rank])

    def place(self, client: int) -> Rows:
        if client not in self._rows:
            self._rows[client] = Rows(*map(torch.empty_like, self.like))
        return self._rows[client]

    def collect(self, out: Sequence[Rows]) -> None:
        for other in range(1, self.ranks):
            for client in self._clients[other] if self.rank in (0, other) else ():
                for part in out[client] if self.rank == 0 else self._rows.pop(client):
                    self._pass(part, other)

    def _pass(self, part: Tensor, sender: int) -> None:
        """From a rank to rank 0."""
        if not part.numel():
            return
        with together():
            if self.rank == 0:
                distributed.recv(part, src=sender)
            else:
                distributed.send(part, dst=0)


class Board(Channel):
    """Memory that all ranks share, of processes on one machine.

    Whoever is free takes the costliest portion that is left, so that a processor that others slow
    down gets less to do.
    """

    def __init__(self, fabric: Fabric, like: Rows, n_rows: int) -> None:
        self.rank = fabric.global_rank
        sizes = [part.numel() for part in like]
        n_bytes = HEAD + n_rows * sum(sizes) * like.params.element_size()
        where = ""
        if self.rank == 0:
            self._file = os.memfd_create("fedbench")  # not in /dev/shm, which containers keep small
            os.truncate(self._file, n_bytes)
            where = f"/proc/{os.getpid()}/fd/{self._file}"
        with together():
            where = fabric.broadcast(where)
        if self.rank > 0:
            self._file = os.open(where, os.O_RDWR | os.O_CLOEXEC)
        memory = mmap.mmap(self._file, n_bytes)
        self._taken = torch.frombuffer(memory, dtype=torch.int64, count=1)
        rows = torch.frombuffer(memory, dtype=like.params.dtype, offset=HEAD).view(n_rows, -1)
        self._rows = [Rows(*row.split(sizes)) for row in rows]
        self._own: set[int] = set()

    @staticmethod
    def suits(fabric: Fabric) -> bool:
        on_cpu = fabric.device.type == "cpu" and sys.platform == "linux"
        return on_cpu and fabric.world_size > 1

    def deal(
        self, portions: Sequence[Sequence[int]], costs: Sequence[int], n_ranks: int
    ) -> Iterator[int]:
        self._own.clear()
        if self.rank >= n_ranks:
            return
        places = sorted(range(len(portions)), key=lambda place: -costs[place])
        while (turn := self._turn()) < len(places):
            self._own.update(portions[places[turn]])
            yield places[turn]

    def place(self, client: int) -> Rows:
        return self._rows[client]

    def collect(self, out: Sequence[Rows]) -> None:
        if self.rank > 0:
            return
        for client in {*range(len(out))} - self._own:
            for part, sent in zip(out[client], self._rows[client], strict=True):
                part.copy_(sent)
        self._taken.zero_()  # for the next round, which begins when rank 0 says so

    def _turn(self) -> int:
        """A number that no other rank gets."""
        os.lockf(self._file, os.F_LOCK, 0)
        try:
            turn = int(self._taken)
            self._taken += 1
            return turn
        finally:
            os.lockf(self._file, os.F_ULOCK, 0)


@contextmanager
def together() -> Iterator[None]:
    """Around what all ranks do together: if one of them dies, the others get an error of the line.

    The process that started them all ends them for it, and says why: it must be the one to speak.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(PATIENCE)
        raise


def deal(items: Sequence[T], costs: Sequence[int], n_hands: int) -> list[list[T]]:
    """Items to hands of about equal costs: the costliest first, each to whoever has least."""
    hands: list[list[T]] = [[] for _ in range(n_hands)]
    loads = [0] * n_hands
    for i in sorted(range(len(items)), key=lambda i: -costs[i]):
        hand = loads.index(min(loads))
        hands[hand].append(items[i])
        loads[hand] += costs[i]
    return hands
