"""Claims: the numbers that the paper states, each next to ours, with a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd

from fedbench.report.reported import REPORTED_METRICS, ReportedValue, same_setting
from fedbench.report.statistics import Estimate, estimate
from fedbench.results.settings import Value

CLOSE, NEAR = 0.02, 0.10  # differences from the paper's number up to which it is reproduced, partly
ROUNDING = 1e-9
# Data sets that stand in for those that we do not have, or have no runs on; the best first
STAND_INS = {"reddit": ["reddit_sample"], "iot": ["iot_sample"], "cifar10": ["fmnist"]}
Run = Mapping[Any, Any]  # a row of the kept results
BOUNDS = {
    **dict.fromkeys(("MA_lost", "cosine"), (-1.0, 1.0)),
    **dict.fromkeys(("norm_ratio", "lifespan_50", "lifespan_10", "recovery"), (0.0, math.inf)),
}
BACKDOORS = "attack.backdoors"  # of the run; the paper's triggers are not known


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not reproduced"
    UNTESTED = "not testable here"


@dataclass(frozen=True)
class Claim:
    """A number of the paper, and ours."""

    reported: ReportedValue
    metric: str
    paper: float
    ours: Estimate | None  # None: no such run
    dataset: str  # of our runs; the paper's, or one that stands in
    clean: float = 0.0  # BA of a model that nobody attacked, for BA

    @property
    def expected(self) -> float:
        """The paper's number. No BA falls below that of a clean model, which errs at times."""
        return max(self.paper, self.clean)

    @property
    def stands_in(self) -> bool:
        return self.dataset != self.reported.dataset

    @property
    def agreement(self) -> Verdict:
        """How close ours is, on whatever data."""
        if self.ours is None:
            return Verdict.UNTESTED
        distance = abs(self.ours.mean - self.expected)
        if distance <= CLOSE + ROUNDING:
            return Verdict.REPRODUCED
        return Verdict.PARTLY if distance <= NEAR + ROUNDING else Verdict.NOT

    @property
    def verdict(self) -> Verdict:
        """What the page counts: on other data, the paper's number was not tested."""
        return Verdict.UNTESTED if self.stands_in else self.agreement


def claims_of(
    reported: Sequence[ReportedValue], runs: pd.DataFrame, clean: Mapping[str, float]
) -> list[Claim]:
    """Compare with runs; `clean` is the BA of a model that nobody attacked, by data set."""
    found = []
    for value in reported:
        dataset, same = _measured(value, runs)
        for metric in REPORTED_METRICS:
            if metric in value.metrics:
                floor = clean.get(dataset, 0.0) if metric == "BA" else 0.0
                ours = over_seeds(same, metric)
                found.append(Claim(value, metric, value.metrics[metric], ours, dataset, floor))
    return found


def over_seeds(runs: pd.DataFrame, metric: str) -> Estimate | None:
    """Mean and interval of a metric over the seeds of runs that share their other settings."""
    if runs["seed"].duplicated().any():
        raise ValueError(f"several runs of a seed: {', '.join(runs['run'])}")
    values = {seed: float(value) for seed, value in zip(runs["seed"], runs[metric], strict=True)}
    return estimate(values, BOUNDS.get(metric, (0.0, 1.0)))


def _measured(value: ReportedValue, runs: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return the runs of a reported value, and their data set."""
    for dataset in [value.dataset, *STAND_INS.get(value.dataset, ())]:
        same = runs[
            (runs["dataset"] == dataset)
            & (runs["attack"] == value.attack)
            & (runs["defense"] == value.defense)
        ]
        same = same[[_has(run, value.settings) for run in same.to_dict("records")]]
        if len(same):
            return dataset, same
    return value.dataset, runs[:0]


def _has(run: Run, settings: Mapping[str, Value]) -> bool:
    n = _value(run.get("n_clients"))
    return all(
        same_setting(key, settings[key], _value(run.get(key)), n)
        for key in settings
        if key != BACKDOORS
    )


def _value(cell: Any) -> Value:
    """Read a cell: a column in which some runs lack the setting holds numbers as text."""
    value: Value = cell
    if isinstance(cell, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(cell)
    return value
