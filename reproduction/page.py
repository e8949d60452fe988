"""The page docs/reproduction.md, from kept results. No number of a result is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase

import pandas as pd

from fedbench.report.reported import SHIPPED, ReportedValue, read_reported
from reproduction import tables
from reproduction.claims import Claim, claims_of, over_seeds
from reproduction.experiments import Experiment, read_experiments
from reproduction.kept import read

INTRO = Path(__file__).with_name("introduction.md")
FIGURES = "images/reproduction"  # from docs, see figures.py
MADE = "<!-- Made by `python -m reproduction` from docs/reproduction/*.csv. Do not edit. -->"


def page(folder: Path) -> str:
    """Return the page made from the results that are kept in a folder."""
    reported = read_reported([SHIPPED])
    clean = clean_accuracies(folder)
    parts, by_experiment = [], {}
    for experiment in read_experiments():
        runs = runs_of(experiment, folder)
        claims = _claims(experiment, reported, runs, folder, clean)
        by_experiment[experiment.title] = claims
        parts.append(_section(experiment, runs, claims, folder, clean))
    summary = tables.summary_table(by_experiment)
    intro = INTRO.read_text(encoding="utf-8").replace("{summary}", summary)
    return "\n\n".join([MADE, intro.strip(), *parts]) + "\n"


def runs_of(experiment: Experiment, folder: Path) -> pd.DataFrame:
    """Return the kept runs of all sweeps of an experiment, each run once."""
    runs = pd.concat([read(folder, sweep) for sweep in experiment.sweeps])
    return runs.drop_duplicates("run")


def clean_accuracies(folder: Path) -> dict[str, float]:
    """Return BA without an attack and without a defense, by data set."""
    found = {}
    for (dataset,), runs in tables.grouped(read(folder, "table3_benign"), ["dataset"]):
        ba = over_seeds(runs, "BA")
        if ba is not None:
            found[str(dataset)] = ba.mean
    return found


def _claims(
    experiment: Experiment,
    reported: Sequence[ReportedValue],
    runs: pd.DataFrame,
    folder: Path,
    clean: Mapping[str, float],
) -> list[Claim]:
    """Compare with the runs, or with single rounds where a paper speaks of these."""
    stated = [value for value in reported if value.where in experiment.where]
    by_round = [value for value in stated if set(value.settings) == {"pdr"}]
    whole = [value for value in stated if value not in by_round]
    claims = claims_of(whole, runs, clean)
    if by_round:
        rounds = pd.concat([read(folder, f"{sweep}_rounds") for sweep in experiment.sweeps])
        first = rounds.sort_values("round").drop_duplicates(["dataset", "defense", "pdr", "seed"])
        claims += claims_of(by_round, first, clean)
    return claims


def _section(
    experiment: Experiment,
    runs: pd.DataFrame,
    claims: Sequence[Claim],
    folder: Path,
    clean: Mapping[str, float],
) -> str:
    parts = [f"## {experiment.title}", experiment.text.strip(), _commands(experiment)]
    if claims:
        reasons = [experiment.why(claim) for claim in claims]
        letters = dict(zip(filter(None, dict.fromkeys(reasons)), ascii_lowercase, strict=False))
        parts.append(tables.claims_table(claims, [letters.get(why, "") for why in reasons]))
        parts.append("\n".join(f"- **{letter}**: {why}" for why, letter in letters.items()))
    if runs.empty:
        parts.append("Not run yet.")
        return "\n\n".join(filter(None, parts))
    if experiment.shows_stopped:
        benign = read(folder, "table3_benign")
        parts.append(tables.stopped_table(runs[runs["attack"] != "none"], benign, clean))
    if experiment.figure:
        name = f"{FIGURES}_{experiment.sweeps[0]}.svg"
        parts.append(f"![{experiment.figure}]({name})\n\n*{experiment.figure}*")
    if experiment.breaking:
        parts.append(tables.breaking_table(runs, experiment.breaking))
    if experiment.results:
        shown = runs.drop_duplicates([*experiment.results, "seed"])
        parts.append(tables.results_table(shown, experiment.results, experiment.metrics))
    return "\n\n".join(filter(None, parts))


def _commands(experiment: Experiment) -> str:
    lines = [
        f"python -m fedbench --config-dir {experiment.folder} --config-name {sweep}"
        for sweep in experiment.sweeps
    ]
    return "\n".join(["```sh", *lines, "```"])
