"""What a user sees while a run goes on: one live line on a terminal, a line a round elsewhere."""

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
PRETRAIN_NEWS_EVERY = 10.0  # seconds between plain lines while pretraining


def percent(share: float | None) -> str:
    """`84.1` for 0.841; a dash where nothing was measured, which is not the same as 0."""
    return "-" if share is None else f"{100 * share:.1f}"


def duration(seconds: float) -> str:
    """`7.4 s`, `12 min 03 s`, `3 h 05 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def kept(clients: list[Mapping[str, Any]]) -> str:
    """`24/30` clients accepted; a dash for a rule that judges no client."""
    verdicts = [client["accepted"] for client in clients if client["accepted"] is not None]
    return f"{sum(verdicts)}/{len(clients)}" if verdicts else "-"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """Tells one run. Rounds count from 0, as in rounds.jsonl, and are shown from 1.

    Output that can no longer be written (a pipe closed by `head`, a lost terminal) silences the
    display; the run goes on.
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
        # FORCE_COLOR alone would make rich draw a live line into a pipe. A process started with
        # its stdout closed has none.
        tty = bool(sys.stdout) and sys.stdout.isatty()
        self._console = console or Console(force_terminal=None if tty else False)
        self._may_live = live
        self._live: Live | None = None
        self._silent = False
        self._closed = False
        self._measured = ""
        self._started = time.monotonic()
        self._last_pretrain_news = float("-inf")
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
        """Prints one line, above the live one."""
        self._print(Text(line))

    def pretrain(self, done: int, total: int) -> None:
        """`done` of `total` benign rounds before the first are trained."""
        if self._phase == "pretrain":
            self._step(done)
        else:
            self._begin("pretrain", done, total)
        due = time.monotonic() - self._last_pretrain_news >= PRETRAIN_NEWS_EVERY
        if self._live is None and (due or done == total):
            self._last_pretrain_news = time.monotonic()
            self.say(f"{self.title}  {self._where()}")
        if done == total:
            self._begin("round", self.first_round, self.total_rounds)

    def round(self, record: Mapping[str, Any]) -> None:
        """A round is over; `record` is its line of rounds.jsonl."""
        self._measured = (
            f"  MA {percent(record['MA'])}  BA {percent(record['BA'])}"
            f"  kept {kept(record['clients'])}"
        )
        self._step(record["round"] + 1)
        if self._live is None:
            seconds = duration(sum(record["seconds"].values()))
            self.say(f"{self.title}  {self._where()}{self._measured}  {seconds}")

    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        """Ends the display with a line on how the run ended; only the first call counts.

        `summary` is summary.json's, or None for a run stopped before its end; `skipped` says that
        the summary is an earlier run's.
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
        # The pace is that of the steps seen from here on, not of those an earlier process did.
        self._begun_at, self._begun = done, time.monotonic()
        self._last_step = self._begun

    def _step(self, done: int) -> None:
        self._done = done
        self._last_step = time.monotonic()

    def _where(self) -> str:
        return f"{self._phase} {self._done}/{self._total}"

    def _line(self) -> Text:
        """The live line, without what the terminal is too narrow for: bar, title, times."""
        now = time.monotonic()
        status = f"{self._where()}{self._measured}  {clock(now - self._started)}"
        if self._done > self._begun_at:
            pace = (self._last_step - self._begun) / (self._done - self._begun_at)
            left = pace * (self._total - self._done) - (now - self._last_step)
            status += f"  left {clock(max(left, 0.0))}"
        line = Text(no_wrap=True, overflow="crop")
        room = self._console.width - len(status) - 2
        if room >= 8:
            short = len(self.title) > room
            line.append(self.title[: room - 2] + ".." if short else self.title, "bold")
            line.append("  ")
        if room >= len(self.title) + BAR_WIDTH + 2:
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
        # Not through rich, which ends the process when a pipe is closed.
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
    """Lets whatever else prints to the closed stdout, Python's own flush at exit too, succeed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
