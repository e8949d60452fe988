"""The state of a sweep's runs, drawn as one panel or summed up in a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbench.report.console import percent

LEFT, RUNNING, DONE, FAILED = "left", "running", "done", "failed"
SPARE_LINES = 4  # of the terminal: headline, "... more" and room for a prompt


def about(seconds: float) -> str:
    """Format an estimate: `40 s`, `12 min` or `3 h 05 min`."""
    if seconds < 57.5:
        return f"{max(5 * round(seconds / 5), 5)} s"
    minutes = max(round(seconds / 60), 1)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min" if hours else f"{minutes} min"


@dataclass
class RunState:
    """What the command knows about one run."""

    label: str
    rounds: int
    status: str = LEFT
    phase: str = "round"  # or pretrain
    done: int = 0  # rounds of this phase
    total: int = 0  # rounds of this phase
    share: float = 0.0  # of the current round
    rates: Mapping[str, float | None] = field(default_factory=dict)  # MA and BA, if measured
    begun: float = 0.0  # when the phase began
    first: int = 0  # rounds that were done then

    def enter(self, phase: str, done: int, total: int, now: float) -> None:
        self.status, self.phase, self.share = RUNNING, phase, 0.0
        self.done = self.first = done
        self.total, self.begun = total, now

    def progress(self, phase: str, done: int, total: int, now: float) -> None:
        if self.phase != phase or self.status != RUNNING:
            self.enter(phase, done, total, now)
        self.done, self.share = done, 0.0

    def pace(self, now: float) -> float | None:
        """Seconds per round of this phase; None before there is something to measure."""
        trained = self.done + self.share - self.first
        return (now - self.begun) / trained if trained > 0 and self.status == RUNNING else None

    def where(self) -> str:
        return f"{self.phase} {self.done}/{self.total}"


class SweepPanel:
    """All runs of a sweep; events change it, rich draws it."""

    def __init__(
        self, runs: Mapping[str, RunState], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`runs`: by run id."""
        self.runs = dict(runs)
        self.clock = clock
        self._seconds, self._rounds = 0.0, 0  # over all rounds of runs that ended

    def count(self, status: str) -> int:
        return sum(run.status == status for run in self.runs.values())

    def begin(self, run: RunState, first_round: int) -> None:
        run.enter("round", first_round, run.rounds, self.clock())

    def pretrain(self, run: RunState, done: int, total: int) -> None:
        run.progress("pretrain", done, total, self.clock())
        if done == total:
            self.begin(run, 0)

    def round(self, run: RunState, index: int, rates: Mapping[str, float | None]) -> None:
        run.progress("round", index + 1, run.rounds, self.clock())
        measured = {key: rate for key, rate in rates.items() if rate is not None}
        run.rates = {**run.rates, **measured}

    def end(self, run: RunState, status: str) -> None:
        if run.status == RUNNING and run.phase == "round":
            self._seconds += self.clock() - run.begun
            self._rounds += run.done - run.first
        run.status = status

    def seconds_left(self) -> float | None:
        """Estimate from the mean time of a round and the number of runs at a time."""
        now, running = self.clock(), [r for r in self.runs.values() if r.status == RUNNING]
        measured = [r for r in running if r.phase == "round" and r.pace(now) is not None]
        seconds = self._seconds + sum(now - run.begun for run in measured)
        rounds = self._rounds + sum(run.done + run.share - run.first for run in measured)
        if not rounds:
            return None
        mean = seconds / rounds
        open_ = [self._left(run, mean, now) for run in running]
        waiting = [mean * run.rounds for run in self.runs.values() if run.status == LEFT]
        return max([sum(open_ + waiting) / max(len(running), 1), *open_])

    @staticmethod
    def _left(run: RunState, mean: float, now: float) -> float:
        """Seconds that a running run still needs; `mean` per round where it has no own pace."""
        pace = run.pace(now) or mean
        rest = (run.total - run.done - run.share) * pace
        return rest if run.phase == "round" else rest + run.rounds * mean

    def headline(self) -> str:
        """`done 7, running 2, failed 1, left 14, about 12 min left`."""
        counts = Counter(run.status for run in self.runs.values())
        parts = [f"{status} {counts[status]}" for status in (DONE, RUNNING, FAILED, LEFT)]
        if (seconds := self.seconds_left()) is not None and counts[RUNNING]:
            parts.append(f"about {about(seconds)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """The panel in one line, for output that is not a terminal."""
        return f"sweep of {len(self.runs)}: {self.headline()}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ended = self.count(DONE) + self.count(FAILED)
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_row(ProgressBar(len(self.runs), ended), Text(self.headline(), "bold"))
        yield head
        running = [run for run in self.runs.values() if run.status == RUNNING]
        shown = running[: max(console.height - SPARE_LINES, 1)]
        yield self._rows(shown)
        if len(shown) < len(running):
            yield Text(f"... and {len(running) - len(shown)} more running", "dim")

    def _rows(self, running: Iterable[RunState]) -> Table:
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for _ in range(4):
            rows.add_column(no_wrap=True)
        now = self.clock()
        for run in running:
            rates = [f"{key} {percent(run.rates.get(key))}" for key in ("MA", "BA")]
            pace = run.pace(now)
            rest = "" if pace is None else f"{about(self._left(run, pace, now))} left"
            # A label is no markup: it may contain brackets.
            rows.add_row(*map(Text, (run.label, run.where(), *rates, rest)))
        return rows


def labels(runs: Sequence[Sequence[str]]) -> list[str]:
    """Name runs by the overrides that differ among them: `defense=krum pmr=0.2`."""
    everywhere = set(runs[0]).intersection(*runs) if runs else set()
    return [" ".join(o for o in run if o not in everywhere) for run in runs]
