"""Kept results: small CSV files in docs/reproduction, from which the page is made.

NAME.csv has a line per finished run of the sweep NAME. Some sweeps keep more: NAME_rounds.csv a
line per round, NAME_scores.csv a line per client of one round.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.errors import UserError
from fedbench.report.comparison import natural_order
from fedbench.report.figures.score_panels import last_scored, score_dots
from fedbench.report.report_data import ReportData
from fedbench.report.run_labels import changed_in, value_of
from fedbench.results.atomic_files import write_atomically
from fedbench.results.run_reader import RunResult, read_rounds
from fedbench.results.run_rounds import RunRounds

# Settings that describe every run. Others are kept if the sweep or its user changed them.
SETTINGS = (
    *("dataset", "model", "attack", "defense", "pmr", "pdr", "non_iid", "n_clients", "pool"),
    *("partition", "pretrain_rounds", "rounds", "local_epochs", "lr"),
)
METRICS = (
    *("BA", "MA", "TPR", "TNR", "AUC", "norm_ratio", "cosine"),
    *("BA_cumulative", "lifespan_50", "lifespan_10", "recovery", "MA_lost", "seconds"),
)
CENSORED = "censored"  # metrics of the run that are lower bounds
PROVENANCE = ("run", "commit", "processor")
PER_ROUND = ("pdr", "BA", "MA", "TPR", "TNR")
ROUNDS_OF = ("adaptive_pdr", "durability")  # sweeps whose rounds are kept
SCORES_OF = ("maxjd_non_iid", "maxjd_pmr")  # sweeps whose scores are kept, of one seed
LAST = ("seed", "round", "place", *METRICS, CENSORED, *PROVENANCE)  # columns

Row = Mapping[str, Any]


def keep(data: ReportData, folder: Path, sweeps: Collection[str]) -> list[str]:
    """Merge the finished runs of some sweeps into the kept ones, by run id.

    Return the names of the sweeps that have any.
    """
    by_sweep: dict[str, list[RunResult]] = {}
    for run in data.runs:
        sweep = run.folder.parent.name
        if run.status == "finished" and sweep in sweeps:
            by_sweep.setdefault(sweep, []).append(run)
    for sweep, runs in by_sweep.items():
        keys = _keys(runs)
        _merge(folder / f"{sweep}.csv", [_run_row(run, keys) for run in runs])
        if sweep in ROUNDS_OF:
            rows = [row for run in runs for row in _round_rows(run, keys)]
            _merge(folder / f"{sweep}_rounds.csv", rows)
        if sweep in SCORES_OF:
            first = min(natural_order(run.value("seed")) for run in runs)
            shown = [run for run in runs if natural_order(run.value("seed")) == first]
            rows = [row for run in shown for row in _score_rows(run, data.rounds[run.folder], keys)]
            _merge(folder / f"{sweep}_scores.csv", rows)
    return [*by_sweep]


def read(folder: Path, name: str) -> pd.DataFrame:
    """Read a kept file; without rows if there is none."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return pd.DataFrame(columns=[*SETTINGS, *LAST])
    measured = dict.fromkeys([*METRICS, "score", "threshold"], "")
    text = dict.fromkeys([CENSORED, *PROVENANCE], str)  # a commit may look like a number
    try:
        return pd.read_csv(path, keep_default_na=False, na_values=measured, dtype=text)
    except ValueError as error:
        raise UserError(f"{path}: not a CSV file ({error})") from error


def _keys(runs: Sequence[RunResult]) -> list[str]:
    """Return the settings to keep: SETTINGS, then what was changed or swept."""
    swept = [key for run in runs if run.origin is not None for key in run.origin.given]
    found = dict.fromkeys([*SETTINGS, *changed_in(runs, ()), *swept])
    return [key for key in found if key != "seed"]


def _settings(run: RunResult, keys: Sequence[str]) -> dict[str, Any]:
    lacking = {key: "" for key in keys if value_of(run, key) in (None, "-")}
    return {key: value_of(run, key) for key in keys} | lacking | {"seed": run.value("seed")}


def _run_row(run: RunResult, keys: Sequence[str]) -> Row:
    git = run.summary.get("fedbench_git") or {}
    return {
        **_settings(run, keys),
        **{key: run.metrics.get(key) for key in METRICS},
        CENSORED: " ".join(sorted(run.censored)),
        "run": run.id,
        "commit": str(git.get("commit", ""))[:10],
        "processor": run.summary.get("processor", ""),
    }


def _round_rows(run: RunResult, keys: Sequence[str]) -> list[Row]:
    settings = _settings(run, keys)
    return [
        {**settings, **{key: record[key] for key in ("round", *PER_ROUND)}, "run": run.id}
        for record in read_rounds(run)
    ]


def _score_rows(run: RunResult, rounds: RunRounds, keys: Sequence[str]) -> list[Row]:
    """Return the clients of the last attacked round, benign ones first."""
    verdicts = last_scored(rounds)
    if verdicts is None:
        return []
    return [
        {
            **_settings(run, keys),
            **{"place": place, "malicious": malicious, "accepted": accepted, "score": score},
            **{"threshold": verdicts.threshold, "run": run.id},
        }
        for place, score, malicious, accepted in score_dots(verdicts)
    ]


def _merge(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, and those of other runs that the file has, in order of their settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = _as_text(pd.DataFrame(rows))
    if path.exists():
        old = pd.read_csv(path, keep_default_na=False, dtype=str)
        frame = pd.concat([old[~old["run"].isin(frame["run"])], frame]).fillna("")
    last = [key for key in LAST if key in frame]
    settings = [str(key) for key in frame if key not in last]
    order = [*settings, *(key for key in ("seed", "round", "place") if key in frame)]
    frame = frame.sort_values(order, key=lambda column: column.map(natural_order))
    text = frame[[*settings, *last]].to_csv(index=False, lineterminator="\n")
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Six digits: exact to a thousandth of a point, without the noise of the last bits."""
    text = frame.to_csv(index=False, float_format="%.6g")
    return pd.read_csv(io.StringIO(text), keep_default_na=False, dtype=str)
