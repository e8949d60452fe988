"""What a run reports while it runs, and the reporter that a sweep uses."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from fedbench.display.run_events import send

EVENT_INTERVAL = 1.0  # seconds between events about the clients of a round
REPORTED = ("status", "seconds", "BA", "MA", "TPR", "TNR", "error")  # keys of summary.json


class RunDisplay(ABC):
    """Shows one run, as a context around its rounds. Round 0 of rounds.jsonl is shown as round 1.

    `first_round` is above 0 for a run that resumes.
    """

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(None)

    @abstractmethod
    def say(self, line: str) -> None:
        """Show a line that the user should see."""

    @abstractmethod
    def describe(self, text: str) -> None:
        """Show how the run is computed, such as `sequential on 2 processes`."""

    @abstractmethod
    def trained(self, share: float) -> None:
        """Show that this share (0..1) of the training of the current round is done."""

    @abstractmethod
    def begin_pretraining(self, done: int, total: int) -> None:
        """Show that benign rounds are being trained, `done` of them by an earlier command."""

    @abstractmethod
    def pretrain(self, done: int, total: int) -> None:
        """Show that `done` of `total` benign rounds before round 0 are trained."""

    @abstractmethod
    def round(self, record: Mapping[str, Any]) -> None:
        """Show a completed round; `record` is its line of rounds.jsonl."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        """Show how the run ended; later calls do nothing.

        `summary` is the content of summary.json, None for an interrupted run. `skipped` means that
        an earlier command finished the run.
        """


class SweepDisplay(RunDisplay):
    """Tells the command of the sweep, which draws all runs in one panel."""

    def __init__(self, run: str, first_round: int = 0) -> None:
        """`run` is the run id."""
        self.run = run
        self.first_round = first_round
        self._closed = False
        self._last_share = float("-inf")

    def __enter__(self) -> RunDisplay:
        self._send("begin", first_round=self.first_round)
        return self

    def say(self, line: str) -> None:
        self._send("say", line=line)

    def describe(self, text: str) -> None:
        """Say nothing: a line for each run would fill the screen."""

    def trained(self, share: float) -> None:
        if time.monotonic() - self._last_share >= EVENT_INTERVAL:
            self._last_share = time.monotonic()
            self._send("trained", share=share)

    def begin_pretraining(self, done: int, total: int) -> None:
        self.pretrain(done, total)

    def pretrain(self, done: int, total: int) -> None:
        self._send("pretrain", done=done, total=total)

    def round(self, record: Mapping[str, Any]) -> None:
        self._send("round", **{key: record[key] for key in ("round", "MA", "BA")})

    def close(self, summary: Mapping[str, Any] | None, skipped: bool = False) -> None:
        if not self._closed:
            self._closed = True
            kept = summary and {key: summary[key] for key in REPORTED if key in summary}
            self._send("end", summary=kept, skipped=skipped)

    def _send(self, event: str, **details: Any) -> None:
        send(event=event, run=self.run, **details)
