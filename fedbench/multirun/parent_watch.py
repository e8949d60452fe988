"""Ends a process when the process that started it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache


def exit_with_parent() -> None:
    """End this process soon after its parent, even if the parent is killed."""
    _watch_parent(os.getpid())


@cache
def _watch_parent(process: int) -> None:
    """Start one watcher per process; a forked child inherits the cache but not the thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
