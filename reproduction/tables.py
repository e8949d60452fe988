"""Markdown tables of the page. Rates are in percent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedbench.report.comparison import natural_order
from fedbench.report.reported import REPORTED_METRICS, ReportedValue
from fedbench.report.statistics import Estimate
from fedbench.results.settings import show
from reproduction.claims import Claim, Verdict, over_seeds

MARKS = {
    Verdict.REPRODUCED: "✓",
    Verdict.PARTLY: "≈",
    Verdict.NOT: "✗",
    Verdict.UNTESTED: "",
}
# Data sets and defenses in the paper's order, attacks after no attack
ORDER = (
    *("reddit", "reddit_sample", "cifar10", "mnist", "fmnist", "fmnist_sample"),
    *("iot", "iot_sample"),
    *("none", "fedavg", "krum", "foolsgold", "auror", "afa", "dp", "median", "flame", "baybfed"),
)
SUCCESS = 0.5  # a higher BA is a success of the attack
HARMLESS = 0.1  # a rule stops an attack if BA, beyond that of a clean model, is at most this


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], n_left: int = 1) -> str:
    """Return a Markdown table; all but the first columns are aligned to the right."""
    rule = ["---"] * n_left + ["---:"] * (len(headings) - n_left)
    lines = [headings, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    return f"{100 * value:z.1f}"


def interval(found: Estimate | None, text: Callable[[float], str] = percent) -> str:
    """Format a mean with its 95 % interval, `1.3 [0.9, 1.7]`, unless it has one value."""
    if found is None:
        return "-"
    if found.low is None or found.high is None or text(found.low) == text(found.high):
        return text(found.mean)
    return f"{text(found.mean)} [{text(found.low)}, {text(found.high)}]"


def claims_table(claims: Sequence[Claim], letters: Sequence[str]) -> str:
    """One row per reported value: each metric as `paper → ours`, and the letters of reasons."""
    metrics = [m for m in REPORTED_METRICS if any(claim.metric == m for claim in claims)]
    entries: dict[int, list[tuple[Claim, str]]] = {}
    for claim, letter in zip(claims, letters, strict=True):
        entries.setdefault(id(claim.reported), []).append((claim, letter))
    rows = []
    for same in entries.values():
        cells = {claim.metric: _claim(claim) for claim, _ in same}
        first = same[0][0]
        marked = " ".join(sorted({letter for _, letter in same if letter}))
        rows.append(
            [
                f"`{first.reported.dataset}`",
                _setting(first.reported),
                *(cells.get(metric, "") for metric in metrics),
                f"`{first.dataset}`" if first.stands_in else "",
                str(first.ours.n if first.ours is not None else 0),
                marked,
            ]
        )
    return table(["data set", "setting", *metrics, "stand-in", "seeds", "why"], rows, n_left=2)


def _claim(claim: Claim) -> str:
    ours, mark = interval(claim.ours), MARKS[claim.agreement]
    mark = f" ({mark})" if claim.stands_in else f" {mark}"
    return f"{_trimmed(claim.paper)} → {ours}{mark if claim.ours is not None else ''}"


def _trimmed(value: float) -> str:
    """The digits that the paper prints: 92.14, but 100."""
    return f"{100 * value:.2f}".rstrip("0").rstrip(".")


def _setting(value: ReportedValue) -> str:
    """`baybfed pmr=0.2`, and the attack if it is not the usual one."""
    words = [f"{key}={show(value.settings[key])}" for key in value.settings]
    attack = "" if value.attack == "constrain_and_scale" else f" {value.attack}"
    return f"`{' '.join([value.defense + attack, *words])}`"


def results_table(runs: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str]) -> str:
    """One row per setting: the mean and interval of each metric over seeds."""
    rows = []
    for setting, same in grouped(runs, keys):
        cells = [_cell(same, metric) for metric in metrics]
        rows.append([*(f"`{show(value)}`" for value in setting), *cells, str(len(same))])
    return table([*keys, *metrics, "seeds"], rows, n_left=len(keys))


def _cell(runs: pd.DataFrame, metric: str) -> str:
    found = over_seeds(runs, metric)
    if metric in ("lifespan_50", "lifespan_10", "recovery"):
        bound = "≥ " if any(metric in str(text).split() for text in runs["censored"]) else ""
        return bound + interval(found, "{:.1f}".format)
    return interval(found, "{:.2f}".format if metric in ("norm_ratio", "cosine") else percent)


def grouped(runs: pd.DataFrame, keys: Sequence[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Split runs by settings, in natural order; data sets and defenses as the paper has them."""
    groups = [(key, same) for key, same in runs.groupby(list(keys), sort=False)]
    return sorted(groups, key=lambda group: [in_order(value) for value in group[0]])


def in_order(value: object) -> tuple[Any, ...]:
    """Sort key of a setting."""
    name = str(value)
    return (0, ORDER.index(name)) if name in ORDER else (1, *natural_order(name))


def summary_table(by_experiment: Mapping[str, Sequence[Claim]]) -> str:
    """Count the verdicts of each experiment, and in total."""
    rows = [[title, *_counts(claims)] for title, claims in by_experiment.items() if claims]
    everything = [claim for claims in by_experiment.values() for claim in claims]
    rows.append(["**all**", *_counts(everything)])
    return table(["experiment", "numbers", *(str(verdict) for verdict in Verdict)], rows)


def _counts(claims: Sequence[Claim]) -> list[str]:
    verdicts = [claim.verdict for claim in claims]
    return [str(len(claims)), *(str(verdicts.count(verdict)) for verdict in Verdict)]


def breaking_table(runs: pd.DataFrame, key: str) -> str:
    """BA of each defense by the value of a setting, and the first value at which it fails."""
    values = sorted(runs[key].unique())
    rows = []
    for (defense,), same in grouped(runs, ["defense"]):
        found = [over_seeds(same[same[key] == value], "BA") for value in values]
        failed = [ba is not None and ba.mean > SUCCESS for ba in found]
        shown = ["" if ba is None else percent(ba.mean) for ba in found]
        cells = [f"**{ba}**" if fails else ba for ba, fails in zip(shown, failed, strict=True)]
        first = next((show(v) for v, fails in zip(values, failed, strict=True) if fails), "-")
        rows.append([f"`{defense}`", *cells, first])
    return table(["defense", *(f"{key} {show(value)}" for value in values), "fails from"], rows)


def stopped_table(attacked: pd.DataFrame, benign: pd.DataFrame, clean: Mapping[str, float]) -> str:
    """For each data set, the rules that stop the attack and those that do not, with MA lost."""
    rows = []
    for (dataset,), runs in grouped(attacked, ["dataset"]):
        usual = over_seeds(benign[benign["dataset"] == dataset], "MA")
        stopping: list[tuple[float, str]] = []
        failing: list[tuple[float, str]] = []
        for (defense,), same in grouped(runs, ["defense"]):
            ba, ma = over_seeds(same, "BA"), over_seeds(same, "MA")
            if ba is None or ma is None or usual is None:
                continue
            stops = ba.mean - clean.get(str(dataset), 0.0) <= HARMLESS
            entry = f"{defense} ({percent(ma.mean - usual.mean)})"
            (stopping if stops else failing).append((-ma.mean, entry))
        cells = [", ".join(entry for _, entry in sorted(found)) for found in (stopping, failing)]
        rows.append([f"`{dataset}`", percent(usual.mean) if usual else "-", *cells])
    return table(["data set", "MA without attack", "stops it", "does not"], rows, n_left=4)
