"""What every benchmark is made of: its options, its rows, and cases that are timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """The command line. Empty settings of one benchmark: it takes its own."""

    repeats: int = 5
    threads: int = 1
    quick: bool = False  # small sizes, to see that it runs
    defense: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    megabytes: int | None = None


@dataclass(frozen=True)
class Row:
    """Seconds of one thing and of another that was timed in turn with it."""

    case: str  # on what
    what: str
    seconds: Sequence[float]  # of each repetition
    against: str | None = None
    against_seconds: Sequence[float] = ()
    notes: Mapping[str, float] = field(default_factory=dict)  # other numbers, by name

    @classmethod
    def of(
        cls,
        case: str,
        times: Mapping[str, Sequence[float]],
        what: str,
        against: str,
        notes: Mapping[str, float] | None = None,
    ) -> Row:
        """A row of two of the times that `side_by_side` gave."""
        return cls(case, what, times[what], against, times[against], notes or {})

    def record(self) -> dict[str, Any]:
        """The row as it is printed and written: medians, and every repetition."""
        compared = self.against is not None
        return {
            "case": self.case,
            "what": self.what,
            "against": self.against,
            "median": statistics.median(self.seconds),
            "against_median": statistics.median(self.against_seconds) if compared else None,
            "ratio": ratio(self.seconds, self.against_seconds) if compared else None,
            "times_as_fast": ratio(self.against_seconds, self.seconds) if compared else None,
            "seconds": list(self.seconds),
            "against_seconds": list(self.against_seconds),
            "notes": dict(self.notes),
        }


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over repetitions of these / those, which were timed one right after another."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def side_by_side(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each case in each repetition, all cases in turn, after a round to warm up."""
    return in_turn({name: partial(clocked, case) for name, case in cases.items()}, repeats)


def in_turn(
    clocks: Mapping[str, Callable[[], float]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """The same for cases that say themselves how many seconds they took."""
    if warm_up:
        for clock in clocks.values():
            clock()
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(repeats):
        for name, clock in clocks.items():
            times[name].append(clock())
    return times


def clocked(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def resident(key: str) -> int | None:
    """Bytes of memory that this process has, VmRSS, or had at most, VmHWM; None but on Linux.

    Not getrusage: its peak starts from that of the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
