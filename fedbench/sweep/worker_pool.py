"""The processes in which joblib's launcher has the runs of a sweep: ready early, ended at once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver

from joblib.externals.loky import get_reusable_executor  # type: ignore[import-untyped]
from joblib.externals.loky.backend import context  # type: ignore[import-untyped]

# What a run imports, which takes seconds
NEEDED = ["fedbench.run", "fedbench.federation", "fedbench.engine.launch"]


def prepare() -> None:
    """Has a process import what runs need, while this one still checks the sweep.

    Workers will be forks of it: none has to import that again. Elsewhere than on Linux forks are
    not safe; there every worker imports for itself.
    """
    if sys.platform == "linux":
        context.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload(NEEDED)
        forkserver.ensure_running()
        atexit.register(_end_server)


def end() -> None:
    """Ends idle processes, which take seconds to end by themselves."""
    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def _end_server() -> None:
    """It would end by itself, but takes a second to take down all that it has imported."""
    with suppress(ProcessLookupError):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
