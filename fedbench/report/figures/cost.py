"""Cost: seconds of aggregation and of training per round, by defense."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Margins,
    grid,
    label_x,
    look,
    panel_title,
    plain_numbers,
    short_names,
    widest,
)
from fedbench.report.figures.selection import (
    Drawing,
    by_setting,
    drawn_runs,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData
from fedbench.results.settings import group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SETTINGS = 4
STEPS = {"aggregate": "aggregation (s per round)", "train": "training (s per round)"}
# Settings that hardly change how long a round takes; runs that differ in others are not mixed.
CHEAP = ("attack", "pmr", "pdr", "non_iid", "dirichlet_alpha", "partition", "rounds", "backdoor")
ROW = 0.15  # inches per defense
LOGARITHMIC = 20  # largest over smallest mean from which the axis is logarithmic


def cost_drawings(data: ReportData) -> list[Drawing]:
    keys = costly_keys(data)
    titles = [title_of(keys, setting) for setting in by_setting(data, keys)]
    caption = "Seconds per round: small dots are runs, markers are means over runs."
    return [Drawing("cost", caption + left_out(titles, MAX_SETTINGS), lambda: cost(data))]


def costly_keys(data: ReportData) -> list[str]:
    """Return the swept settings that change the work of a round, such as the data set."""
    return [name for name in swept_names(data) if group_of(name) not in CHEAP]


@plot_style(PAPER_STYLE)
def cost(data: ReportData) -> Figure | None:
    """Draw one row of panels per setting that changes the cost; None without any round."""
    keys = costly_keys(data)
    shown: list[tuple[str, dict[str, dict[str, list[float]]]]] = []
    for setting, rows in by_setting(data, keys).items():
        seconds = {step: seconds_per_round(data, rows, step) for step in STEPS}
        if any(seconds.values()) and len(shown) < MAX_SETTINGS:
            shown.append((title_of(keys, setting), seconds))
    if not shown:
        return None
    used = {name for _, seconds in shown for step in STEPS for name in seconds[step]}
    names = short_names(name for name in data.defenses if name in used)
    left = widest(names.values()) + 0.12
    title = LINE if keys else 0
    margins = Margins(left, bottom=0.36, top=title + 0.05, between=0.16, below=title + 0.3)
    width = SINGLE if left < 1.3 else DOUBLE
    height = ROW * len(names) + 0.06
    figure, panels = grid(2 * len(shown), 2, width, max(height, 0.4), margins)
    for i, axes in enumerate(panels):
        name, seconds = shown[i // 2]
        step = [*STEPS][i % 2]
        _draw_step(axes, data, seconds[step], names)
        axes.tick_params(labelleft=i % 2 == 0)
        if i >= len(panels) - 2:
            label_x(axes, STEPS[step])
        if name and i % 2 == 0:
            panel_title(axes, name, width - left)
    return figure


def seconds_per_round(
    data: ReportData, rows: Sequence[TableRow], step: str
) -> dict[str, list[float]]:
    """Return the seconds of one step per round, by defense, one value per run."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for run in drawn_runs(data, row):
            if step in run.seconds:
                found.setdefault(row.defense, []).append(run.seconds[step] / len(run))
    return found


def _draw_step(
    axes: Axes, data: ReportData, seconds: dict[str, list[float]], names: dict[str, str]
) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    for i, name in enumerate(names):
        if values := seconds.get(name):
            style = data.styles[name]
            dots: dict[str, Any] = {
                "color": style.color,
                "markersize": 2.8,
                "alpha": 0.5,
                "markeredgewidth": 0,
            }
            axes.plot(values, [i] * len(values), ".", **dots)
            axes.plot([fmean(values)], [i], **look(style, line=False))
    means = [fmean(values) for values in seconds.values()]
    if means and min(means) > 0 and max(means) / min(means) > LOGARITHMIC:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    plain_numbers(axes.xaxis)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), [*names.values()])
    axes.grid()
