"""Compare runs: one row per setting and defense, told apart by what the user changed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fedbench.default_settings import guessed_origin
from fedbench.report.run_labels import RunLabels, value_of
from fedbench.results.after_attack import LIFESPANS, ROUNDS_AFTER
from fedbench.results.run_reader import METRICS, STEALTH, RunResult
from fedbench.results.settings import LEADING, Value, idle, show

CENSORABLE = (*LIFESPANS, "recovery")  # columns whose values may be lower bounds
IN_ROUNDS = (*CENSORABLE, ROUNDS_AFTER)
NOT_PERCENT = ("seconds", "seeds", *STEALTH, *IN_ROUNDS)  # columns that are not in percent
AT_LEAST = "≥"  # in front of lower bounds
LOWER_BOUND = "a lower bound, as the run ended first"


@dataclass(frozen=True)
class TableRow:
    """The runs of one defense in one setting, one run per seed."""

    setting: list[str]  # labels of the comparison's keys
    values: list[Value]  # their raw values
    defense: str  # `krum`, or `krum m=5` if the user changed m
    runs: list[RunResult]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.status == "finished"]

    def cells(self, headings: Sequence[str]) -> list[str]:
        """Return the cells below `headings`; the first is the status if no run has finished."""
        done, n = self.finished, len(self.runs)
        cells = {key: self._cell(key) for key in headings}
        if not done:
            statuses = {run.status for run in self.runs}
            order = ("failed", "unreadable", "unfinished", "running")
            worst = next(status for status in order if status in statuses)
            cells = dict.fromkeys(headings, "") | {headings[0]: worst}
        cells["seeds"] = str(n) if len(done) == n else f"{len(done)} of {n}"
        return [cells[key] for key in headings]

    def censored_seeds(self, metric: str) -> set[Value]:
        """Return the seeds of which the value is a lower bound. Then the mean is one, too."""
        return {run.value("seed") for run in self.finished if metric in run.censored}

    def _cell(self, metric: str) -> str:
        mean = _mean(metric, [run.metrics.get(metric) for run in self.finished])
        return f"{AT_LEAST} {mean}" if self.censored_seeds(metric) else mean


@dataclass(frozen=True)
class Comparison:
    """The contents of the table, for any format."""

    keys: list[str]  # settings that tell the runs apart, besides the defense
    headings: list[str]  # metrics, and `seeds` if any row has more than one
    rows: list[TableRow]
    shared: Mapping[str, str]  # settings that all runs have in common
    seeds: list[Value]

    def with_columns(self, columns: Sequence[str]) -> Comparison:
        """Return the same rows with other metrics."""
        return replace(self, headings=[*columns, "seeds"] if self.averages else [*columns])

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.headings if name != "seeds"]

    @property
    def averages(self) -> bool:
        return "seeds" in self.headings

    def caption(self, headings: Collection[str] | None = None, defense: str = "") -> str:
        """Return the settings that all runs share, the seeds and the units of `headings`."""
        shared = {"defense": defense, **self.shared} if defense else self.shared
        parts = [", ".join(f"{key} {value}" for key, value in shared.items())]
        if self.seeds:
            plural = "seeds " if len(self.seeds) > 1 else "seed "
            parts.append(plural + ", ".join(map(show, self.seeds)))
        shown = [*(headings or self.headings)]
        units = _units(shown)
        spread = ["mean ± sample standard deviation over seeds"] * self.averages
        parts.append((", " if len(units) < 2 else "; ").join([*units, *spread]))
        if any(row.censored_seeds(key) for row in self.rows for key in shown):
            parts.append(f"{AT_LEAST}: {LOWER_BOUND}")
        return "; ".join(filter(None, parts))


def compare(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> Comparison:
    """Group the runs into rows: by setting, then by defense in order of appearance.

    Runs without a readable config come last, under the name of their folder.
    """
    read = [
        run if run.origin is not None else replace(run, origin=guessed_origin(run.config))
        for run in runs
        if run.config
    ]
    labels = RunLabels(read)
    names = list(dict.fromkeys(value_of(run, "defense") for run in read))

    def place(run: RunResult) -> tuple[Any, ...]:
        setting = [natural_order(value_of(run, key)) for key in labels.columns]
        settings = [natural_order(value) for value in labels.identity(run)]
        return setting, names.index(value_of(run, "defense")), settings

    rows = []
    for _, group in groupby(sorted(read, key=place), place):
        same = list(group)
        setting = [labels.cell(same[0], key) for key in labels.columns]
        values = [value_of(same[0], key) for key in labels.columns]
        rows.append(TableRow(setting, values, labels.defense(same[0]), _one_per_seed(same)))
    unknown, n = [run for run in runs if not run.config], len(labels.columns)
    rows += [TableRow(["?"] * n, [None] * n, run.folder.name, [run]) for run in unknown]
    headings = [*columns, "seeds"] if any(len(row.runs) > 1 for row in rows) else [*columns]
    seeds = sorted({run.config["seed"] for run in read if "seed" in run.config}, key=natural_order)
    return Comparison(labels.columns, headings, rows, _shared(read, labels), seeds)


def _shared(runs: Sequence[RunResult], labels: RunLabels) -> dict[str, str]:
    """Return the settings that all runs share: LEADING, then the others that were changed."""
    if not runs:
        return {}
    first = runs[0].config
    useless = idle(first)
    # `partition` replaces `non_iid` where that has no effect.
    leading = [key for key in LEADING if key == "non_iid" or key not in useless]
    leading = ["partition" if key in useless else key for key in leading]
    shared = [
        key
        for key in leading
        if first.get(key) is not None and len({value_of(run, key) for run in runs}) == 1
    ]
    changed = [key for key in labels.shared if key not in useless]
    keys = [key for key in dict.fromkeys([*shared, *changed]) if key not in labels.columns]
    return {key: labels.cell(runs[0], key) for key in keys}


def _one_per_seed(runs: Sequence[RunResult]) -> list[RunResult]:
    """Keep one run per seed: repeating a seed is no further evidence.

    Prefer finished runs, then the newest, whose plugins may be of a later version.
    """
    by_seed: dict[Value, RunResult] = {}
    for run in runs:
        if run.status == "finished" or run.value("seed") not in by_seed:
            by_seed[run.value("seed")] = run
    return list(by_seed.values())


def natural_order(value: Value) -> tuple[Any, ...]:
    """Sort key: 0.2 before 0.3 before 1e1, `cnn9` before `cnn10`, numbers before words."""
    if value is None:
        return (0,)
    try:
        return (1, float(value))
    except (ValueError, OverflowError):
        parts = re.split(r"(\d+)", str(value))
        return (2, tuple(int(part) if part.isdecimal() else part for part in parts), value)


def unit_of(metric: str) -> str:
    """Return the unit of a metric in tables; empty if it has none, or one that goes unsaid."""
    if metric == "MA_lost":
        return "points"
    if metric in IN_ROUNDS:
        return "rounds"
    return "" if metric in NOT_PERCENT else "%"


def _units(metrics: Sequence[str]) -> list[str]:
    """Return `BA, MA in %`, `recovery in rounds`."""
    by_unit: dict[str, list[str]] = {}
    for metric in metrics:
        by_unit.setdefault(unit_of(metric), []).append(metric)
    return [f"{', '.join(names)} in {unit}" for unit, names in by_unit.items() if unit]


def _mean(key: str, values: Sequence[float | None]) -> str:
    """Return mean and sample standard deviation of the measured values: `84.1 ± 0.3`."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    decimals = 2 if key in STEALTH else 1
    scale = 1 if key in NOT_PERCENT else 100
    mean = f"{scale * statistics.fmean(present):z.{decimals}f}"
    if len(present) == 1:
        return mean
    return f"{mean} ± {scale * statistics.stdev(present):.{decimals}f}"
