"""Whether what is given to fedbench ends as it should: it works, or is refused in one line."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

from fedbench.errors import one_line
from tests.soak.outcome import Outcome

LONGEST_LINE = 1100  # characters
MOST_SECONDS = 5.0  # of the processor; most take a few hundredths
MOST_MEMORY = 2**20  # kilobytes by which a try may raise the largest use of memory
HANGS_AFTER = 120.0  # seconds on the clock


class Hang(BaseException):
    """A try took longer than HANGS_AFTER."""


def judged(action: Callable[[], object], accepted: str, about: str) -> Outcome:
    """Call `action`. All but success and a user error in one line is a failure."""
    kind, problem, printed = accepted, None, StringIO()
    start, memory = time.process_time(), _peak()
    try:
        with _limited(), redirect_stdout(printed), redirect_stderr(printed):
            action()
    except Exception as error:
        kind, problem = "refused in one line", _flaw(error)
    except Hang as error:
        kind, problem = "hang", str(error)
    seconds, memory = time.process_time() - start, _peak() - memory
    if problem is None and seconds > MOST_SECONDS:
        problem = f"took {seconds:.0f} s of the processor"
    if problem is None and memory > MOST_MEMORY:
        problem = f"took {memory / 2**20:.1f} GB of memory"
    if problem is None and "Traceback" in printed.getvalue():
        problem = "printed a traceback"
    return Outcome(kind, problem and f"{about}: {problem}")


def _flaw(error: Exception) -> str | None:
    """What is wrong with how an error would be printed."""
    line = one_line(error)
    if line is None:
        return f"traceback of {type(error).__name__}: {error}"
    plain = len(line) <= LONGEST_LINE and line.isprintable()
    return None if plain else f"no plain line: {line[:2000]!r}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt what hangs."""

    def interrupt(number: int, frame: object) -> None:
        raise Hang(f"longer than {HANGS_AFTER:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
