"""What a run may use of the machine: cores or GPUs, divided among the runs of a sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from filelock import FileLock, Timeout

# How many runs of a sweep go on side by side, and how many of them pretrain at first. In the
# environment, since workers of any launcher inherit that.
PARALLEL, PRETRAINING = "FEDBENCH_PARALLEL", "FEDBENCH_PRETRAINING"


def units(accelerator: str, threads: int = 1) -> int:
    """How many processes or GPUs there are: cores, by the threads of each process, or GPUs."""
    if accelerator == "mps":
        return 1
    if accelerator != "cpu":
        import torch

        if n_gpus := torch.cuda.device_count():
            return n_gpus
    return max(n_cores() // threads, 1)


def n_cores() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def jobs(accelerator: str, threads: int, devices: int | None) -> int:
    """How many runs there is room for, each on so many devices."""
    return max(units(accelerator, threads) // (devices or 1), 1)


def side_by_side(what: str = PARALLEL) -> int:
    """How many runs share the machine: 1 outside of a sweep."""
    return int(os.environ.get(what, 1))


def in_sweep() -> bool:
    return PARALLEL in os.environ


def share(accelerator: str, threads: int, what: str = PARALLEL) -> int:
    """The units that one of several runs side by side may use."""
    return max(units(accelerator, threads) // side_by_side(what), 1)


@contextmanager
def claimed_gpus(n: int, n_gpus: int) -> Iterator[list[int]]:
    """n GPUs that no other run of a sweep uses now; waits until there are as many."""
    from fedbench.files import cache_folder  # it imports torch, which takes seconds

    folder = cache_folder("gpus")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        claimed: list[int] = []
        while len(claimed) < n:
            for gpu in sorted({*range(n_gpus)} - {*claimed}):
                lock = FileLock(folder / f"{gpu}.lock")
                try:
                    held.enter_context(lock.acquire(blocking=False))
                except Timeout:
                    continue
                claimed.append(gpu)
                if len(claimed) == n:
                    break
            else:
                if claimed:  # a part, which another may lack: start over
                    held.close()
                    claimed = []
                time.sleep(0.1)
        yield sorted(claimed)
