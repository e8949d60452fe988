"""ReportData: what every part of a report is made from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedbench.errors import UserError
from fedbench.report.benign_pairs import with_benign_pairs
from fedbench.report.comparison import (
    CENSORABLE,
    IN_ROUNDS,
    Comparison,
    TableRow,
    compare,
    natural_order,
)
from fedbench.report.defense_styles import DefenseStyle, defense_styles
from fedbench.report.missing_runs import MissingRun, missing_runs
from fedbench.report.statistics import Estimate, estimate
from fedbench.results.run_reader import STEALTH, RunResult, read_runs, unreadable
from fedbench.results.run_rounds import RunRounds, read_run_rounds
from fedbench.results.settings import Value

UNBOUNDED = ("seconds", "norm_ratio")  # metrics that are no rates
LOWER_IS_BETTER = ("BA", "seconds", "BA_cumulative", "MA_lost", *CENSORABLE)


@dataclass(frozen=True)
class SweptKey:
    """A setting with several values, besides the defense: `attack`, `pmr`, ..."""

    name: str
    labels: list[str]  # of its values, in natural order, as in the table
    values: list[Value]  # raw values; for `attack`, the names

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)


@dataclass(frozen=True)
class ReportData:
    """The runs below some folders."""

    folders: list[Path]
    runs: list[RunResult]
    comparison: Comparison  # rows by setting and defense, one run per seed
    rounds: Mapping[Path, RunRounds]  # by folder of the run; also of unfinished and failed runs
    missing: list[MissingRun]  # runs that the averages leave out, each with the reason

    @property
    def rows(self) -> list[TableRow]:
        """Rows whose settings could be read."""
        return [row for row in self.comparison.rows if row.runs[0].config]

    @cached_property
    def defenses(self) -> list[str]:
        """Labels of the defenses, in order of the table."""
        return list(dict.fromkeys(row.defense for row in self.rows))

    @cached_property
    def styles(self) -> dict[str, DefenseStyle]:
        return defense_styles(self.defenses)

    @cached_property
    def swept(self) -> list[SweptKey]:
        """The settings that differ between rows, in the order of the table's columns."""
        found = []
        for i, name in enumerate(self.comparison.keys):
            values = {row.setting[i]: row.values[i] for row in self.rows}
            if len(values) > 1:
                labels = sorted(values, key=lambda label: natural_order(values[label]))
                found.append(SweptKey(name, labels, [values[label] for label in labels]))
        return found

    def with_columns(self, columns: Sequence[str]) -> ReportData:
        """Return the same runs with other metrics in the table."""
        return replace(self, comparison=self.comparison.with_columns(columns))

    def setting(self, row: TableRow, key: str) -> str:
        """Label of a setting in a row."""
        return row.setting[self.comparison.keys.index(key)]

    def estimate(self, row: TableRow, metric: str) -> Estimate | None:
        """Mean and interval over the seeds of a row's finished runs; None if not measured."""
        values = {run.value("seed"): run.metrics.get(metric) for run in row.finished}
        return estimate(values, bounds_of(metric))


def bounds_of(metric: str) -> tuple[float, float] | None:
    """Smallest and largest possible value."""
    if metric in UNBOUNDED:
        return None
    if metric in IN_ROUNDS:
        return (0.0, math.inf)
    return (-1.0, 1.0) if metric in (*STEALTH, "MA_lost") else (0.0, 1.0)


def read_report_data(folders: Sequence[str | Path]) -> ReportData:
    """Read everything below the folders; damaged files cost a line in `missing`, no more."""
    runs, rounds = [], {}
    for run in read_runs(folders, check_rounds=False):
        try:
            if run.status != "unreadable":
                rounds[run.folder] = read_run_rounds(run)
            runs.append(run)
        except (UserError, ValueError) as error:
            reason = str(error).removeprefix(f"{run.folder}{os.sep}")
            runs.append(unreadable(run, reason))
    runs = with_benign_pairs(runs, rounds)
    comparison = compare(runs)
    missing = missing_runs(runs, comparison)
    return ReportData([Path(folder) for folder in folders], runs, comparison, rounds, missing)
