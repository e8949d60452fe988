"""Follows the runs of a sweep and shows them: a live panel on a terminal, else plain lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedbench.display.console import Output, console_for_output, ending, print_text
from fedbench.display.run_events import Event, EventReader
from fedbench.display.sweep_panel import DONE, FAILED, LEFT, RUNNING, RunState, SweepPanel

POLL_INTERVAL = 0.25  # seconds
LINE_INTERVAL = 30.0  # seconds between plain lines about the sweep


class SweepWatch:
    """Reads the events of the runs on a thread of its own; `close` ends it."""

    def __init__(
        self,
        folder: Path,
        runs: Mapping[str, RunState],
        jobs: Sequence[str],
        console: Console | None = None,
    ) -> None:
        """`folder` receives the events; `jobs` are the run ids in the order of Hydra's jobs."""
        self.panel = SweepPanel(runs)
        self.jobs = jobs
        self._events = EventReader(folder)
        self._errors = Output(sys.stderr)
        self._console = console_for_output(console)
        self._live: Live | None = None
        if self._console.is_interactive:
            self._live = Live(
                self.panel, console=self._console, refresh_per_second=4, transient=True
            )
        self._last_line = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="sweep", daemon=True)

    def start(self) -> None:
        n_done, total = self.panel.count(DONE), len(self.panel.runs)
        if n_done:
            self._say(f"{n_done} of {total} runs already finished")
        if n_older := sum(run.is_of_other_code for run in self.panel.runs.values()):
            self._say(f"fedbench has changed since {n_older} of them; rerun=true runs them again")
        if n_done < total:
            self._say(f"starting {total - n_done} runs")
            if self._live is not None:
                self._live.start()
            self._thread.start()

    def close(self) -> None:
        """Show the last events and, if runs are left, that they can be resumed."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
            self.poll()
        if self._live is not None:
            self._live.stop()
        open_ = self.panel.count(LEFT) + self.panel.count(RUNNING)
        if open_:
            ended = f"{self.panel.count(DONE)} of {len(self.panel.runs)} runs done"
            self._say(f"stopped: {ended}; the same command resumes the others", "yellow")

    def _follow(self) -> None:
        while not self._closed.wait(POLL_INTERVAL):
            self.poll()
            due = time.monotonic() - self._last_line >= LINE_INTERVAL
            if self._live is None and due:
                self._last_line = time.monotonic()
                self._say(self.panel.line())

    def poll(self) -> None:
        """Show what has happened since the last call."""
        for event in self._events.new():
            self._show(event)

    def _show(self, event: Event) -> None:
        if event["event"] == "output":
            for line in event["lines"]:
                self._print_output(line, event["error"])
        elif event["event"] == "over":
            self._over(event["job"])
        elif (run := self.panel.runs.get(event["run"])) is not None:
            self._show_run(run, event)

    def _show_run(self, run: RunState, event: Event) -> None:
        match event["event"]:
            case "begin":
                self.panel.begin(run, event["first_round"])
                if event["first_round"]:
                    self._say(f"{run.label}  resumes after {run.where()}")
            case "pretrain":
                self.panel.pretrain(run, event["done"], event["total"])
            case "trained":
                self.panel.trained(run, event["share"])
            case "round":
                self.panel.round(run, event["round"], {key: event[key] for key in ("MA", "BA")})
            case "say":
                self._say(event["line"])
            case "end":
                self._end(run, event)

    def _end(self, run: RunState, event: Event) -> None:
        summary = event["summary"]
        if summary is None or run.status == DONE:  # interrupted, or finished before the sweep
            return
        self.panel.end(run, DONE if summary["status"] == "finished" else FAILED)
        print_text(self._console, Text.assemble((run.label, "bold"), "  ", ending(summary)))

    def _over(self, job: int | None) -> None:
        """A job has ended; if its run has not, it failed before it could begin."""
        if job is not None and job < len(self.jobs):
            run = self.panel.runs[self.jobs[job]]
            if run.status not in (DONE, FAILED):
                self.panel.end(run, FAILED)

    def _say(self, line: str, style: str = "") -> None:
        print_text(self._console, Text(line, style))

    def _print_output(self, line: str, error: bool) -> None:
        if error and self._live is None:
            self._errors.write(f"{line}\n")
        else:
            self._say(line)
