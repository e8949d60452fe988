"""Ends a process when the process that started it ends, or the command that it works for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import cache

INTERVAL = 0.5  # seconds between looks at the other processes


def exit_with_parent(command: int | None = None) -> None:
    """End this process soon after its parent, even if the parent is killed.

    The same with `command`, the process of a sweep: it may not be the parent. joblib forks workers
    from a server, submitit starts jobs through a controller. Both may have ended before this call.
    """
    _watch(os.getpid(), command)


@cache
def _watch(process: int, command: int | None) -> None:
    """Start one watcher per process; a forked child inherits the cache but not the thread."""
    parent = os.getppid()
    # Knows the true parent, and whether it is alive, also if it ended before this call.
    # None if this process was not started by multiprocessing. joblib's own start has no sentinel.
    starter = multiprocessing.parent_process()
    if getattr(starter, "sentinel", None) is None:
        starter = None

    def watch() -> None:
        while (
            os.getppid() == parent
            and (starter is None or starter.is_alive())
            and (command is None or is_running(command))
        ):
            time.sleep(INTERVAL)
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def is_running(process: int) -> bool:
    """Whether a process of this user and machine has this id."""
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
