"""The runs of the report page: what each did, and how to find it or start it again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedbench.report.page_numbers import json_safe, rounded, rounded_all
from fedbench.report.report_data import ReportData
from fedbench.report.single_command import single_command
from fedbench.results.origin import title
from fedbench.results.run_reader import RunResult
from fedbench.results.run_rounds import RunRounds

COMMIT_LENGTH = 10


def run_entries(data: ReportData, report: Path, clients: Mapping[Path, int]) -> list[Any]:
    """Return one entry per run; `report` is the page's folder, `clients` points into verdicts."""
    row_of: dict[Path, int] = {}
    counted: dict[Path, RunResult] = {}  # with the origin that the comparison found
    for i, row in enumerate(data.rows):
        for run in row.runs:
            row_of[run.folder], counted[run.folder] = i, run
    at = report.resolve()
    return [
        {
            **_identity(counted.get(run.folder, run), at),
            "row": row_of.get(run.folder, -1),
            **_results(run, data.rounds.get(run.folder)),
            **_origin(counted.get(run.folder, run)),
            "clients": clients.get(run.folder),
        }
        for run in data.runs
    ]


def _identity(run: RunResult, report: Path) -> dict[str, Any]:
    return {
        "id": run.folder.name,
        "title": _title(run),
        "folder": relative_link(run.folder, report),
        "path": str(run.folder),
        "status": run.status,
        "reason": run.reason,
        "seed": json_safe(run.config.get("seed")),
    }


def _title(run: RunResult) -> str:
    if {"defense", "attack"} <= {*run.config}:
        return title(run.config, run.origin)
    return run.folder.name


def relative_link(folder: Path, start: Path) -> str:
    """Return the address of a folder for a link in a page in the folder `start`."""
    try:
        relative = os.path.relpath(folder.resolve(), start)
    except ValueError:  # another drive
        return folder.resolve().as_uri()
    return quote(os.fsencode(relative.replace(os.sep, "/")))


def _results(run: RunResult, rounds: RunRounds | None) -> dict[str, Any]:
    by_step = run.summary.get("seconds_by_step") if rounds is None else rounds.seconds
    seconds = _numbers(by_step) if isinstance(by_step, Mapping) else {}
    return {
        "metrics": {key: rounded(value) for key, value in run.metrics.items()},
        "censored": sorted(run.censored),
        "seconds": seconds,
        "rounds": None if rounds is None or not len(rounds) else _rounds(rounds),
    }


def _numbers(values: Mapping[Any, Any]) -> dict[str, float | None]:
    numbers = {k: v for k, v in values.items() if type(v) in (int, float) and abs(v) < 1e300}
    return {str(key): rounded(value) for key, value in numbers.items()}


def _rounds(rounds: RunRounds) -> dict[str, Any]:
    rates = {key: rounded_all(values) for key, values in rounds.rates.items()}
    return {"index": rounds.index, "attacked": _spans(rounds), **rates}


def _spans(rounds: RunRounds) -> list[list[int]]:
    """Return first and last index of every unbroken sequence of attacked rounds."""
    spans = []
    pairs = zip(rounds.index, rounds.attacked, strict=True)
    for attacked, group in groupby(pairs, lambda pair: pair[1]):
        indices = [index for index, _ in group]
        if attacked:
            spans.append([indices[0], indices[-1]])
    return spans


def _origin(run: RunResult) -> dict[str, Any]:
    summary = run.summary
    versions = summary.get("versions")
    return {
        "command": _text(summary.get("command")),
        "again": single_command(run),
        "config": {key: json_safe(value) for key, value in run.config.items()},
        "versions": {str(k): str(v) for k, v in versions.items()}
        if isinstance(versions, Mapping)
        else {},
        "processor": _text(summary.get("processor")),
        "commit": _commit(summary.get("git")) or _commit(summary.get("fedbench_git")),
        "files": _files(run.folder),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _commit(git: Any) -> str:
    """Return `32af57d2dd`, or `32af57d2dd (dirty)` if files differed from the commit."""
    if not isinstance(git, Mapping) or not isinstance(git.get("commit"), str):
        return ""
    return str(git["commit"])[:COMMIT_LENGTH] + (" (dirty)" if git.get("dirty") else "")


def _files(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []
