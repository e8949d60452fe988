"""Figures of the page: the scores of clients, and Table 3 next to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedbench.report.figures.layout import DOUBLE, LINE, Legend, Margins, grid, panel_title
from fedbench.report.figures.score_panels import draw_panels
from fedbench.report.plotting import BLACK, PAPER_STYLE, RED, plot_style, save_figure
from fedbench.report.reported import SAMPLE, SHIPPED, read_reported
from fedbench.results.run_rounds import Verdicts
from fedbench.results.settings import show
from reproduction.claims import over_seeds
from reproduction.kept import read
from reproduction.tables import grouped, in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIED = {"maxjd_non_iid": "non_iid", "maxjd_pmr": "pmr"}
THEIRS: dict[str, Any] = {"color": RED, "marker": "D", "ls": "none", "markerfacecolor": "white"}
N_ACROSS = 3  # panels of scores: one row per data set
Numbers = Mapping[tuple[str, str, str], float]  # data set, defense, metric -> the paper's number


def figure_name(sweep: str) -> str:
    """Return the file of a sweep's figure, from docs."""
    return f"images/reproduction_{sweep}.svg"


def write_figures(kept: Path, docs: Path) -> None:
    """Draw what the kept results have."""
    drawn = {}
    for sweep, key in VARIED.items():
        scores = read(kept, f"{sweep}_scores")
        if len(scores):
            drawn[sweep] = score_figure(scores, key)
    table3 = read(kept, "table3")
    if len(table3):
        drawn["table3"] = table3_figure(table3, paper_numbers())
    for sweep, figure in drawn.items():
        path = docs / figure_name(sweep)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, path.parent, path.stem, ["svg"])


def score_figure(scores: pd.DataFrame, key: str) -> Figure:
    """Draw the scores of one round for each data set and each value of a setting."""
    found = []
    for (dataset, value), clients in grouped(scores, ["dataset", key]):
        threshold = clients["threshold"].iloc[0]
        verdicts = Verdicts(
            clients["place"].tolist(),
            clients["malicious"].tolist(),
            clients["accepted"].tolist(),
            [False] * len(clients),
            clients["score"].tolist(),
            None if pd.isna(threshold) else float(threshold),
        )
        found.append((f"{dataset}, {key} {show(value)}", verdicts))
    return draw_panels(found, N_ACROSS)


def paper_numbers() -> Numbers:
    """Return the numbers of Table 3, also under the names of samples that stand in."""
    numbers: dict[tuple[str, str, str], float] = {}
    for value in read_reported([SHIPPED]):
        if value.where == "Table 3" and value.attack == "constrain_and_scale":
            for dataset in (value.dataset, value.dataset + SAMPLE):
                for metric, number in value.metrics.items():
                    numbers.setdefault((dataset, value.defense, metric), number)
    return numbers


@plot_style(PAPER_STYLE)
def table3_figure(runs: pd.DataFrame, paper: Numbers) -> Figure:
    """Draw BA and MA of each defense, ours with intervals and the paper's, by data set."""
    from matplotlib.lines import Line2D

    datasets = sorted(runs["dataset"].unique(), key=in_order)
    defenses = sorted(runs["defense"].unique(), key=in_order, reverse=True)
    ours = Line2D([], [], color=BLACK, marker="o", linestyle="-", label="ours, 95 % interval")
    theirs = Line2D([], [], label="the paper; its words and traffic are other data", **THEIRS)
    legend = Legend([ours, theirs], DOUBLE)
    margins = Margins(
        left=0.62, bottom=0.22, top=legend.height + LINE + 0.06, between=0.14, below=0.42
    )
    figure, panels = grid(2 * len(datasets), len(datasets), DOUBLE, 1.15, margins)
    for i, axes in enumerate(panels):
        metric, dataset = ("BA", "MA")[i // len(datasets)], datasets[i % len(datasets)]
        same = runs[runs["dataset"] == dataset]
        _draw_rates(axes, same, dataset, metric, defenses, paper)
        panel_title(axes, f"{dataset}, {metric} (%)")
        axes.tick_params(labelleft=i % len(datasets) == 0)
    legend.draw(figure)
    return figure


def _draw_rates(
    axes: Axes,
    runs: pd.DataFrame,
    dataset: str,
    metric: str,
    defenses: Sequence[str],
    paper: Numbers,
) -> None:
    for place, defense in enumerate(defenses):
        found = over_seeds(runs[runs["defense"] == defense], metric)
        if found is not None:
            low, high = found.low, found.high
            if low is not None and high is not None:
                axes.plot([100 * low, 100 * high], [place, place], color=BLACK)
            axes.plot([100 * found.mean], [place], color=BLACK, marker="o", linestyle="none")
        if (dataset, defense, metric) in paper:
            x = 100 * paper[dataset, defense, metric]
            axes.plot([x], [place], **THEIRS)
    axes.set_xlim(-4, 104)
    axes.set_xticks([0, 50, 100])
    axes.set_yticks(range(len(defenses)), defenses)
    axes.set_ylim(-0.6, len(defenses) - 0.4)
    axes.grid(axis="x")
