"""Two fake GPUs in one process: a thread per rank, and links between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from fake_gpu import FakeGpuAccelerator, FakeGpuMode, FakeGpuStrategy, fake_gpus
from lightning.fabric import Fabric

from fedbench.engine.transport import Link, connect

TIMEOUT = 30  # seconds


class FakeRankStrategy(FakeGpuStrategy):
    """Rank `rank` of two, on the GPU with this index."""

    def __init__(self, rank: int, link: Link) -> None:
        super().__init__(torch.device("cuda", rank), FakeGpuAccelerator())
        self.global_rank, self.world_size, self.links = rank, 2, [link]


@contextmanager
def two_ranks(serve: Callable[[Fabric], None]) -> Iterator[Fabric]:
    """Fabric of rank 0; `serve` runs with that of rank 1 in another thread."""
    ((first, other),) = connect(2)
    errors: list[Exception] = []

    def run_other() -> None:
        try:
            with FakeGpuMode():
                serve(Fabric(strategy=FakeRankStrategy(1, other)))
        except Exception as error:
            errors.append(error)
        finally:
            other.close()

    with fake_gpus():
        thread = threading.Thread(target=run_other, daemon=True)
        thread.start()
        try:
            yield Fabric(strategy=FakeRankStrategy(0, first))
        finally:
            first.close()
            thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert errors == []
