"""The effect of a swept setting: rates against its values, with every seed and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SLANT,
    Legend,
    Margins,
    defense_handles,
    grid,
    inches,
    is_lowest,
    label_x,
    look,
    name_values,
    names_height,
    panel_title,
    percent_axis,
    plain_numbers,
    short_names,
    shorten,
    widest,
    wrap,
)
from fedbench.report.figures.selection import (
    RATES,
    Drawing,
    Setting,
    by_setting,
    file_name,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData, SweptKey

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SETTINGS, MAX_VALUES = 4, 12  # rows of panels; values without numbers along the x axis
SPREAD, WIDE_SPREAD = 0.25, 0.7  # of the gap between values, over which defenses are spread
LOGARITHMIC = 50  # largest over smallest value from which the axis is logarithmic


@dataclass(frozen=True)
class ValueAxis:
    """Where the values of a setting are on the x axis."""

    key: SweptKey
    places: dict[str, float]  # by label
    is_logarithmic: bool = False

    @staticmethod
    def of(key: SweptKey) -> ValueAxis:
        if not key.is_numeric:
            return ValueAxis(key, {label: float(i) for i, label in enumerate(key.labels)})
        numbers = [float(value) for value in key.values if isinstance(value, int | float)]
        wide = min(numbers) > 0 and max(numbers) / min(numbers) >= LOGARITHMIC
        return ValueAxis(key, dict(zip(key.labels, numbers, strict=True)), wide)

    def shifted(self, label: str, share: float) -> float:
        """Return the place of a value, moved by a share (-0.5 to 0.5) of the spread."""
        where = sorted({self._seen(place) for place in self.places.values()})
        gap = min((b - a for a, b in pairwise(where)), default=1.0)
        spread = SPREAD if self.key.is_numeric else WIDE_SPREAD
        moved = self._seen(self.places[label]) + share * spread * gap
        return math.exp(moved) if self.is_logarithmic else moved

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the axis, the same in all panels."""
        where = [self._seen(place) for place in self.places.values()]
        pad = 0.12 * (max(where) - min(where)) or 0.5
        ends = min(where) - pad, max(where) + pad
        return (math.exp(ends[0]), math.exp(ends[1])) if self.is_logarithmic else ends

    def _seen(self, place: float) -> float:
        return math.log(place) if self.is_logarithmic else place


def effect_drawings(data: ReportData) -> list[Drawing]:
    """Return one figure per swept setting."""
    drawings = []
    for key in data.swept:
        others = swept_names(data, [key.name])
        titles = [title_of(others, setting) for setting in settings_with_effect(data, key)]
        caption = f"Effect of {key.name}: means with 95 % t-intervals; dots are seeds."
        caption += left_out(titles, MAX_SETTINGS)
        if not key.is_numeric:
            caption += left_out([f"{key.name} {label}" for label in key.labels], MAX_VALUES)
        name = file_name("effect_of", key.name)
        drawings.append(Drawing(name, caption, partial(effect, data, key)))
    return drawings


def settings_with_effect(data: ReportData, key: SweptKey) -> dict[Setting, list[TableRow]]:
    """Return the other settings in which the key has several values."""
    groups = by_setting(data, swept_names(data, [key.name]))
    return {
        setting: rows
        for setting, rows in groups.items()
        if len({data.setting(row, key.name) for row in rows}) > 1
    }


