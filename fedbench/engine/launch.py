"""Launches the processes of a run and makes sure that they end together."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException

from fedbench.engine.executors import Executor
from fedbench.errors import UserError
from fedbench.multirun import resources
from fedbench.multirun.parent_watch import exit_with_parent

# Ranks wait for rank 0 while it waits for another run's pretraining; torch gives up after 30 min.
MAX_WAIT = timedelta(days=30)
KEPT_BLOCK = 256 * 2**20  # bytes; larger blocks return to the system when freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h

logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it logs each


class WorkerError(UserError):
    """A process of the run died without raising an exception, for example by a signal."""


def make_fabric(executor: Executor, devices: int | list[int] = 1) -> Fabric:
    """Fabric on a number of processes or GPUs, or on the GPUs with the given indices."""
    strategy: str | DDPStrategy = "auto"
    if (devices if isinstance(devices, int) else len(devices)) > 1:
        # Lightning's script launchers would run the command line, perhaps a whole sweep, again.
        start_method: Literal["fork", "spawn"] = "fork" if _can_fork(executor) else "spawn"
        strategy = DDPStrategy(start_method=start_method, timeout=MAX_WAIT)
    try:
        return Fabric(
            accelerator=executor.accelerator,
            strategy=strategy,
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
    with _restored_port(), _claimed_devices(executor, devices) as claimed:
        fabric = make_fabric(executor, claimed)
        try:
            return fabric.launch(_RankMain(executor.threads, function, arguments))
        except KeyboardInterrupt:
            _interrupt_children()
            raise
        except ProcessExitedException as error:
            how = error.signal_name or f"exit code {error.exit_code}"
            raise WorkerError(
                f"worker process {error.error_index + 1} of {devices} died ({how}); "
                "the same command resumes the run"
            ) from error


@contextmanager
def _claimed_devices(executor: Executor, devices: int) -> Iterator[int | list[int]]:
    """The number of devices; in a sweep on GPUs, the indices of GPUs that no other run uses."""
    n_gpus = resources.n_gpus() if executor.accelerator == "cuda" else 0
    if resources.in_sweep() and devices <= n_gpus:
        with resources.claim("gpus", devices, n_gpus) as numbers:
            yield numbers
    else:
        yield devices


class _RankMain:
    """Main function of a process.

    An object, because Lightning inspects function arguments and fails on frozen dataclasses.
    """

    def __init__(
        self, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self.threads, self.function, self.arguments = threads, function, arguments

    def __call__(self, fabric: Fabric) -> Any:
        keep_freed_memory()
        torch.set_num_threads(self.threads)  # Lightning has set its own number
        if fabric.world_size > 1:
            exit_with_parent()
        if fabric.global_rank > 0:
            # Rank 0 handles Ctrl-C first; it would take the end of another rank for a failure.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        result = self.function(fabric, *self.arguments)
        if distributed.is_initialized():
            # Its threads would abort the process if they ran while Python shuts down.
            distributed.destroy_process_group()
        return result


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


@contextmanager
def _restored_port() -> Iterator[None]:
    """Undo Lightning's MASTER_PORT, which the next launch would otherwise reuse."""
    before = os.environ.get("MASTER_PORT")
    try:
        yield
    finally:
        os.environ.pop("MASTER_PORT", None)
        if before is not None:
            os.environ["MASTER_PORT"] = before


def _interrupt_children() -> None:
    """Pass an interrupt on: Ctrl-C reaches all processes of a command, `kill -INT` only one."""
    children = multiprocessing.active_children()
    for grace, number in ((2, signal.SIGINT), (10, signal.SIGTERM)):
        deadline = time.monotonic() + grace
        for child in children:
            child.join(max(deadline - time.monotonic(), 0))
        for child in children:
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, number)
