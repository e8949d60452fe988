"""The page docs/reproduction.md, from kept results. No number of a result is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from string import ascii_lowercase

import pandas as pd

from fedbench.report.reported import SHIPPED, ReportedValue, read_reported
from reproduction import tables
from reproduction.claims import Claim, claims_of, over_seeds
from reproduction.experiments import Experiment, read_experiments
from reproduction.figures import figure_name
from reproduction.kept import read

INTRODUCTION = Path(__file__).with_name("introduction.md")
MADE = "<!-- Made by `python -m reproduction` from docs/reproduction/*.csv. Do not edit. -->"
BENIGN = "table3_benign"  # the sweep without an attack and without a defense


def page(folder: Path) -> str:
    """Return the page made from the results that are kept in a folder."""
    clean = clean_accuracies(folder)
    experiments = read_experiments()
    claims = {each.title: claims_in(each, folder, clean) for each in experiments}
    introduction = INTRODUCTION.read_text(encoding="utf-8").strip()
    sections = [_section(each, claims[each.title], folder, clean) for each in experiments]
    summary = tables.summary_table(claims)
    return "\n\n".join([MADE, introduction.replace("{summary}", summary), *sections]) + "\n"


def clean_accuracies(folder: Path) -> dict[str, float]:
    """Return BA without an attack and without a defense, by data set."""
    by_dataset = tables.grouped(read(folder, BENIGN), ["dataset"])
    found = {str(dataset): over_seeds(runs, "BA") for (dataset,), runs in by_dataset}
    return {dataset: ba.mean for dataset, ba in found.items() if ba is not None}


def claims_in(experiment: Experiment, folder: Path, clean: Mapping[str, float]) -> list[Claim]:
    """Compare the paper's numbers with runs, or with single rounds where it speaks of these."""
    reported = [value for value in _reported() if value.where in experiment.where]
    of_rounds = [value for value in reported if {*value.settings} == {"pdr"}]
    of_runs = [value for value in reported if value not in of_rounds]
    claims = claims_of(of_runs, runs_of(experiment, folder), clean)
    if of_rounds:
        rounds = pd.concat(read(folder, f"{sweep}_rounds") for sweep in experiment.sweeps)
        # Schedules meet: the first round with this pdr is the one that started with it.
        first = rounds.sort_values("round").drop_duplicates(["dataset", "defense", "pdr", "seed"])
        claims += claims_of(of_rounds, first, clean)
    return claims


@cache
def _reported() -> list[ReportedValue]:
    return read_reported([SHIPPED])


def runs_of(experiment: Experiment, folder: Path) -> pd.DataFrame:
    """Return the kept runs of all sweeps of an experiment, each run once."""
    runs = pd.concat([read(folder, sweep) for sweep in experiment.sweeps])
    return runs.drop_duplicates("run")


def _section(
    experiment: Experiment, claims: Sequence[Claim], folder: Path, clean: Mapping[str, float]
) -> str:
    runs = runs_of(experiment, folder)
    parts = [f"## {experiment.title}", experiment.text.strip(), _commands(experiment)]
    if claims:
        reasons = [experiment.why(claim) for claim in claims]
        letters = dict(zip(filter(None, dict.fromkeys(reasons)), ascii_lowercase, strict=False))
        parts.append(tables.claims_table(claims, [letters.get(why, "") for why in reasons]))
        parts.append("\n".join(f"- **{letter}**: {why}" for why, letter in letters.items()))
    if runs.empty:
        parts.append("Not run yet.")
    else:
        parts += _results(experiment, runs, folder, clean)
    return "\n\n".join(filter(None, parts))


def _commands(experiment: Experiment) -> str:
    lines = [
        f"python -m fedbench --config-dir {experiment.folder} --config-name {sweep}"
        for sweep in experiment.sweeps
    ]
    return "\n".join(["```sh", *lines, "```"])


def _results(
    experiment: Experiment, runs: pd.DataFrame, folder: Path, clean: Mapping[str, float]
) -> list[str]:
    """Return our own results: figure and tables."""
    parts = []
    if experiment.figure:
        parts += [f"![{experiment.figure}]({figure_name(experiment.sweeps[0])})"]
        parts += [f"*{experiment.figure}*"]
    if experiment.shows_stopped:
        attacked = runs[runs["attack"] != "none"]
        parts.append(tables.stopped_table(attacked, read(folder, BENIGN), clean))
    if experiment.breaking:
        parts.append(tables.breaking_table(runs, experiment.breaking))
    if experiment.results:
        shown = runs.drop_duplicates([*experiment.results, "seed"])
        parts.append(tables.results_table(shown, experiment.results, experiment.metrics))
    return parts
