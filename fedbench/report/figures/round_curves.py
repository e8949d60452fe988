"""MA, BA, TPR and TNR over the rounds: means as lines, the range over seeds as a band."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    Legend,
    Margins,
    defense_handles,
    grid,
    label_x,
    look,
    percent_axis,
)
from fedbench.report.figures.selection import (
    RATES,
    Drawing,
    by_setting,
    drawn_runs,
    file_name,
    is_number,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SETTINGS = 6  # figures
MARKERS = 6  # markers along a line
ATTACKED = "#f1f1f1"

Curve = list[tuple[int, float, float, float]]  # round; mean, lowest and highest in percent


def round_drawings(data: ReportData) -> list[Drawing]:
    """Return one figure per setting, for the first settings."""
    keys = swept_names(data)
    groups = by_setting(data, keys)
    titles = [title_of(keys, setting) for setting in groups]
    drawings = []
    for title, rows in [*zip(titles, groups.values(), strict=True)][:MAX_SETTINGS]:
        caption = f"{title + ': ' if title else ''}rates after each round. Lines are means over "
        caption += "seeds, bands reach from the lowest to the highest seed."
        caption += left_out(titles, MAX_SETTINGS)
        name = file_name("rounds", title)
        drawings.append(Drawing(name, caption, partial(round_curves, data, rows)))
    return drawings


@plot_style(PAPER_STYLE)
def round_curves(data: ReportData, rows: Sequence[TableRow]) -> Figure | None:
    """Draw the rows of one setting, one panel per rate; None without any round."""
    runs = {row.defense: drawn_runs(data, row) for row in rows}
    runs = {defense: found for defense, found in runs.items() if found}
    curves = {
        rate: {name: curve for name, found in runs.items() if (curve := mean_curve(found, rate))}
        for rate in RATES
    }
    shown = [rate for rate in RATES if curves[rate]]
    if not shown:
        return None
    attacked = attacked_rounds([rounds for found in runs.values() for rounds in found])
    handles = defense_handles(runs, data.styles)
    legend = Legend([*handles, *([_attacked_handle()] if attacked else [])], DOUBLE)
    margins = Margins(left=0.42, bottom=0.36, top=legend.height + 0.06, between=0.44)
    figure, panels = grid(len(shown), len(shown), DOUBLE, 1.35, margins)
    for axes, rate in zip(panels, shown, strict=True):
        for first, last in attacked:
            axes.axvspan(first - 0.5, last + 0.5, color=ATTACKED, linewidth=0, zorder=0)
        _draw_lines(axes, data, curves[rate])
        percent_axis(axes, rate)
        label_x(axes, "round")
        _round_axis(axes, max(rounds.index[-1] for found in runs.values() for rounds in found))
    legend.draw(figure)
    return figure


def mean_curve(runs: Sequence[RunRounds], rate: str) -> Curve:
    """Return mean and range over the runs for each round in which any was measured, in percent."""
    values: dict[int, list[float]] = {}
    for rounds in runs:
        for index, value in zip(rounds.index, rounds.rates[rate], strict=True):
            if value is not None and is_number(value):
                values.setdefault(index, []).append(100 * value)
    return [(i, fmean(v), min(v), max(v)) for i, v in sorted(values.items())]


def attacked_rounds(runs: Sequence[RunRounds]) -> list[tuple[int, int]]:
    """Return first and last of each stretch of rounds that were attacked in any run."""
    found = {
        i for run in runs for i, attacked in zip(run.index, run.attacked, strict=True) if attacked
    }
    firsts = [i for i in sorted(found) if i - 1 not in found]
    lasts = [i for i in sorted(found) if i + 1 not in found]
    return [*zip(firsts, lasts, strict=True)]


def _draw_lines(axes: Axes, data: ReportData, curves: dict[str, Curve]) -> None:
    alpha = 0.16 if len(curves) <= 8 else 0.08
    for i, (name, curve) in enumerate(curves.items()):
        index, mean, low, high = zip(*curve, strict=True)
        style = data.styles[name]
        if low != high:
            axes.fill_between(index, low, high, color=style.color, alpha=alpha, linewidth=0)
        step = max(1, len(curve) // MARKERS)
        markers: dict[str, Any] = {"markevery": (i % step, step)}  # apart from each other
        axes.plot(index, mean, **look(style), **markers)


def _round_axis(axes: Axes, last: int) -> None:
    from matplotlib.ticker import MaxNLocator

    pad = max(0.5, 0.02 * last)
    axes.set_xlim(-pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _attacked_handle() -> Any:
    from matplotlib.patches import Patch

    return Patch(color=ATTACKED, label="attacked rounds")
