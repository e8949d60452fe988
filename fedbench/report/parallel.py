"""Run the parts of a report side by side, in processes forked from this one."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

Job = Callable[[], list[Path]]  # writes files and returns them

MAX_PROCESSES = 4
FEW = 4  # jobs for which further processes do not pay

# What the forked processes run. Jobs and their data are not sent to them, only numbers.
_jobs: dict[int, Job] = {}


def run_jobs(jobs: Sequence[Job]) -> list[list[Path]]:
    """Run the jobs, in several processes where that is safe and pays."""
    n = min(MAX_PROCESSES, _n_cores(), len(jobs))
    # Forking is unsafe with the system libraries of macOS, and impossible on Windows.
    can_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
    if n < 2 or len(jobs) < FEW or not can_fork:
        return [job() for job in jobs]
    _load_matplotlib()
    _jobs.clear()
    _jobs.update(enumerate(jobs))
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(n, context) as pool:
            return [*pool.map(_run_job, range(len(jobs)))]
    finally:
        _jobs.clear()


def _run_job(number: int) -> list[Path]:
    return _jobs[number]()


def _n_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _load_matplotlib() -> None:
    """Import the drawing code and read the fonts once, before processes are forked."""
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401

    from fedbench.report.plotting import printable

    printable("")
