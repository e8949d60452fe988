"""Critical-difference diagram: mean ranks of the defenses; bars join those not told apart.

scikit-posthocs can draw such a diagram, but it finds the bars from a matrix of its own and places
labels with pyplot; here the bars are those of RankComparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fedbench.report.defense_styles import DefenseStyle
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    look,
    short_names,
    widest,
)
from fedbench.report.figures.selection import Drawing, by_setting, swept_names, title_of
from fedbench.report.plotting import BLACK, PAPER_STYLE, plot_style
from fedbench.report.rank_test import RankComparison, compare_ranks
from fedbench.report.report_data import LOWER_IS_BETTER, ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = ("BA", "MA")
TOP, BAR = 0.34, 0.075  # inches: the axis with its numbers; one bar
WIDE = 12  # defenses from which the diagram takes both columns


def critical_difference_drawings(data: ReportData) -> list[Drawing]:
    """Return one diagram each of BA and MA, if there are enough settings to rank."""
    drawings = []
    for metric in METRICS:
        ranks = ranked(data, metric)
        if ranks is None:
            continue
        caption = (
            f"Mean ranks by {metric} over {ranks.n_blocks} settings; 1 is best. Bars join defenses "
            f"that are not told apart (Friedman p = {ranks.p:.2g}; pairs: Wilcoxon with Holm's "
            "correction, 0.05)."
        )
        if ranks.dropped:
            caption += f" Left out: {'; '.join(ranks.dropped)}."
        draw = partial(critical_difference, ranks, data.styles)
        drawings.append(Drawing(f"critical_difference_{metric}", caption, draw))
    return drawings


def ranked(data: ReportData, metric: str) -> RankComparison | None:
    """Rank the defenses over the settings; None if there are too few."""
    keys = swept_names(data)
    blocks: dict[str, dict[str, float | None]] = {}
    for setting, rows in by_setting(data, keys).items():
        for row in rows:
            found = data.estimate(row, metric)
            block = blocks.setdefault(title_of(keys, setting), {})
            block[row.defense] = None if found is None else found.mean
    return compare_ranks(blocks, metric in LOWER_IS_BETTER)


@plot_style(PAPER_STYLE)
def critical_difference(ranks: RankComparison, styles: Mapping[str, DefenseStyle]) -> Figure:
    """Draw mean ranks on one axis, with names on both sides."""
    from matplotlib.figure import Figure

    names = short_names(ranks.names, 22)
    n = len(names)
    n_left = math.ceil(n / 2)
    bars = BAR * len(ranks.cliques) + 0.08
    height = TOP + bars + LINE * n_left + 0.06
    side = widest(names.values()) + 0.16
    width = DOUBLE if n > WIDE or side > 0.3 * SINGLE else SINGLE
    figure = Figure((width, height))
    axes = figure.add_axes((side / width, 0, 1 - 2 * side / width, 1 - TOP / height))
    below = height - TOP  # inches; the axis is at 0 and y grows downwards
    axes.set(xlim=(1, n), ylim=(below, 0))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("mean rank")
    step = max(1, math.ceil((n - 1) / 10))
    axes.set_xticks(range(1, n + 1, step))
    axes.set_yticks([])
    _draw_bars(axes, ranks)
    _draw_names(axes, ranks, styles, names, bars)
    return figure


def _draw_bars(axes: Axes, ranks: RankComparison) -> None:
    for i, clique in enumerate(ranks.cliques):
        ends = [ranks.mean_ranks[clique[0]], ranks.mean_ranks[clique[-1]]]
        pad = 0.012 * len(ranks.names)  # equal ranks have a bar as well
        y = 0.08 + BAR * i
        axes.plot(
            [ends[0] - pad, ends[1] + pad],
            [y, y],
            color=BLACK,
            linewidth=2.2,
            solid_capstyle="butt",
            clip_on=False,
        )


def _draw_names(
    axes: Axes,
    ranks: RankComparison,
    styles: Mapping[str, DefenseStyle],
    names: Mapping[str, str],
    start: float,
) -> None:
    """Write the better half on the left and the other on the right, best and worst on top."""
    n, n_left = len(names), math.ceil(len(names) / 2)
    for i, name in enumerate(ranks.names):
        is_left = i < n_left
        line = i if is_left else n - 1 - i
        y = start + LINE * (line + 0.5)
        rank, end = ranks.mean_ranks[name], 1.0 if is_left else float(n)
        style = styles[name]
        thin: dict[str, Any] = {"color": style.color, "linewidth": 0.7, "clip_on": False}
        axes.plot([rank, rank, end], [0, y, y], **thin)
        axes.plot([rank], [0], clip_on=False, zorder=4, **look(style, line=False))
        text = (-5, 0) if is_left else (5, 0)
        axes.annotate(
            names[name],
            (end, y),
            xytext=text,
            textcoords="offset points",
            ha="right" if is_left else "left",
            va="center",
            annotation_clip=False,
        )
