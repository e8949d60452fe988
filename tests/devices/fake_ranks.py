"""Two fake GPUs in one process: a thread per rank, and queues in place of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any
from unittest import mock

import torch
from fake_gpu import FakeGpuAccelerator, FakeGpuMode, FakeGpuStrategy, fake_gpus
from lightning.fabric import Fabric
from torch import Tensor

TIMEOUT = 30  # seconds


class FakeRankStrategy(FakeGpuStrategy):
    """Rank `global_rank` of two, on the GPU with this index."""

    def __init__(self, global_rank: int, group: FakeGroup) -> None:
        super().__init__(torch.device("cuda", global_rank), FakeGpuAccelerator())
        self.global_rank, self.world_size, self.group = global_rank, 2, group

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.group.broadcast(obj)


class FakeGroup:
    """`torch.distributed` for two threads. As with NCCL, tensors must be on the rank's own GPU."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.sent: tuple[Queue[Any], Queue[Any]] = Queue(), Queue()  # by receiving rank

    @property
    def rank(self) -> int:
        rank: int = self.local.rank
        return rank

    def put(self, value: Any) -> None:
        self.sent[1 - self.rank].put(value)

    def get(self) -> Any:
        value = self.sent[self.rank].get(timeout=TIMEOUT)
        if isinstance(value, BaseException):
            raise value
        return value

    def broadcast(self, obj: Any) -> Any:
        if self.rank == 0:
            self.put(obj)
            return obj
        return self.get()

    def check(self, tensor: Tensor) -> Any:
        assert tensor.device == torch.device("cuda", self.rank), f"{tensor.device} on {self.rank}"
        assert tensor.is_contiguous()
        return tensor

    def send(self, tensor: Tensor, dst: int) -> None:
        self.put(self.check(tensor).host.clone())

    def recv(self, tensor: Tensor, src: int) -> None:
        self.check(tensor).host.copy_(self.get())

    def all_reduce(self, tensor: Tensor) -> None:
        host = self.check(tensor).host
        self.put(host.clone())
        host.add_(self.get())

    def all_gather_object(self, into: list[Any], mine: Any) -> None:
        self.put(mine)
        into[self.rank], into[1 - self.rank] = mine, self.get()


@contextmanager
def two_ranks(serve: Callable[[Fabric], None]) -> Iterator[Fabric]:
    """Fabric of rank 0; `serve` runs with that of rank 1 in another thread."""
    group = FakeGroup()

    def other() -> None:
        group.local.rank = 1
        try:
            with FakeGpuMode():
                serve(Fabric(strategy=FakeRankStrategy(1, group)))
        except Exception as error:
            group.put(error)

    names = ("send", "recv", "all_reduce", "all_gather_object")
    group.local.rank = 0
    with (
        fake_gpus(),
        mock.patch.multiple(torch.distributed, **{n: getattr(group, n) for n in names}),
    ):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        yield Fabric(strategy=FakeRankStrategy(0, group))
        thread.join(TIMEOUT)
    assert not thread.is_alive()
