"""BA against MA: every seed a dot, means as markers, and the Pareto front of the means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Legend,
    Margins,
    balanced,
    defense_handles,
    grid,
    is_lowest,
    label_x,
    look,
    panel_title,
    percent_axis,
    plain_numbers,
)
from fedbench.report.figures.selection import (
    Drawing,
    by_setting,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import GRAY, PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 8
RINGS: dict[str, Any] = {  # around the means on the Pareto front
    **{"color": GRAY, "linewidth": 0.8},
    **{"marker": "o", "markerfacecolor": "none", "markeredgewidth": 0.6},
}
Point = tuple[float, float]  # MA and BA in percent


def ba_ma_drawings(data: ReportData) -> list[Drawing]:
    keys = swept_names(data)
    titles = [title_of(keys, setting) for setting in by_setting(data, keys)]
    caption = (
        "BA against MA; lower right is better. Small dots are seeds, markers are means. The line "
        "is the Pareto front: no other defense has a lower mean BA and a higher mean MA."
    )
    caption += left_out(titles, MAX_PANELS)
    return [Drawing("ba_ma", caption, lambda: ba_ma(data))]


@plot_style(PAPER_STYLE)
def ba_ma(data: ReportData) -> Figure | None:
    """Draw one panel per setting; None if no finished run has BA and MA."""
    keys = swept_names(data)
    groups = {
        title_of(keys, setting): rows
        for setting, rows in by_setting(data, keys).items()
        if any(means(data, rows))
    }
    shown = [*groups.items()][:MAX_PANELS]
    if not shown:
        return None
    width = SINGLE if len(shown) == 1 else DOUBLE
    n_across = balanced(len(shown), 4)
    drawn = {name for _, rows in shown for name in means(data, rows)}
    handles = defense_handles([d for d in data.defenses if d in drawn], data.styles, line=False)
    legend = Legend([*handles, _front_handle()], width)
    title = LINE if keys else 0
    margins = Margins(
        left=0.44,
        bottom=0.36,
        top=legend.height + title + 0.05,
        right=0.14,
        between=0.3,
        below=0.22 + title + (0.18 if len(shown) % n_across else 0),
    )
    height = 2.0 if len(shown) == 1 else 1.35
    figure, panels = grid(len(shown), n_across, width, height, margins)
    for i, (axes, (name, rows)) in enumerate(zip(panels, shown, strict=True)):
        _draw_panel(axes, data, rows)
        percent_axis(axes, "BA" if i % n_across == 0 else "", labels=i % n_across == 0)
        if is_lowest(i, len(shown), n_across):
            label_x(axes, "MA (%)")
        if name:
            panel_title(axes, name)
    legend.draw(figure)
    return figure


def means(data: ReportData, rows: Sequence[TableRow]) -> dict[str, Point]:
    """Return mean MA and BA of each defense that has both, in percent."""
    found = {}
    for row in rows:
        ba, ma = data.estimate(row, "BA"), data.estimate(row, "MA")
        if ba is not None and ma is not None:
            found[row.defense] = (100 * ma.mean, 100 * ba.mean)
    return found


def pareto_front(points: Mapping[str, Point]) -> list[Point]:
    """Return the points that no other one beats in MA and BA, from the lowest MA up."""
    front = [
        (ma, ba)
        for ma, ba in points.values()
        if not any(
            other != (ma, ba) and other[0] >= ma and other[1] <= ba for other in points.values()
        )
    ]
    return sorted(set(front))


def _draw_panel(axes: Axes, data: ReportData, rows: Sequence[TableRow]) -> None:
    from matplotlib.ticker import MaxNLocator

    points = means(data, rows)
    front = pareto_front(points)
    axes.step(*zip(*front, strict=True), where="post", markersize=9, zorder=2, **RINGS)
    values = [ma for ma, _ in points.values()]
    for row in rows:
        if row.defense not in points:
            continue
        style = data.styles[row.defense]
        seeds = [(run.metrics.get("MA"), run.metrics.get("BA")) for run in row.finished]
        dots = [(100 * ma, 100 * ba) for ma, ba in seeds if ma is not None and ba is not None]
        values += [ma for ma, _ in dots]
        xs, ys = [ma for ma, _ in dots], [ba for _, ba in dots]
        axes.plot(xs, ys, ".", color=style.color, markersize=3.5, alpha=0.6, mew=0, zorder=3)
        mean = points[row.defense]
        bigger = {**look(style, line=False), "markersize": 5.2}
        axes.plot(*[[value] for value in mean], zorder=4, **bigger)
    pad = max(0.5, 0.06 * (max(values) - min(values)))
    axes.set_xlim(max(min(values) - pad, -4), min(max(values) + pad, 104))
    axes.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
    plain_numbers(axes.xaxis)
    axes.grid(axis="x")


def _front_handle() -> Artist:
    from matplotlib.lines import Line2D

    return Line2D([], [], markersize=6, label="Pareto front", **RINGS)
