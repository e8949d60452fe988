"""The progress of a run: one live line on a terminal, one line per round elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

BAR_WIDTH = 20
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


def clock(seconds: float) -> str:
    """Format as `1:01` or `1:01:01`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """Prints the progress of one run. Round 0 of rounds.jsonl is shown as round 1.

    If output can no longer be written (`head` closed the pipe, the terminal is gone), the display
    turns silent and the run goes on.
    """

    def __init__(
        self,
        title: str,
        total_rounds: int,
        first_round: int = 0,
        console: Console | None = None,
        live: bool = True,
    ) -> None:
        self.title = title
        self.total_rounds = total_rounds
        self.first_round = first_round
        # With FORCE_COLOR, rich would draw a live line even into a pipe. sys.stdout is None if the
        # process was started with stdout closed.
        tty = bool(sys.stdout) and sys.stdout.isatty()
        self._console = console or Console(force_terminal=None if tty else False)
        self._may_live = live
        self._live: Live | None = None
        self._silent = False
        self._closed = False
        self._measured = ""
        self._started = time.monotonic()
        self._last_pretrain_line = float("-inf")
        self._begin("round", first_round, total_rounds)

    def __enter__(self) -> Display:
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        if terminal and self._may_live:
            live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._guarded(lambda: live.start(refresh=True))
            self._live = live
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None)

    def say(self, line: str) -> None:
        """Print a line, above the live one if there is one."""
        self._print(Text(line))

    def pretrain(self, done: int, total: int) -> None:
        """Show that `done` of `total` benign rounds before round 0 are trained."""
        if self._phase == "pretrain":
            self._step(done)
        else:
            self._begin("pretrain", done, total)
        due = time.monotonic() - self._last_pretrain_line >= PRETRAIN_INTERVAL
        if self._live is None and (due or done == total):
            self._last_pretrain_line = time.monotonic()
            self.say(f"{self.title}  {self._where()}")
        if done == total:
            self._begin("round", self.first_round, self.total_rounds)

    def round(self, record: Mapping[str, Any]) -> None:
        """Show a completed round; `record` is its line of rounds.jsonl."""
        self._measured = (
            f"  MA {percent(record['MA'])}  BA {percent(record['BA'])}"
            f"  kept {kept(record['clients'])}"
        )
        self._step(record["round"] + 1)
        if self._live is None:
            seconds = duration(sum(record["seconds"].values()))
            self.say(f"{self.title}  {self._where()}{self._measured}  {seconds}")

    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        """Print how the run ended and stop the display; later calls do nothing.

        `summary` is the content of summary.json, None for an interrupted run. `skipped` means that
        an earlier command finished the run.
        """
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._guarded(self._live.stop)
            self._live = None
        self._print(Text.assemble((self.title, "bold"), "  ", self._ending(summary, skipped)))

    def _ending(self, summary: Mapping[str, Any] | None, skipped: bool) -> Text:
        if summary is None:
            reached = f"stopped after {self._where()}"
            return Text(f"{reached}; the same command resumes it", style="yellow")
        if summary["status"] == "failed":
            return Text(f"failed: {summary.get('error') or 'no reason given'}", style="red")
        numbers = "  ".join(f"{key} {percent(summary[key])}" for key in ("BA", "MA", "TPR", "TNR"))
        if skipped:
            return Text(f"already finished, skipped: {numbers}", style="dim")
        return Text.assemble(
            (f"finished in {duration(summary['seconds'])}:", "green"), " ", numbers
        )

    def _begin(self, phase: str, done: int, total: int) -> None:
        self._phase, self._done, self._total = phase, done, total
        # Time per round is measured from here: an earlier process may have done the rounds before.
        self._begun_at, self._begun = done, time.monotonic()
        self._last_step = self._begun

    def _step(self, done: int) -> None:
        self._done = done
        self._last_step = time.monotonic()

    def _where(self) -> str:
        return f"{self._phase} {self._done}/{self._total}"

    def _line(self) -> Text:
        """Return the live line; on a narrow terminal without bar, title or times."""
        now = time.monotonic()
        status = f"{self._where()}{self._measured}  {clock(now - self._started)}"
        if self._done > self._begun_at:
            per_step = (self._last_step - self._begun) / (self._done - self._begun_at)
            left = per_step * (self._total - self._done) - (now - self._last_step)
            status += f"  left {clock(max(left, 0.0))}"
        line = Text(no_wrap=True, overflow="crop")
        width = self._console.width - len(status) - 2
        if width >= 8:
            cut = len(self.title) > width
            line.append(self.title[: width - 2] + ".." if cut else self.title, "bold")
            line.append("  ")
        if width >= len(self.title) + BAR_WIDTH + 2:
            full, empty = "━─" if self._console.encoding.startswith("utf") else "#-"
            filled = BAR_WIDTH * self._done // max(self._total, 1)
            line.append(full * filled, "green")
            line.append(empty * (BAR_WIDTH - filled) + "  ", "dim")
        return line.append(status)

    def _print(self, text: Text) -> None:
        if self._console.is_terminal:
            self._guarded(lambda: self._console.print(text, highlight=False))
        else:
            self._guarded(lambda: self._write(text.plain))

    def _write(self, line: str) -> None:
        # Not through rich, which exits the process when the pipe is closed.
        encoding = self._console.encoding
        printable = "".join(char if char.isprintable() else " " for char in line)
        file = self._console.file
        file.write(printable.encode(encoding, "replace").decode(encoding) + "\n")
        file.flush()

    def _guarded(self, write: Callable[[], None]) -> None:
        if self._silent:
            return
        try:
            write()
        except (OSError, ValueError):  # ValueError: the file object itself was closed
            self._silent = True
            if self._console.file is sys.stdout:
                _discard_stdout()


def _discard_stdout() -> None:
    """Redirect the closed stdout to /dev/null, so that other prints and Python's exit succeed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
