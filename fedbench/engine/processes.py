"""The processes of a run: they start together, are watched, and end together."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from fedbench.engine.transport import Link, connect, links_of
from fedbench.errors import UserError
from fedbench.multirun.parent_watch import exit_with_parent

LOOK = 0.5  # seconds between looks at the processes
STOPPED = 60.0  # seconds that a process may be stopped by a signal while this one is not
GRACE = 3.0  # seconds that a process has to end before it is killed
SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]

Main = Callable[[int, list[Link]], Any]  # of a rank: its number and its links
Pairs = Sequence[tuple[Link, Link]]
StartMethod = Literal["fork", "spawn"]


class WorkerError(UserError):
    """A process of the run died without raising an exception, or was stopped."""


class RankError(RuntimeError):
    """A process of the run raised an exception; the cause is its traceback."""


def run_ranks(start_method: StartMethod, n_ranks: int, main: Main) -> Any:
    """Run `main(rank, links)` in a process for each rank; return rank 0's result.

    However this ends, no process is left.
    """
    pairs = connect(n_ranks)
    ranks = [Rank(start_method, rank, n_ranks, main, pairs) for rank in range(n_ranks)]
    try:
        with _signals_held():
            for rank in ranks:
                rank.start()
        for link in (link for pair in pairs for link in pair):
            link.close()
        return _result(ranks)
    except KeyboardInterrupt:
        ranks[0].interrupt()
        raise
    finally:
        for rank in ranks:
            rank.kill()


def _result(ranks: Sequence[Rank]) -> Any:
    """Wait for rank 0. Raise the error of the first rank that fails."""
    left = [*ranks]
    while ranks[0] in left:
        events = wait([event for rank in left for event in rank.events()], LOOK)
        for rank in [*left]:
            if rank.has_ended():
                left.remove(rank)
                rank.check_outcome()
            elif not events:
                rank.check_not_stopped()
    deadline = time.monotonic() + GRACE
    for rank in left:  # nothing is left for them to do
        rank.process.join(max(deadline - time.monotonic(), 0))
    return ranks[0].outcome[1]


class Rank:
    """The process of a rank, as its parent sees it."""

    def __init__(
        self, start_method: StartMethod, rank: int, n_ranks: int, main: Main, pairs: Pairs
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.name = f"worker process {rank + 1} of {n_ranks}"
        self.outcome: tuple[str, Any] = ("died", None)
        self._stopped = 0.0  # seconds
        self._report, self._sender = context.Pipe(duplex=False)
        arguments = (rank, main, pairs, self._sender)
        self.process = context.Process(target=_run, args=arguments, name=f"rank {rank}")

    def start(self) -> None:
        self.process.start()
        self._sender.close()

    def events(self) -> list[Any]:
        """What becomes ready when there is something to look at."""
        return [self.process.sentinel, *([] if self._report.closed else [self._report])]

    def has_ended(self) -> bool:
        """Whether the process has ended; receives its outcome, if it has sent one."""
        ended = self.process.exitcode is not None
        if not self._report.closed and self._report.poll():
            with suppress(EOFError):
                self.outcome = pickle.loads(self._report.recv_bytes())
            self._report.close()
        return ended

    def check_outcome(self) -> None:
        """Raise what the process raised, or the user error that it returned, once it has ended."""
        kind, value = self.outcome
        if isinstance(value, UserError):
            raise value
        if kind == "interrupted":
            raise KeyboardInterrupt
        if kind == "raised":
            line, trace = value
            raise RankError(line) from RuntimeError(f"in {self.name}:\n{trace}")
        if kind == "died":
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise WorkerError(f"{self.name} died ({how}); the same command resumes the run")

    def check_not_stopped(self) -> None:
        """Raise a WorkerError if the process has been stopped for long. Call this every LOOK."""
        self._stopped = self._stopped + LOOK if _is_stopped(self.process.pid) else 0.0
        if self._stopped >= STOPPED:
            raise WorkerError(
                f"{self.name} has been stopped by a signal (SIGSTOP) for {STOPPED:.0f} s; "
                "the same command resumes the run"
            )

    def interrupt(self) -> None:
        """Give the process a few seconds to record that the run was interrupted."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(GRACE)

    def kill(self) -> None:
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()


def _is_stopped(process: int | None) -> bool:
    if process is None or not hasattr(os, "waitid"):  # not on Windows and older macOS
        return False
    with suppress(ChildProcessError):
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process, how) is not None
    return False


def _run(rank: int, main: Main, pairs: Pairs, sender: Connection) -> None:
    """Main function of a process."""
    exit_with_parent()
    try:
        _take_signals(rank)
        outcome: tuple[str, Any] = ("returned", main(rank, links_of(rank, pairs)))
    except KeyboardInterrupt:
        outcome = "interrupted", None
    except UserError as error:
        outcome = "returned", UserError(str(error))
    except Exception as error:
        line = "".join(traceback.format_exception_only(error)).strip()
        outcome = "raised", (line, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))


def _take_signals(rank: int) -> None:
    """Leave signals to the parent: it interrupts rank 0 by SIGTERM and kills the other ranks."""
    for number in SIGNALS:
        signal.signal(number, _interrupt if (rank, number) == (0, signal.SIGTERM) else _nothing)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _interrupt(number: int, frame: object) -> None:
    signal.signal(number, _nothing)  # one is enough: a second would end what the first began
    raise KeyboardInterrupt


def _nothing(number: int, frame: object) -> None:
    """A function, and not SIG_IGN, which programs that the process starts would inherit."""


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals wait while processes start, which would not know yet what to do with them."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
