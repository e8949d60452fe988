"""The progress of a run: one live line on a terminal, one line per round elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    RenderableColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

PRETRAIN_INTERVAL = 10.0  # seconds between lines while pretraining


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


class Display:
    """Prints the progress of one run. Round 0 of rounds.jsonl is shown as round 1."""

    def __init__(
        self,
        title: str,
        total_rounds: int,
        first_round: int = 0,
        console: Console | None = None,
        live: bool = True,
    ) -> None:
        self.title = title
        # With FORCE_COLOR, rich would draw a live line even into a pipe. sys.stdout is None if the
        # process was started with stdout closed.
        tty = bool(sys.stdout) and sys.stdout.isatty()
        self._console = console or Console(force_terminal=None if tty else False)
        self._console.file = Output(self._console.file)  # type: ignore[assignment]
        self._closed = False
        self._last_pretrain_line = float("-inf")
        self._progress = Progress(
            # On a narrow terminal, the bar shrinks first, then the title.
            RenderableColumn(Text(title, "bold", no_wrap=True, overflow="ellipsis")),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.description} {task.completed}/{task.total}{task.fields[measured]}"),
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
        return self

    def __exit__(self, *error: object) -> None:
        self.close(None)

    def say(self, line: str) -> None:
        """Print a line, above the live one if there is one."""
        self._print(Text(line))

    def pretrain(self, done: int, total: int) -> None:
        """Show that `done` of `total` benign rounds before round 0 are trained."""
        over = done == total
        self._progress.update(self._pretraining, total=total, completed=done, visible=not over)
        self._progress.update(self._rounds, visible=over)
        due = time.monotonic() - self._last_pretrain_line >= PRETRAIN_INTERVAL
        if not self._progress.live.is_started and (due or over):
            self._last_pretrain_line = time.monotonic()
            self.say(f"{self.title}  pretrain {done}/{total}")

    def round(self, record: Mapping[str, Any]) -> None:
        """Show a completed round; `record` is its line of rounds.jsonl."""
        rates = f"MA {percent(record['MA'])}  BA {percent(record['BA'])}"
        measured = f"  {rates}  kept {kept(record['clients'])}"
        self._progress.update(self._rounds, completed=record["round"] + 1, measured=measured)
        if not self._progress.live.is_started:
            seconds = duration(sum(record["seconds"].values()))
            self.say(f"{self.title}  {self._where()}{measured}  {seconds}")

    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        """Print how the run ended and stop the display; later calls do nothing.

        `summary` is the content of summary.json, None for an interrupted run. `skipped` means that
        an earlier command finished the run.
        """
        if not self._closed:
            self._closed = True
            self._progress.live.stop()
            self._print(Text.assemble((self.title, "bold"), "  ", self._ending(summary, skipped)))

    def _ending(self, summary: Mapping[str, Any] | None, skipped: bool) -> Text:
        if summary is None:
            text = f"stopped after {self._where()}; the same command resumes it"
            return Text(text, style="yellow")
        if summary["status"] == "failed":
            return Text(f"failed: {summary.get('error') or 'no reason given'}", style="red")
        numbers = "  ".join(f"{key} {percent(summary[key])}" for key in ("BA", "MA", "TPR", "TNR"))
        if skipped:
            return Text(f"already finished, skipped: {numbers}", style="dim")
        finished = f"finished in {duration(summary['seconds'])}:"
        return Text.assemble((finished, "green"), " ", numbers)

    def _where(self) -> str:
        task = next(task for task in self._progress.tasks if task.visible)
        return f"{task.description} {task.completed}/{task.total}"

    def _print(self, text: Text) -> None:
        text.plain = "".join(char if char.isprintable() else " " for char in text.plain)
        self._console.print(text, soft_wrap=not self._console.is_terminal)
