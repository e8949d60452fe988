"""The processes of a run: how they start, what memory they keep, how they end together."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.multiprocessing.spawn import ProcessExitedException

from fedbench.engine.executors import Executor
from fedbench.errors import UserError
from fedbench.sweep import resources

KEPT_BLOCK = 256 * 2**20  # bytes; larger ones go back to the system when they are freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # else of each it ends


class WorkerError(UserError):
    """A process of the run ended before its time, by no error of its own."""


def fabric_of(executor: Executor, devices: int | list[int] = 1) -> Fabric:
    """Lightning's Fabric on so many processes or GPUs, or on the GPUs of these numbers."""
    strategy = "auto"
    if (devices if isinstance(devices, int) else len(devices)) > 1:
        # Processes that run a function, not the command line again, which may be a whole sweep's.
        strategy = "ddp_fork" if _can_fork(executor) else "ddp_spawn"
    try:
        return Fabric(
            accelerator=executor.accelerator,
            strategy=strategy,
            devices=devices,
            precision=executor.precision,  # type: ignore[arg-type]
        )
    except RuntimeError as error:
        raise UserError(f"executor.accelerator={executor.accelerator}: {error}") from error


def _can_fork(executor: Executor) -> bool:
    """Forked processes start at once and share what is loaded, but not what has threads.

    Those are GPUs, autograd wherever there are GPUs, and operations on several cores.
    """
    alone = executor.threads == 1 and not torch.cuda.is_available()
    return sys.platform == "linux" and executor.accelerator == "cpu" and alone


def launch(executor: Executor, devices: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(fabric, *arguments)` returns on rank 0; it runs on every rank.

    What it raises in a process of its own comes with that process's traceback.
    """
    torch.set_num_threads(executor.threads)  # before a fork: threads do not come along
    with _own_port(), _claimed(executor, devices) as places:
        fabric = fabric_of(executor, places)
        try:
            return fabric.launch(_Rank(executor.threads, function, arguments))
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
def _claimed(executor: Executor, devices: int) -> Iterator[int | list[int]]:
    """So many processes; or GPUs, in a sweep those that no other run uses."""
    n_gpus = 0 if executor.accelerator in ("cpu", "mps") else torch.cuda.device_count()
    if resources.in_sweep() and devices <= n_gpus:
        with resources.claimed("gpus", devices, n_gpus) as numbers:
            yield numbers
    else:
        yield devices


class _Rank:
    """What a process does. Not a function and its arguments: Lightning looks into those, and into
    frozen dataclasses it cannot."""

    def __init__(
        self, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self.threads, self.function, self.arguments = threads, function, arguments

    def __call__(self, fabric: Fabric) -> Any:
        keep_memory()
        torch.set_num_threads(self.threads)  # Lightning has set what it thinks best
        if fabric.world_size > 1:
            end_with_parent()
        if fabric.global_rank > 0:
            # Rank 0 must not take the end of another rank for a failure of the run: it goes first.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self.function(fabric, *self.arguments)


def keep_memory() -> None:
    """Lets freed memory stay with the process: else each step of training gets it anew.

    New pages were seen to cost a convolutional network a quarter of its time. Only glibc can be
    told so.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def end_with_parent() -> None:
    """Ends this process soon after its parent, which may be killed without a word."""
    _watch_parent(os.getpid())


@cache
def _watch_parent(process: int) -> None:
    """Once in a process; a fork's child has the cache of its parent, but not the thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _own_port() -> Iterator[None]:
    """Lightning keeps the port of one launch for the next, and for the processes started then."""
    before = os.environ.get("MASTER_PORT")
    try:
        yield
    finally:
        os.environ.pop("MASTER_PORT", None)
        if before is not None:
            os.environ["MASTER_PORT"] = before


def _interrupt_children() -> None:
    """A terminal interrupts all processes of a command, but `kill -INT` only the one named."""
    children = multiprocessing.active_children()
    for patience, number in ((2, signal.SIGINT), (10, signal.SIGTERM)):
        deadline = time.monotonic() + patience
        for child in children:
            child.join(max(deadline - time.monotonic(), 0))
        for child in children:
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, number)
