"""The data of the report page: a ReportData as one JSON object."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedbench
from fedbench.report.comparison import NOT_PERCENT, TableRow, unit_of
from fedbench.report.page_numbers import estimate_entry, json_safe
from fedbench.report.page_runs import run_entries
from fedbench.report.page_statistics import (
    COMPARED,
    paired_entries,
    rank_entry,
    reported_entries,
    worst_entries,
)
from fedbench.report.page_verdicts import BUDGET, encode_verdicts
from fedbench.report.report_data import LOWER_IS_BETTER, ReportData
from fedbench.results.run_reader import METRICS

SCHEMA = 1
STATUSES = ("failed", "unreadable", "unfinished", "running")  # the worst first
HELP = {
    "BA": "backdoor accuracy after the last round: share of triggered samples that are classified "
    "as the attacker wants",
    "MA": "main accuracy after the last round: share of clean test samples that are classified "
    "right",
    "TPR": "share of poisoned updates that the defense rejected, over the attacked rounds",
    "TNR": "share of benign updates that the defense accepted, over the attacked rounds",
    "AUC": "area under the ROC curve of the defense's scores, mean over the attacked rounds",
    "seconds": "duration of all rounds",
    "norm_ratio": "norm of poisoned updates divided by that of benign ones",
    "cosine": "cosine similarity of poisoned updates to the mean benign update",
    "benign_cosine": "cosine similarity of benign updates to the mean of the other benign ones",
    "BA_cumulative": "mean BA over the rounds from the first attacked one on",
    "MA_lost": "main accuracy of the benign run of the same seed, without defense and attack, "
    "minus that of the run",
    "lifespan_50": "rounds from the last attacked one until BA is below 50 %",
    "lifespan_10": "rounds from the last attacked one until BA is below 10 %",
    "rounds_after_attack": "number of rounds after the last attacked one",
    "recovery": "rounds from the last attacked one until MA is within 1 point of that of the "
    "benign run of the same seed",
}


@dataclass(frozen=True)
class PageOptions:
    """What the page says besides the results."""

    report: Path  # folder of the page
    command: str = ""  # that made the page
    rows: str = "defense"  # of the heat map: `defense` or a setting that differs
    columns: str = ""  # empty: the attack if several were run, otherwise the first that differs
    refresh: int | None = None  # seconds after which the page loads itself again


def page_data(data: ReportData, options: PageOptions, budget: int = BUDGET) -> dict[str, Any]:
    """Return what the page shows; rates are 0..1, and undefined values None.

    `budget` is the largest size of all verdicts on clients.
    """
    verdicts, clients, left_out = encode_verdicts(data, budget)
    return {
        "schema": SCHEMA,
        "title": ", ".join(map(str, data.folders)),
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": fedbench.__version__,
        "command": options.command,
        "caption": data.comparison.caption(),
        "keys": data.comparison.keys,
        "swept": _swept(data),
        "by": {"rows": options.rows, "columns": options.columns or _columns(data)},
        "metrics": _metrics(data),
        "defenses": _defenses(data),
        "rows": _rows(data),
        "runs": run_entries(data, options.report, clients),
        "verdicts": verdicts,
        "verdicts_left_out": left_out,
        "missing": [
            {"name": run.name, "status": run.status, "reason": run.reason} for run in data.missing
        ],
        "paired": paired_entries(data),
        "ranks": {metric: rank_entry(data, metric) for metric in COMPARED},
        "worst": worst_entries(data),
        "reported": reported_entries(data),
    }


def _swept(data: ReportData) -> list[Any]:
    return [
        {
            "name": key.name,
            "labels": key.labels,
            "values": [json_safe(value) for value in key.values],
            "numeric": key.is_numeric,
        }
        for key in data.swept
    ]


def _columns(data: ReportData) -> str:
    names = [key.name for key in data.swept]
    return "attack" if "attack" in names or not names else names[0]


def _metrics(data: ReportData) -> list[Any]:
    keys = [key for key in (*METRICS, *data.comparison.headings) if key != "seeds"]
    return [
        {
            "key": key,
            "label": key,
            "help": HELP.get(key, f"BA of backdoor {key.removeprefix('BA/')}"),
            "percent": key not in NOT_PERCENT,
            "unit": unit_of(key),
            "lower_is_better": is_lower_better(key),
        }
        for key in dict.fromkeys(keys)
    ]


def is_lower_better(metric: str) -> bool:
    return metric.partition("/")[0] in LOWER_IS_BETTER


def _defenses(data: ReportData) -> list[Any]:
    names = {row.defense: str(row.runs[0].value("defense")) for row in data.rows}
    styles = data.styles
    return [
        {
            "label": label,
            "name": names[label],
            "color": styles[label].color,
            "symbol": styles[label].symbol,
            "dash": styles[label].dash,
        }
        for label in data.defenses
    ]


def _rows(data: ReportData) -> list[Any]:
    index = {run.folder: i for i, run in enumerate(data.runs)}
    defenses = {label: i for i, label in enumerate(data.defenses)}
    metrics = [entry["key"] for entry in _metrics(data)]
    return [
        {
            "setting": row.setting,
            "values": [json_safe(value) for value in row.values],
            "defense": defenses[row.defense],
            "runs": [index[run.folder] for run in row.runs],
            "status": _status(row),
            "stats": {key: _stats(data, row, key) for key in metrics},
        }
        for row in data.rows
    ]


def _stats(data: ReportData, row: TableRow, metric: str) -> Any:
    entry = estimate_entry(data.estimate(row, metric), metric, is_lower_better(metric))
    return entry and {**entry, "censored": len(row.censored_seeds(metric))}


def _status(row: TableRow) -> str:
    """Return `finished` if any run is, otherwise the worst status."""
    found = {run.status for run in row.runs}
    return next(status for status in ("finished", *STATUSES) if status in found)
