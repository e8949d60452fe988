"""Runs and table as CSV (RFC 4180, UTF-8). Rates are between 0 and 1; undefined is empty."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedbench.report.benign_pairs import PAIRED
from fedbench.report.comparison import CENSORABLE, TableRow
from fedbench.report.pivot_table import LACKING, direction, is_backdoor_accuracy
from fedbench.report.report_data import ReportData
from fedbench.results.frames import IDENTITY
from fedbench.results.run_reader import DURABILITY, METRICS, STEALTH, RunResult
from fedbench.results.settings import Value

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run text that starts like this
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
ENDING = ("folder", "reason")  # the last columns of runs.csv
STATISTICS = ("mean", "sd", "low", "high", "n", "worst", "worst_seed")


def runs_csv(data: ReportData) -> str:
    """Return one line per run, whether finished or not, with every setting and result.

    `counted` tells whether the run is part of the table; a run that was repeated is not.
    """
    counted = {run.folder for row in data.comparison.rows for run in row.finished}
    by_backdoor = {name for run in data.runs for name in run.metrics if "/" in name}
    metrics = [*METRICS, *STEALTH, *DURABILITY, *PAIRED, *sorted(by_backdoor)]
    fixed = ["run_id", "status", "counted", *IDENTITY, *metrics]
    settings = sorted({key for run in data.runs for key in run.config} - {*fixed, *ENDING})
    names = [*fixed, *settings, *ENDING]
    return _written([names, *(_run_cells(run, names, counted) for run in data.runs)])


def table_csv(data: ReportData, metrics: Sequence[str] | None = None) -> str:
    """Return one line per setting and defense, with the statistics of each metric over seeds."""
    metrics = [m for m in metrics or data.comparison.headings if m != "seeds"]
    names = [f"{metric}_{name}" for metric in metrics for name in _statistics(metric)]
    lines = [
        [
            *("" if label in (LACKING, "null") else label for label in row.setting),
            *(row.defense, len(row.runs), len(row.finished)),
            *(cell for metric in metrics for cell in _estimate_cells(data, row, metric)),
        ]
        for row in data.rows
    ]
    return _written([[*data.comparison.keys, "defense", "runs", "finished", *names], *lines])


def _statistics(metric: str) -> list[str]:
    """Return the names of the statistics.

    Only BA has a threshold of success, and only numbers of rounds may be lower bounds.
    """
    extra = {"n_above": is_backdoor_accuracy(metric), "n_censored": metric in CENSORABLE}
    return [*STATISTICS, *(name for name, has in extra.items() if has)]


def _estimate_cells(data: ReportData, row: TableRow, metric: str) -> list[Value]:
    estimate = data.estimate(row, metric)
    if estimate is None:
        return [0 if name == "n" else None for name in _statistics(metric)]
    seed, worst = estimate.worst(direction(metric) < 0)
    judged = direction(metric) != 0
    cells: dict[str, Value] = {
        **{"mean": estimate.mean, "sd": estimate.sd, "low": estimate.low, "high": estimate.high},
        **{"n": estimate.n, "n_above": estimate.n_above()},
        **{"worst": worst if judged else None, "worst_seed": seed if judged else None},
        "n_censored": len(row.censored_seeds(metric)),
    }
    return [cells[name] for name in _statistics(metric)]


def _run_cells(run: RunResult, names: Sequence[str], counted: Collection[Path]) -> list[Value]:
    cells: dict[str, Value] = {
        **run.config,
        **run.metrics,
        **{"run_id": run.folder.name, "status": run.status, "counted": run.folder in counted},
        **{"folder": str(run.folder), "reason": run.reason},
    }
    return [cells.get(name) for name in names]


def _written(lines: Iterable[Iterable[Value]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)  # CRLF, as RFC 4180 has it
    writer.writerows([_safe(value) for value in line] for line in lines)
    return text.getvalue()


def _safe(value: Value) -> Value:
    """Return the value for a cell.

    Text that a spreadsheet would take for a formula gets an apostrophe in front. Numbers do not,
    nor does text that is a number, such as -1e-3.
    """
    if not isinstance(value, str):
        return value
    text = value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return f"'{text}" if text.startswith(FORMULA) and not NUMBER.fullmatch(text) else text
