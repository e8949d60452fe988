"""The progress of a run: one live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    RenderableColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from fedbench.display.run_display import RunDisplay

LINE_INTERVAL = 10.0  # seconds between plain lines about rounds
FEW_ROUNDS = 20  # up to this number, each round has its line
REFRESH_INTERVAL = 0.1  # seconds between moves of the live line within a round


def percent(rate: float | None) -> str:
    """Format 0.841 as `84.1`, and None (not measured) as a dash."""
    return "-" if rate is None else f"{100 * rate:.1f}"


def duration(seconds: float) -> str:
    """Format as `7.4 s`, `12 min 03 s` or `3 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def kept(clients: list[Mapping[str, Any]]) -> str:
    """Format the number of accepted clients as `24/30`; a dash if the defense judges none."""
    verdicts = [client["accepted"] for client in clients if client["accepted"] is not None]
    return f"{sum(verdicts)}/{len(clients)}" if verdicts else "-"


class Output:
    """A text file that turns silent when it can no longer be written, so that the run goes on.

    When `head` closed the pipe or the terminal is gone, /dev/null takes the place of the file.
    Other prints and Python's exit then succeed as well.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        try:
            self._file.write(text.encode(encoding, "replace").decode(encoding))
            self._file.flush()
        except (OSError, ValueError):  # ValueError: the file object itself was closed
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())

    def flush(self) -> None:
        """Do nothing: `write` flushes."""


@contextmanager
def failing_output_ignored() -> Iterator[None]:
    """Let prints succeed when stdout or stderr can no longer be written, see `Output`."""
    with ExitStack() as stack:
        if sys.stdout is not None:  # None if the process was started with it closed
            stack.enter_context(redirect_stdout(cast(TextIO, Output(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(cast(TextIO, Output(sys.stderr))))
        yield


def console_for_output(console: Console | None = None) -> Console:
    """Return a console on stdout, or the given one, that survives a closed pipe."""
    # With FORCE_COLOR, rich would draw a live line even into a pipe. sys.stdout is None if the
    # process was started with stdout closed.
    tty = bool(sys.stdout) and sys.stdout.isatty()
    console = console or Console(force_terminal=None if tty else False)
    console.file = Output(console.file)  # type: ignore[assignment]
    return console


def announce_start(line: str) -> None:
    """Print a line before Lightning is imported, which takes seconds; not if it already was.

    Plugins import torch earlier, but not Lightning.
    """
    if "lightning" not in sys.modules:
        print_text(console_for_output(), Text(line))


def print_text(console: Console, text: Text) -> None:
    """Print without control characters; only a terminal wraps lines."""
    text.plain = "".join(char if char.isprintable() else " " for char in text.plain)
    console.print(text, soft_wrap=not console.is_terminal)


def ending(summary: Mapping[str, Any]) -> Text:
    """How a run ended, from its summary.json: its numbers, or why it failed."""
    if summary["status"] == "failed":
        return Text(f"failed: {summary.get('error') or 'no reason given'}", style="red")
    numbers = "  ".join(f"{key} {percent(summary[key])}" for key in ("BA", "MA", "TPR", "TNR"))
    return Text.assemble((f"finished in {duration(summary['seconds'])}:", "green"), " ", numbers)


class RoundColumn(ProgressColumn):
    """`round 3/10  MA 84.1`: rounds are counted when they end, unlike in the bar."""

    def render(self, task: Task) -> Text:
        return Text(f"{where(task)}{task.fields['measured']}")


def where(task: Task) -> str:
    """Return `round 3/10`."""
    return f"{task.description} {int(task.completed)}/{int(task.total or 0)}"


class Display(RunDisplay):
    """Prints the progress of one run."""

    def __init__(
        self,
        title: str,
        total_rounds: int,
        first_round: int = 0,
        console: Console | None = None,
        live: bool = True,
    ) -> None:
        self.title = title
        self.first_round = first_round
        self._console = console_for_output(console)
        self._closed = False
        self._last_line = float("-inf")
        self._last_move = float("-inf")
        self._progress = Progress(
            # The defense alone: the line above has the whole title, which would hide the bar.
            RenderableColumn(Text(title.partition(" ")[0], "bold", no_wrap=True)),
            BarColumn(None, table_column=Column(ratio=1)),
            RoundColumn(Column(no_wrap=True)),
            TimeElapsedColumn(Column(no_wrap=True)),
            TextColumn("left"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=self._console,
            speed_estimate_period=float("inf"),  # a round may take longer than rich's 30 seconds
            transient=True,
            expand=True,
            disable=not (live and self._console.is_interactive),
        )
        self._pretraining = self._progress.add_task("pretrain", visible=False, measured="")
        self._rounds = self._progress.add_task(
            "round", total=total_rounds, completed=first_round, measured=""
        )

    def __enter__(self) -> Display:
        self._progress.start()
        if self.first_round:
            self.say(f"{self.title}  resumes after {where(self._task)}")
        return self

    @property
    def _task(self) -> Task:
        """What the live line shows: pretraining or rounds."""
        return next(task for task in self._progress.tasks if task.visible)

    def say(self, line: str) -> None:
        """Print a line, above the live one if there is one."""
        print_text(self._console, Text(line))

    def describe(self, text: str) -> None:
        self.say(f"{self.title}  {text}")

    def trained(self, share: float) -> None:
        if self._is_live and time.monotonic() - self._last_move >= REFRESH_INTERVAL:
            self._last_move = time.monotonic()
            task = self._task
            # Below 1: the round itself still has to be aggregated and evaluated.
            self._progress.update(task.id, completed=int(task.completed) + min(share, 0.99))

    def begin_pretraining(self, done: int, total: int) -> None:
        self._progress.update(self._pretraining, total=total, completed=done, visible=True)
        self._progress.update(self._rounds, visible=False)

    def pretrain(self, done: int, total: int) -> None:
        over = done == total
        self._progress.update(self._pretraining, total=total, completed=done, visible=not over)
        self._progress.update(self._rounds, visible=over)
        if over or self._is_due():
            self._say_round(f"pretrain {done}/{total}")
        if over:
            self._last_line = float("-inf")

    def round(self, record: Mapping[str, Any]) -> None:
        rates = f"MA {percent(record['MA'])}  BA {percent(record['BA'])}"
        measured = f"  {rates}  kept {kept(record['clients'])}"
        self._progress.update(self._rounds, completed=record["round"] + 1, measured=measured)
        task = self._task
        n_rounds = task.total or 0
        if n_rounds <= FEW_ROUNDS or task.completed == n_rounds or self._is_due():
            seconds = duration(sum(record["seconds"].values()))
            self._say_round(f"{where(task)}{measured}  {seconds}")

    @property
    def _is_live(self) -> bool:
        return self._progress.live.is_started

    def _is_due(self) -> bool:
        """Whether the last plain line was a while ago."""
        return time.monotonic() - self._last_line >= LINE_INTERVAL

    def _say_round(self, text: str) -> None:
        if not self._is_live:
            self._last_line = time.monotonic()
            self.say(f"{self.title}  {text}")

    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._progress.live.stop()
            line = Text.assemble((self.title, "bold"), "  ", self._ending(summary, skipped))
            print_text(self._console, line)

    def _ending(self, summary: Mapping[str, Any] | None, skipped: bool) -> Text:
        if summary is None:
            text = f"stopped after {where(self._task)}; the same command resumes it"
            return Text(text, style="yellow")
        if skipped:
            numbers = ending(summary).plain.partition(": ")[2]
            return Text(f"already finished, skipped: {numbers}", style="dim")
        return ending(summary)
