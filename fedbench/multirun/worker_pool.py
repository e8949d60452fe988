"""The worker processes of joblib's launcher: imported early, ended at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize

from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]
from joblib.externals.loky.backend import context  # type: ignore[import-untyped]
from joblib.externals.loky.backend import resource_tracker as loky_tracker

from fedbench.multirun.scratch import temporary_files_inside

# `fork_server` sets up the server itself; runs need the others, which take seconds to import.
PRELOADED = [
    *("fedbench.multirun.fork_server", "fedbench.single_run", "fedbench.federation"),
    "fedbench.engine.launch",
]

LONGEST_FOLDER = 70  # bytes of a path; Linux allows 107 for a socket, and Python appends 32
LAST = -1000  # after multiprocessing's own finalizers, which remove what they put there
TRACKER_FILTER = "ignore:resource_tracker:UserWarning"


class WorkerPool:
    """A server that imports what runs need while this process checks the sweep, and its workers.

    Workers are forked from the server and skip these imports. Forks are safe on Linux only;
    elsewhere, and if the path of the temporary folder is too long for the server's socket, each
    worker imports everything itself.
    """

    def __init__(self) -> None:
        """Start the server. Temporary files of the sweep's processes are removed at exit."""
        folder = temporary_files_inside()
        Finalize(None, folder.remove, exitpriority=LAST)
        _start_silent_trackers()
        if sys.platform == "linux" and len(os.fsencode(folder.path)) <= LONGEST_FOLDER:
            context.set_start_method("forkserver", force=True)
            multiprocessing.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()

    def end(self) -> None:
        """Kill idle workers, which would take seconds to exit."""
        get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def _start_silent_trackers() -> None:
    """Start the resource trackers, processes of Python and joblib, without their warnings.

    A killed worker cannot remove the semaphores of the processes that it started. The trackers do
    this, as they should, but would print that the semaphores leaked.
    """
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{given},{TRACKER_FILTER}" if given else TRACKER_FILTER
    try:
        resource_tracker.ensure_running()
        loky_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if given is not None:
            os.environ["PYTHONWARNINGS"] = given
