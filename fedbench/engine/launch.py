"""Launches a run: Lightning's Fabric in this process, or in one process per rank."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from fedbench.engine.executors import Executor
from fedbench.engine.processes import run_ranks
from fedbench.engine.transport import Link, RankStrategy
from fedbench.errors import UserError
from fedbench.multirun import resources
from fedbench.multirun.scratch import temporary_files_removed

KEPT_BLOCK = 256 * 2**20  # bytes; larger blocks return to the system when freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def make_fabric(
    executor: Executor, devices: int | list[int] = 1, strategy: RankStrategy | None = None
) -> Fabric:
    """Fabric on one device: that of the strategy, or the GPU with the given index."""
    try:
        return Fabric(
            accelerator=executor.accelerator,
            strategy=strategy or "auto",
            devices=devices,
            precision=executor.precision,  # type: ignore[arg-type]
            plugins=[LightningEnvironment()],  # in a Slurm job, Lightning would expect a task each
        )
    except RuntimeError as error:
        raise UserError(f"executor.accelerator={executor.accelerator}: {error}") from error


def _can_fork(executor: Executor) -> bool:
    """Forked processes start fast and share loaded data, but threads do not survive a fork.

    CUDA, autograd on machines with GPUs, and multi-threaded operations all use threads.
    """
    no_threads = executor.threads == 1 and not torch.cuda.is_available()
    return sys.platform == "linux" and executor.accelerator == "cpu" and no_threads


def launch(executor: Executor, devices: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(fabric, *arguments)` on every rank; return rank 0's result.

    An exception in another process carries that process's traceback.
    """
    torch.set_num_threads(executor.threads)  # before a fork, which threads do not survive
    with _claimed_devices(executor, devices) as claimed:
        if devices == 1:
            keep_freed_memory()
            return make_fabric(executor, claimed).launch(function, *arguments)
        numbers = claimed if isinstance(claimed, list) else [*range(claimed)]
        main = RankMain(executor, numbers, function, arguments)
        with temporary_files_removed():  # ranks may be killed
            return run_ranks("fork" if _can_fork(executor) else "spawn", devices, main)


@dataclass(frozen=True)
class RankMain:
    """Main function of a rank: makes its Fabric and calls `function`."""

    executor: Executor
    devices: list[int]  # of each rank; GPUs, or any numbers on the CPU
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, rank: int, links: list[Link]) -> Any:
        keep_freed_memory()
        torch.set_num_threads(self.executor.threads)
        on_cpu = self.executor.accelerator == "cpu"
        device = torch.device("cpu") if on_cpu else torch.device("cuda", self.devices[rank])
        strategy = RankStrategy(device, rank, len(self.devices), links)
        fabric = make_fabric(self.executor, 1 if on_cpu else [self.devices[rank]], strategy)
        return fabric.launch(self.function, *self.arguments)


@contextmanager
def _claimed_devices(executor: Executor, devices: int) -> Iterator[int | list[int]]:
    """The number of devices; in a sweep on GPUs, the indices of GPUs that no other run uses."""
    n_gpus = resources.n_gpus() if executor.accelerator == "cuda" else 0
    if resources.in_sweep() and devices <= n_gpus:
        with resources.claim("gpus", devices, n_gpus) as numbers:
            yield numbers
    else:
        yield devices


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, so that training steps do not fault in new pages.

    Page faults took a quarter of the time of a convolutional network. Works with glibc only.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
