"""What ranks send each other: the results of clients go to rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import distributed

from fedbench.engine.flat_parameters import FlatModel

GRACE = 30  # seconds for the parent process to end this one


@contextmanager
def collective() -> Iterator[None]:
    """Wrap an operation of several ranks, which fails on all of them if one dies.

    The parent process then ends every rank and reports the cause. The error of a survivor would
    hide it, so it waits to be ended.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(GRACE)
        raise


def send_to_rank_0(
    results: Mapping[int, FlatModel], clients_by_rank: Sequence[Sequence[int]], rank: int
) -> None:
    """Send this rank's results; on rank 0, receive those of all other ranks into `results`."""
    for sender, clients in enumerate(clients_by_rank):
        if sender == 0 or rank not in (0, sender):
            continue
        for client in clients:
            for part in results[client]:
                if not part.numel():
                    continue
                with collective():
                    if rank == 0:
                        distributed.recv(part, src=sender)
                    else:
                        distributed.send(part, dst=0)
