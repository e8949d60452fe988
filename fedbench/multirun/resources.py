"""How many cores or GPUs each run of a sweep may use.

A unit is a GPU or, without GPUs, the cores of one process. Runs of one sweep learn about each other
from environment variables and from file locks.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from fedbench.errors import UserError
from fedbench.results.atomic_files import WriteError, writing

if TYPE_CHECKING:
    from fedbench.engine.executors import Executor

# Environment variables that a sweep sets for its runs:
SWEEP = "FEDBENCH_SWEEP"  # names the sweep
CORES = "FEDBENCH_CORES"  # cores that the launcher reserves for a run, if it does
PARALLEL = "FEDBENCH_PARALLEL"  # number of runs at a time
PRETRAINING = "FEDBENCH_PRETRAINING"  # number of runs that pretrain at first, while others wait
LAST_BATCH = "FEDBENCH_LAST"  # ids of the runs in the last, partial batch


def resolved(accelerator: str) -> str:
    """Return `cpu` or `cuda`: auto is cuda if there is a GPU, gpu is another name of cuda."""
    if accelerator == "auto":
        return "cuda" if n_gpus() else "cpu"
    return "cuda" if accelerator == "gpu" else accelerator


def check_accelerator(accelerator: str) -> None:
    """Raise a UserError for `cuda` on a machine without a GPU."""
    if accelerator == "cuda" and not n_gpus():
        raise UserError(
            "executor.accelerator=cuda: this machine has no GPU that torch can use; "
            "use cpu, or check with python -m fedbench.selfcheck"
        )


def n_gpus() -> int:
    """Number of GPUs that torch can use."""
    if "torch" not in sys.modules and not _has_gpu_driver():
        return 0  # torch takes seconds to import
    import torch

    return torch.cuda.device_count()


def _has_gpu_driver() -> bool:
    """Whether the driver of NVIDIA's or AMD's GPUs is installed."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            ctypes.CDLL(library)
            return True
    return os.path.exists("/dev/kfd")


