"""Connections between rank 0 and the other ranks: commands, replies, rows of updates.

They are pairs of sockets without an address, which the processes of a run inherit. No other process
can connect to them, so what arrives on them can be unpickled.
"""

from __future__ import annotations

import io
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

from fedbench.engine.flat_parameters import FlatModel

LOOK = 0.5  # seconds
GRACE = 30  # seconds for the parent process to end this one
SIZE = struct.Struct("!Q")  # precedes a message


class Link:
    """One end of the connection between rank 0 and another rank."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: Any) -> None:
        packed = io.BytesIO()
        torch.save(message, packed)
        self.end.sendall(SIZE.pack(packed.tell()))
        self.end.sendall(packed.getbuffer())

    def receive(self, device: torch.device) -> Any:
        """The next message, its tensors on this device. Waits for as long as it takes."""
        (size,) = SIZE.unpack(self._read(memoryview(bytearray(SIZE.size))))
        packed = io.BytesIO(self._read(memoryview(bytearray(size))))
        return torch.load(packed, map_location=device, weights_only=False)

    def send_row(self, row: Tensor) -> None:
        self.end.sendall(_bytes(row.cpu()))

    def receive_row(self, out: Tensor) -> None:
        on_host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        self._read(_bytes(on_host))
        if on_host is not out:
            out.copy_(on_host)

    def answers_within(self, seconds: float) -> bool:
        """Whether a message begins to arrive in this time.

        Counts looks, not the clock, so that time stands still while the machine sleeps or the job
        is suspended.
        """
        waited = 0.0
        while not wait([self.end], LOOK):
            waited += LOOK
            if waited >= seconds:
                return False
        return True

    def close(self) -> None:
        self.end.close()

    def _read(self, into: memoryview) -> memoryview:
        left = into
        while left:
            n_bytes = self.end.recv_into(left)
            if not n_bytes:
                raise ConnectionResetError("the rank at the other end of the link has ended")
            left = left[n_bytes:]
        return into


def _bytes(row: Tensor) -> memoryview:
    return row.view(torch.uint8).numpy().data


def connect(n_ranks: int) -> list[tuple[Link, Link]]:
    """Connect rank 0 with each other rank: its end, and the other's."""
    pairs = [socket.socketpair() for _ in range(1, n_ranks)]
    return [(Link(first), Link(other)) for first, other in pairs]


def links_of(rank: int, pairs: Sequence[tuple[Link, Link]]) -> list[Link]:
    """Keep this rank's ends open: on rank 0 one per other rank, on another rank the one to rank 0.

    The others must be closed, or no rank would notice that another has ended.
    """
    own = [first for first, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
    for link in (link for pair in pairs for link in pair):
        if link not in own:
            link.close()
    return own


def links_in(fabric: Fabric) -> Sequence[Link]:
    """The links of a rank's Fabric; none if the run has one process."""
    return getattr(fabric.strategy, "links", ())


class RankStrategy(SingleDeviceStrategy):
    """Lightning's strategy for a rank: one device, and links to the other ranks."""

    def __init__(self, device: torch.device, rank: int, n_ranks: int, links: list[Link]) -> None:
        super().__init__(device)
        self.global_rank = self.local_rank = rank
        self.world_size = n_ranks
        self.links = links

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        marker: Any = rank_zero_only
        marker.rank = self.global_rank


@contextmanager
def ended_by_parent() -> Iterator[None]:
    """Wrap communication with a rank, which fails if that rank dies.

    The parent process then ends every rank and reports the cause. The error of a survivor would
    hide it, so it waits to be ended.
    """
    try:
        yield
    except ConnectionError:
        time.sleep(GRACE)
        raise


def send_to_rank_0(
    results: Mapping[int, FlatModel],
    clients_by_rank: Sequence[Sequence[int]],
    rank: int,
    links: Sequence[Link],
) -> None:
    """Send this rank's results; on rank 0, receive those of all other ranks into `results`."""
    if rank == 0:
        for link, clients in zip(links, clients_by_rank[1:], strict=True):
            for row in (row for client in clients for row in results[client]):
                with ended_by_parent():
                    link.receive_row(row)
    else:
        for row in (row for client in clients_by_rank[rank] for row in results[client]):
            links[0].send_row(row)
