"""Ends a command on SIGTERM and SIGHUP as on Ctrl-C: with one line, within seconds, resumable.

Slurm's pre-emption sends SIGTERM, a closing terminal SIGHUP.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from fedbench.errors import Terminated

GRACE = 4.0  # seconds to end in an orderly way
# Handlers that are replaced. Others stay: `nohup` ignores SIGHUP, submitit has its own for jobs.
USUAL = {
    getattr(signal, name): handler
    for name, handler in (
        ("SIGINT", signal.default_int_handler),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_DFL),
    )
    if hasattr(signal, name)  # Windows has no SIGHUP
}


@contextmanager
def termination_handled() -> Iterator[None]:
    """Raise KeyboardInterrupt or Terminated on the first signal, ignore further ones.

    The process ends after GRACE seconds, even if something else catches the exception or hangs.
    """
    replaced = [number for number, handler in USUAL.items() if signal.getsignal(number) == handler]
    if threading.current_thread() is not threading.main_thread():
        replaced = []  # only the main thread may set handlers
    for number in replaced:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_IGN if _ending.is_set() else USUAL[number])


_ending = threading.Event()


def leave(stop: KeyboardInterrupt) -> NoReturn:
    """Exit with the code of the signal.

    Without tearing down the interpreter: with torch, that takes seconds on a busy machine.
    """
    code = stop.exit_code if isinstance(stop, Terminated) else 128 + signal.SIGINT
    if not _ending.is_set():  # raised by something else than a signal
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    if _ending.is_set():
        return
    _ending.set()
    threading.Thread(target=_end_late, args=[128 + number], name="end", daemon=True).start()
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def _end_late(code: int) -> None:
    time.sleep(GRACE)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _restore_usual_handlers() -> None:
    """In a forked process SIGTERM and SIGHUP end it at once, even if it hangs in a library."""
    for number in USUAL:
        if number != signal.SIGINT and signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_usual_handlers)
