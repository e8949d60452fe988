"""What all benchmarks share: options, rows, and interleaved timing."""

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
    """The command line. A benchmark replaces empty options by its own defaults."""

    repeats: int = 5
    threads: int = 1
    quick: bool = False  # small sizes: only shows that the benchmark runs
    defense: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    megabytes: int | None = None


@dataclass(frozen=True)
class Row:
    """Times of one variant and, optionally, of a baseline, timed alternately."""

    case: str  # the workload
    what: str
    seconds: Sequence[float]  # per repetition
    against: str | None = None  # the baseline
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
        """Compare two entries of the times that `time_interleaved` returns."""
        return cls(case, what, times[what], against, times[against], notes or {})

    def record(self) -> dict[str, Any]:
        """Return the row as JSON: medians, ratios and the times of every repetition."""
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
    """Median over repetitions of these / those; within a repetition both ran back to back."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def time_interleaved(
    cases: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Time all cases once per repetition, after a warm-up; return the seconds of each case."""
    return repeat_interleaved(
        {name: partial(time_call, case) for name, case in cases.items()}, repeats
    )


def repeat_interleaved(
    timers: Mapping[str, Callable[[], float]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Like `time_interleaved`, for cases that measure and return their own seconds."""
    if warm_up:
        for timer in timers.values():
            timer()
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def time_call(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def process_memory(key: str) -> int | None:
    """Memory of this process in bytes: VmRSS now, VmHWM at its peak. None except on Linux.

    getrusage would not do: its peak starts at the parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