@plot_style(PAPER_STYLE)
def effect(data: ReportData, key: SweptKey) -> Figure | None:
    """Draw one row of panels per setting, one panel per rate; None if no run has finished."""
    if not key.is_numeric:
        key = SweptKey(key.name, key.labels[:MAX_VALUES], key.values[:MAX_VALUES])
    others = swept_names(data, [key.name])
    groups = {
        setting: [row for row in rows if row.finished and data.setting(row, key.name) in key.labels]
        for setting, rows in settings_with_effect(data, key).items()
    }
    shown = [(setting, rows) for setting, rows in groups.items() if rows][:MAX_SETTINGS]
    rows = [row for _, group in shown for row in group]
    rates = [rate for rate in RATES if any(data.estimate(row, rate) for row in rows)]
    if not rates:
        return None
    defenses = [name for name in data.defenses if any(row.defense == name for row in rows)]
    legend = Legend(defense_handles(defenses, data.styles, key.is_numeric), DOUBLE)
    n_across = len(rates) if key.is_numeric or len(shown) > 1 else 2  # names need more room
    figure, panels = _page(key, len(shown) * len(rates), n_across, legend, bool(others))
    axis = ValueAxis.of(key)
    for i, axes in enumerate(panels):
        setting, group = shown[i // len(rates)]
        rate = rates[i % len(rates)]
        _draw_rate(axes, data, group, rate, axis, defenses)
        percent_axis(axes, rate)
        _draw_axis(axes, axis, named=is_lowest(i, len(panels), n_across))
        if others and i % len(rates) == 0:
            panel_title(axes, title_of(others, setting), DOUBLE - 0.6)
    legend.draw(figure)
    return figure


def _page(
    key: SweptKey, n: int, n_columns: int, legend: Legend, has_titles: bool
) -> tuple[Figure, list[Axes]]:
    title = LINE + 0.02 if has_titles else 0.0
    between, left, below = 0.44, 0.42, 0.16
    if not key.is_numeric:
        names = [*short_names(key.labels).values()]
        panel = (DOUBLE - left - 0.06 + between) / n_columns - between
        if any(wrap(name, panel / len(names) - 0.03) is None for name in names):
            left = max(left, SLANT * widest(names))  # slanted names reach to the left
            panel = (DOUBLE - left - 0.06 + between) / n_columns - between
        below = names_height(names, panel / len(names) - 0.03)
    margins = Margins(
        left=left,
        bottom=below + 0.2,
        top=legend.height + title + 0.06,
        between=between,
        below=title + 0.1 + (below if n % n_columns else 0),
    )
    return grid(n, n_columns, DOUBLE, 1.25, margins)


def _draw_rate(
    axes: Axes,
    data: ReportData,
    rows: Sequence[TableRow],
    rate: str,
    axis: ValueAxis,
    defenses: Sequence[str],
) -> None:
    for i, name in enumerate(defenses):
        share = (i + 0.4) / len(defenses) - 0.5
        beside = share + 0.35 / len(defenses)  # dots on the interval would not be seen
        style = data.styles[name]
        points, dots = [], []
        for row in (row for row in rows if row.defense == name):
            found = data.estimate(row, rate)
            if found is None:
                continue
            label = data.setting(row, axis.key.name)
            x, x_dots = axis.shifted(label, share), axis.shifted(label, beside)
            dots += [(x_dots, 100 * value) for value in found.values.values()]
            low, high = (end if end is not None else found.mean for end in (found.low, found.high))
            points.append((x, 100 * found.mean, 100 * low, 100 * high))
        if points:
            axes.plot(*zip(*dots, strict=True), ".", color=style.color, ms=2.6, mew=0, alpha=0.55)
            xs, means, lows, highs = zip(*sorted(points), strict=True)
            axes.vlines(xs, lows, highs, color=style.color, linewidth=0.7)
            axes.plot(xs, means, **look(style, axis.key.is_numeric))


def _draw_axis(axes: Axes, axis: ValueAxis, named: bool) -> None:
    below = 0.2
    places = [*axis.places.values()]
    if axis.key.is_numeric:
        if axis.is_logarithmic:
            axes.set_xscale("log")
        axes.set_xlim(*axis.limits)
        if len(places) <= 6:
            axes.set_xticks(places)
        plain_numbers(axes.xaxis)
    else:
        names = [*short_names(axis.key.labels).values()]
        axes.set_xlim(-0.5, len(places) - 0.5)
        room = inches(axes)[0] / len(names) - 0.03
        name_values(axes, places, names, room)
        below = names_height(names, room) + 0.04
        boundaries: Any = [place + 0.5 for place in places[:-1]]
        axes.vlines(boundaries, -4, 104, color="#e4e4e4", linewidth=0.5)
    axes.tick_params(labelbottom=named)
    if named:
        label_x(axes, shorten(axis.key.name), below)