def units(accelerator: str, threads: int = 1) -> int:
    """Number of GPUs or, on the CPU, of processes with `threads` cores each."""
    if resolved(accelerator) == "cuda":
        return max(n_gpus(), 1)
    return max(n_cores() // threads, 1)


def usable_devices(executor: Executor, n_clients: int) -> int:
    """`executor.devices`, at most one per core or GPU and one per client of a round."""
    assert executor.devices is not None
    n_units = n_gpus() if executor.accelerator == "cuda" else n_cores()
    return min(executor.devices, max(n_units, 1), n_clients)


def announce_limit(executor: Executor, n_clients: int) -> None:
    """Print a line, once per process, if a run cannot use all of `executor.devices`."""
    if executor.devices is None or usable_devices(executor, n_clients) == executor.devices:
        return
    n = usable_devices(executor, n_clients)
    kind = "GPU" if executor.accelerator == "cuda" else "core"
    s = "s" * (n > 1)
    reason = f"a round has {n} client{s}" if n == n_clients else f"this machine has {n} {kind}{s}"
    _announce(f"executor.devices={executor.devices}: {reason}; using {n}")


@cache
def _announce(line: str) -> None:
    print(line, flush=True)


def n_cores() -> int:
    """Number of cores that this process may use."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:  # Linux only
        n = os.cpu_count() or 1
    return min(n, int(os.environ.get(CORES, n)))


def jobs(accelerator: str, threads: int, devices: int | None) -> int:
    """Number of runs that fit on the machine at a time, each on `devices` units."""
    return max(units(accelerator, threads) // (devices or 1), 1)


def in_sweep() -> bool:
    """Whether this process is one of several workers of a sweep."""
    return PARALLEL in os.environ


def command_of_sweep() -> int:
    """Process id of the sweep, if `in_sweep`: its runs are on the same machine."""
    return int(os.environ[SWEEP].partition("-")[0])


def belongs_to_sweep() -> bool:
    """Whether this run is one of a sweep, also if its runs follow each other or run elsewhere."""
    return SWEEP in os.environ


def once_per_sweep(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say`; in a sweep, without the lines that another of its runs has said."""

    def say_new(line: str) -> None:
        if _is_new(line):
            say(line)

    return say_new if belongs_to_sweep() else say


def _is_new(line: str) -> bool:
    """Whether this is the first call with `line` in the sweep, in whichever process."""
    try:
        folder = _shared_folder(f"{_slots()}/said")
        (folder / hashlib.sha256(line.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    except (
        OSError,
        WriteError,
    ):  # saying it twice is better than not at all
        return True
    return True


def n_parallel() -> int:
    """Number of runs that share the machine: 1 outside a sweep."""
    return int(os.environ.get(PARALLEL, 1))


def n_pretraining() -> int:
    """Number of runs that share the machine while the others wait for a pretrained model."""
    return int(os.environ.get(PRETRAINING, 1))


def units_per_run(accelerator: str, threads: int, n_runs: int) -> int:
    """Units for each of `n_runs` parallel runs."""
    return max(units(accelerator, threads) // n_runs, 1)


def last_batch_size(run_id: str) -> int:
    """Number of runs in the sweep's last, partial batch; 0 if `run_id` is not one of them."""
    return len(_last_batch()) if run_id in _last_batch() else 0


def units_available(accelerator: str, threads: int) -> int:
    """Units that each run of the last batch may use now; grows as runs of earlier batches end."""
    n_free = n_parallel() - sum(map(_is_held, _locks(_slots(), n_parallel())))
    own = units_per_run(accelerator, threads, n_parallel())
    return own * (1 + n_free // max(len(_last_batch()), 1))


def sweep_slot() -> AbstractContextManager[object]:
    """Hold one of the sweep's slots, so that other runs can count those still going."""
    return claim(_slots(), 1, n_parallel()) if in_sweep() else nullcontext()


def forget_sweep(sweep: object) -> None:
    """Delete the lock files of a sweep."""
    from fedbench.datasets.files import cache_folder  # imports torch, which takes seconds

    shutil.rmtree(cache_folder(f"sweeps/{sweep}"), ignore_errors=True)
    shutil.rmtree(_without_cache() / f"sweeps/{sweep}", ignore_errors=True)
    for folder in (_without_cache() / "sweeps", _without_cache()):
        with suppress(OSError):  # not there, or of another sweep too
            folder.rmdir()


@contextmanager
def claim(resource: str, n: int, total: int) -> Iterator[list[int]]:
    """Claim `n` of the numbers below `total` that no other run holds; wait until `n` are free."""
    while True:
        with ExitStack() as held:  # releases them if too few: two waiting runs could deadlock
            claimed = []
            for number, lock in enumerate(_locks(resource, total)):
                with suppress(Timeout):
                    held.enter_context(lock.acquire(blocking=False))
                    claimed.append(number)
                if len(claimed) == n:
                    yield claimed
                    return
        time.sleep(0.1)


def _last_batch() -> list[str]:
    return os.environ.get(LAST_BATCH, "").split()


def _slots() -> str:
    return f"sweeps/{os.environ[SWEEP]}"


def _locks(resource: str, total: int) -> list[FileLock]:
    folder = _shared_folder(resource)
    return [FileLock(folder / f"{number}.lock") for number in range(total)]


def _shared_folder(name: str) -> Path:
    """Return a folder of the cache, or of the temporary folder if the cache cannot be written."""
    from fedbench.datasets.files import cache_folder  # imports torch, which takes seconds

    folder = cache_folder(name)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = _without_cache() / name
    with writing(folder):
        _without_cache().mkdir(0o700, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _without_cache() -> Path:
    return Path(tempfile.gettempdir(), f"fedbench-{os.getuid()}")


def _is_held(lock: FileLock) -> bool:
    with suppress(Timeout), lock.acquire(blocking=False):
        return False
    return True
