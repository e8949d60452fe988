"""Check this machine: `python -m fedbench.selfcheck`.

Compares GPUs with the CPU, several devices with one, the executors with each other, every defense
on the GPU with itself on the CPU, and checkpoints between devices. Without a GPU it compares
processes on the CPU. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from fedbench import __version__
from fedbench.errors import UserError, print_error
from fedbench.multirun import resources

DEFAULT_PROCESSES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        accelerator = resources.resolved(options.accelerator)
        resources.check_accelerator(accelerator)
        devices = _devices(accelerator, options.devices)
    except UserError as error:
        print_error(error)
        return 1
    for line in _machine(accelerator, devices):
        print(line, flush=True)
    from fedbench.selfcheck.checks import all_checks  # imports Lightning, which takes seconds

    begun, outcomes = time.monotonic(), []
    for result in all_checks(accelerator, devices, options.quick):
        print(result, flush=True)
        outcomes.append(result.ok)
    n_failed, seconds = outcomes.count(False), time.monotonic() - begun
    verdict = f"{n_failed} of {len(outcomes)} checks failed" if n_failed else "all checks ok"
    print(f"{len(outcomes)} checks in {seconds:.0f} s: {verdict}")
    return 1 if n_failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fedbench selfcheck",
        description="Check that fedbench computes the same on all devices of this machine.",
    )
    parser.add_argument("--accelerator", choices=("auto", "cpu", "cuda", "gpu"), default="auto")
    parser.add_argument("--devices", type=int, metavar="K", help="GPUs or processes; default: all")
    parser.add_argument("--quick", action="store_true", help="one model instead of all")
    return parser.parse_args(arguments)


def _devices(accelerator: str, wanted: int | None) -> int:
    """Number of GPUs, by default all of them, or of processes, by default two."""
    available = resources.units(accelerator)
    if wanted is None:
        return available if accelerator == "cuda" else min(available, DEFAULT_PROCESSES)
    if not 1 <= wanted <= available:
        kind = "GPUs" if accelerator == "cuda" else "cores"
        raise UserError(f"--devices {wanted}: must be from 1 to {available}, the number of {kind}")
    return wanted


def _machine(accelerator: str, devices: int) -> Iterator[str]:
    """What was found: versions, then each GPU, or that there is none."""
    import torch

    versions = f"torch {torch.__version__}, lightning {version('lightning')}"
    yield f"fedbench {__version__}, {versions}, Python {platform.python_version()}"
    n_gpus = resources.n_gpus()
    if not n_gpus:
        build = "torch is a CPU build" if torch.version.cuda is None else "torch sees none"
        yield f"No GPU found ({build}). GPUs are NOT checked, only {devices} processes on the CPU."
        return
    yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, {n_gpus} GPUs:"
    for i in range(n_gpus):
        gpu = torch.cuda.get_device_properties(i)
        yield f"  cuda:{i}  {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB"
    if accelerator == "cpu":
        yield f"As asked, GPUs are NOT checked, only {devices} processes on the CPU."


if __name__ == "__main__":
    sys.exit(main())
