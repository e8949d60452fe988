"""The worker processes of joblib's launcher: imported early, ended at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver

from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]
from joblib.externals.loky.backend import context  # type: ignore[import-untyped]

# `fork_server` sets up the server itself; runs need the others, which take seconds to import.
PRELOADED = [
    *("fedbench.multirun.fork_server", "fedbench.single_run", "fedbench.federation"),
    "fedbench.engine.launch",
]

TRACKER_FILTER = "ignore:resource_tracker:UserWarning"


def prepare() -> None:
    """Start a server that imports what runs need, while this process checks the sweep.

    Workers are forked from it and skip these imports. Forks are safe on Linux only; elsewhere each
    worker imports everything itself.
    """
    _silence_tracker()
    if sys.platform == "linux":
        context.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def _silence_tracker() -> None:
    """Keep Python's resource tracker, a process that starts later, from warning about semaphores.

    A killed worker cannot remove the semaphores of the processes that it started. The tracker does
    this, as it should, but would print that they leaked.
    """
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{given},{TRACKER_FILTER}" if given else TRACKER_FILTER


def end() -> None:
    """Kill idle workers, which would take seconds to exit."""
    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)
