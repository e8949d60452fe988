"""What a run may use of the machine: cores or GPUs, divided among the runs of a sweep."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from filelock import FileLock, Timeout

# Of a sweep, in the environment of its runs: its name, how many runs go on side by side, how many
# of them pretrain at first, and the ids of the last ones, if those are fewer than before.
SWEEP, PARALLEL = "FEDBENCH_SWEEP", "FEDBENCH_PARALLEL"
PRETRAINING, LAST = "FEDBENCH_PRETRAINING", "FEDBENCH_LAST"


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


def share(accelerator: str, threads: int, n_runs: int) -> int:
    """The units that one of so many runs side by side may use."""
    return max(units(accelerator, threads) // n_runs, 1)


def n_last(run_id: str) -> int:
    """How many the last runs of a sweep are, which leave room on the machine; 0 for any other."""
    return len(_last()) if run_id in _last() else 0


def room(accelerator: str, threads: int) -> int:
    """The units that each of a sweep's last runs may use now, while some others may still go on."""
    n_runs = side_by_side()
    free = n_runs - sum(map(_is_held, _locks(_sweep(), n_runs)))
    return share(accelerator, threads, n_runs) * (1 + free // max(len(_last()), 1))


@contextmanager
def place_in_sweep() -> Iterator[None]:
    """Around a run, if it is one of a sweep: so that others see that it goes on."""
    if not in_sweep():
        yield
        return
    with claimed(_sweep(), 1, side_by_side()):
        yield


def forget_sweep(name: object) -> None:
    """Removes what its runs have left."""
    from fedbench.datasets.files import cache_folder  # it imports torch, which takes seconds

    shutil.rmtree(cache_folder(f"sweeps/{name}"), ignore_errors=True)


@contextmanager
def claimed(what: str, n: int, total: int) -> Iterator[list[int]]:
    """n of the numbers below total that no other run has claimed; waits until there are as many."""
    with ExitStack() as held:
        claimed: list[int] = []
        while len(claimed) < n:
            for number, lock in enumerate(_locks(what, total)):
                if number in claimed:
                    continue
                try:
                    held.enter_context(lock.acquire(blocking=False))
                except Timeout:
                    continue
                claimed.append(number)
                if len(claimed) == n:
                    break
            else:
                if claimed:  # a part, which another may lack: start over
                    held.close()
                    claimed = []
                time.sleep(0.1)
        yield sorted(claimed)


def _last() -> list[str]:
    return os.environ.get(LAST, "").split()


def _sweep() -> str:
    return f"sweeps/{os.environ[SWEEP]}"


def _locks(what: str, total: int) -> list[FileLock]:
    from fedbench.datasets.files import cache_folder  # it imports torch, which takes seconds

    folder = cache_folder(what)
    folder.mkdir(parents=True, exist_ok=True)
    return [FileLock(folder / f"{number}.lock") for number in range(total)]


def _is_held(lock: FileLock) -> bool:
    try:
        with lock.acquire(blocking=False):
            return False
    except Timeout:
        return True
