"""Runs and report data in memory, for tests of tables; run directories written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from fedbench.report.benign_pairs import PAIRED
from fedbench.report.comparison import compare
from fedbench.report.missing_runs import missing_runs
from fedbench.report.report_data import ReportData
from fedbench.results.origin import Origin
from fedbench.results.run_dir import RunDir
from fedbench.results.run_reader import DURABILITY, METRICS, STEALTH, RunResult
from fedbench.results.sealed import last_check, seal_json, seal_line, seal_text
from fedbench.results.settings import flat

SETTINGS = {"dataset": "mnist", "model": "cnn", "attack": "dba", "pmr": 0.2, "rounds": 10}


def a_run(defense: str, seed: Any = 0, status: str = "finished", **given: Any) -> RunResult:
    """Return a run; `given` are metrics (BA=0.1), settings (pmr=0.3), folder and reason.

    `censored` names metrics that are lower bounds.
    """
    folder = Path(
        given.pop("folder", f"runs/demo/{crc32(repr((defense, seed, given)).encode()):08x}")
    )
    reason = given.pop("reason", "")
    by_backdoor = given.pop("by_backdoor", {})
    metrics: dict[str, Any] = dict.fromkeys(METRICS) | {"MA": 0.8, "BA": 0.1, "seconds": 2.0}
    known = (*METRICS, *STEALTH, *DURABILITY, *PAIRED)
    metrics |= {key: given.pop(key) for key in known if key in given}
    censored = frozenset(given.pop("censored", ()))
    metrics |= {f"BA/{name}": value for name, value in by_backdoor.items()}
    config = flat({"defense": defense, "seed": seed, "n_clients": 30, **SETTINGS, **given})
    results = metrics if status == "finished" else {}
    return RunResult(folder, status, config, results, reason, Origin(), censored=censored)


def data_of(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> ReportData:
    """Return the report data of some runs."""
    comparison = compare(runs, columns)
    missing = missing_runs(runs, comparison)
    return ReportData([Path("runs/demo")], list(runs), comparison, {}, missing)


def with_seeds(
    defense: str, values: Sequence[float | None], metric: str = "BA", **given: Any
) -> list[RunResult]:
    """Return a run per value of a metric, with seeds 0, 1, ..."""
    return [a_run(defense, seed, **(given | {metric: v})) for seed, v in enumerate(values)]


def seal(folder: Path) -> None:
    """Give the files of a run directory the checks that fedbench would have written.

    For tests that write or edit them as text. Lines and files that are no JSON objects stay.
    """
    run = RunDir(folder)
    run_id = re.sub(r"\s", " ", folder.name)  # unlike a folder of a test, never with line breaks
    lines: list[bytes] = []
    if run.rounds_file.path.is_file():
        *whole, torn = run.rounds_file.path.read_bytes().split(b"\n")
        for line in whole:
            record, previous = _json(line), last_check(lines, run_id)
            sealed = line if record is None else seal_line(record, previous).rstrip(b"\n")
            lines.append(sealed)
        _write(run.rounds_file.path, b"".join(line + b"\n" for line in lines) + torn)
    if run.config_file.is_file():
        text = re.sub(r"# run .*\n", "", run.config_file.read_text())
        _write(run.config_file, seal_text(text, run_id))
    for path in (run.origin_file, run.summary_file):
        if path.is_file() and (content := _json(path.read_bytes())) is not None:
            if content.get("status") == "finished":
                content["last_check"] = last_check(lines, run_id).decode()
            _write(path, seal_json(content, run_id))


def _write(path: Path, content: bytes) -> None:
    """Write a file unless it has this content: the time of config.yaml is the run's start."""
    if path.read_bytes() != content:
        path.write_bytes(content)


def _json(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object without what seals it; None for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return {key: value for key, value in content.items() if key not in ("run", "check")}
