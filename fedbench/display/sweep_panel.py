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

from fedbench.display.console import percent

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
    is_of_other_code: bool = False  # finished before fedbench itself changed
    phase: str = "round"  # or pretrain
    done: int = 0  # rounds of this phase
    total: int = 0  # rounds of this phase
    share: float = 0.0  # of the current round
    rates: Mapping[str, float | None] = field(default_factory=dict)  # MA and BA, if measured
    # The first progress of this phase: when, and how many rounds were trained. Not its beginning,
    # because a run may have to wait for another one that pretrains the model of both.
    since: tuple[float, float] | None = None
    last: float = 0.0  # when the run last made progress

    def enter(self, phase: str, done: int, total: int) -> None:
        self.status, self.phase, self.since = RUNNING, phase, None
        self.done, self.total, self.share = done, total, 0.0

    def progress(self, done: int, share: float, now: float) -> None:
        self.done, self.share, self.last = done, share, now
        self.since = self.since or (now, done + share)

    def measured(self) -> tuple[float, float]:
        """Seconds and rounds between the first progress of this phase and the last."""
        if self.since is None:
            return 0.0, 0.0
        begun, first = self.since
        return self.last - begun, self.done + self.share - first

    def pace(self) -> float | None:
        """Seconds per round of this phase; None before there is something to measure."""
        seconds, rounds = self.measured()
        return seconds / rounds if rounds > 0 else None

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
        self._ended: list[tuple[float, float]] = []  # seconds and rounds of runs that ended

    def running(self) -> list[RunState]:
        return [run for run in self.runs.values() if run.status == RUNNING]

    def count(self, status: str) -> int:
        return sum(run.status == status for run in self.runs.values())

    def begin(self, run: RunState, first_round: int) -> None:
        run.enter("round", first_round, run.rounds)

    def pretrain(self, run: RunState, done: int, total: int) -> None:
        if run.phase != "pretrain" or run.status != RUNNING:
            run.enter("pretrain", done, total)
        run.progress(done, 0.0, self.clock())
        if done == total:
            self.begin(run, 0)

    def trained(self, run: RunState, share: float) -> None:
        run.progress(run.done, min(share, 0.99), self.clock())

    def round(self, run: RunState, index: int, rates: Mapping[str, float | None]) -> None:
        run.progress(index + 1, 0.0, self.clock())
        measured = {key: rate for key, rate in rates.items() if rate is not None}
        run.rates = {**run.rates, **measured}

    def end(self, run: RunState, status: str) -> None:
        if run.phase == "round":
            self._ended.append(run.measured())
        run.status = status

    def seconds_left(self) -> float | None:
        """Estimate from the mean time of a round and the number of runs at a time."""
        running = self.running()
        measured = [*self._ended, *(run.measured() for run in running if run.phase == "round")]
        rounds = sum(n for _, n in measured)
        if not rounds:
            return None
        mean = sum(seconds for seconds, _ in measured) / rounds
        open_ = [self._left(run, mean) for run in running]
        waiting = [mean * run.rounds for run in self.runs.values() if run.status == LEFT]
        return max([sum(open_ + waiting) / max(len(running), 1), *open_])

    @staticmethod
    def _left(run: RunState, mean: float) -> float:
        """Seconds that a running run still needs; `mean` per round where it has no own pace."""
        pace = run.pace() or mean
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
        # Narrower than the terminal: the `^C` of Ctrl-C would wrap, and rich erase too few lines.
        options = options.update(width=max(options.max_width - 2, 1))
        yield from console.render(head, options)
        running = self.running()
        shown = running[: max(console.height - SPARE_LINES, 1)]
        yield from console.render(self._rows(shown), options)
        if len(shown) < len(running):
            yield Text(f"... and {len(running) - len(shown)} more running", "dim")

    def _rows(self, running: Iterable[RunState]) -> Table:
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for _ in range(4):
            rows.add_column(no_wrap=True)
        for run in running:
            rates = [f"{key} {percent(run.rates.get(key))}" for key in ("MA", "BA")]
            pace = run.pace()
            rest = "" if pace is None else f"{about(self._left(run, pace))} left"
            # A label is no markup: it may contain brackets.
            rows.add_row(*map(Text, (run.label, run.where(), *rates, rest)))
        return rows


def labels(runs: Sequence[Sequence[str]]) -> list[str]:
    """Name runs by the overrides that differ among them: `defense=krum pmr=0.2`."""
    everywhere = set(runs[0]).intersection(*runs) if runs else set()
    return [" ".join(o for o in run if o not in everywhere) for run in runs]
