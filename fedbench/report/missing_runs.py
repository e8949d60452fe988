"""Runs that a report leaves out, in full or in part, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbench.report.comparison import Comparison
from fedbench.results.planned_runs import read_planned_runs
from fedbench.results.run_reader import RunResult


@dataclass(frozen=True)
class MissingRun:
    """A run without a result in the averages."""

    name: str  # folder of the run, or the title of a run that never started
    status: str  # failed | unfinished | running | unreadable | not counted | not started
    reason: str
    folder: Path | None  # None if it never started

    def __str__(self) -> str:
        return f"{self.status}: {self.name}" + (f": {self.reason}" if self.reason else "")


def missing_runs(runs: Sequence[RunResult], comparison: Comparison) -> list[MissingRun]:
    """Return one entry per run that is not part of the report's averages."""
    counted = {run.folder for row in comparison.rows for run in row.runs}
    missing = []
    for run in runs:
        if run.status != "finished":
            missing.append(MissingRun(str(run.folder), run.status, run.reason, run.folder))
        elif run.folder not in counted:
            reason = "a newer run has the same settings and seed"
            missing.append(MissingRun(str(run.folder), "not counted", reason, run.folder))
    return missing + _not_started(runs)


def _not_started(runs: Sequence[RunResult]) -> list[MissingRun]:
    found = []
    for parent in dict.fromkeys(run.folder.parent for run in runs):
        for run_id, title in read_planned_runs(parent).items():
            if not (parent / run_id).exists():
                reason = f"the sweep in {parent} ended before it; the same command starts it"
                found.append(MissingRun(title, "not started", reason, None))
    return found
