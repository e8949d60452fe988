"""Heat maps: defenses by attacks, or any two settings, with the mean over seeds in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fedbench.errors import UserError
from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    EDGE,
    LABEL,
    LINE,
    SINGLE,
    SLANT,
    Margins,
    balanced,
    fit,
    fixed_grid,
    inches,
    is_lowest,
    name_values,
    names_height,
    short_names,
    text_width,
    widest,
)
from fedbench.report.figures.selection import (
    RATES,
    Drawing,
    Setting,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import BLACK, GRAY, PAPER_STYLE, plot_style
from fedbench.report.report_data import LOWER_IS_BETTER, ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy import ndarray

MAX_PANELS, MAX_ROWS, MAX_COLUMNS = 12, 40, 20
CELL_HEIGHT, NARROWEST, WIDEST = 0.18, 0.23, 0.8  # inches
GAP, RIGHT = 0.12, 0.06  # inches between panels, and right of them
# From 0 to 100 %, evenly spaced in lightness: blue is good, orange is bad where it is dark.
GOOD = "#eef4fb", "#5089c0", "#0a2a5c"
BAD = "#fdf1e7", "#d9773a", "#5c1d04"
EMPTY = "#f2f2f2"
DARK = 55  # percent above which numbers are white


@dataclass(frozen=True)
class HeatTable:
    """The cells of one panel."""

    metric: str
    setting: Setting  # of the settings that are neither rows nor columns
    means: ndarray  # [rows, columns] in percent; NaN where not measured


@dataclass(frozen=True)
class Crossing:
    """Which settings are the rows and columns of heat maps, and which tell panels apart."""

    data: ReportData
    by: tuple[str, str]

    def labels(self, key: str) -> list[str]:
        """Return the values of a row or column, in order of the table."""
        if key == "defense":
            return self.data.defenses
        return list(dict.fromkeys(sorted_labels(self.data, key)))

    def label(self, row: TableRow, key: str) -> str:
        return row.defense if key == "defense" else self.data.setting(row, key)

    @property
    def others(self) -> list[str]:
        """Return what else differs between rows."""
        names = swept_names(self.data, self.by)
        return names if "defense" in self.by or len(self.data.defenses) < 2 else ["defense", *names]

    def settings(self) -> dict[Setting, list[TableRow]]:
        groups: dict[Setting, list[TableRow]] = {}
        for row in self.data.rows:
            setting = tuple(self.label(row, key) for key in self.others)
            groups.setdefault(setting, []).append(row)
        return groups


def sorted_labels(data: ReportData, key: str) -> list[str]:
    found = next((swept.labels for swept in data.swept if swept.name == key), None)
    return found if found is not None else [data.setting(row, key) for row in data.rows]


def crossing(data: ReportData, by: tuple[str, str] | None = None) -> Crossing | None:
    """Choose rows and columns; None if only the defense differs between runs."""
    if by is None:
        names = swept_names(data)
        if not names:
            return None
        return Crossing(data, ("defense", "attack" if "attack" in names else names[0]))
    known = ["defense", *data.comparison.keys]
    for key in by:
        if key not in known:
            raise UserError(f"no setting {key!r} differs between the runs, only {', '.join(known)}")
    return Crossing(data, by)


def heatmap_drawings(data: ReportData, by: tuple[str, str] | None = None) -> list[Drawing]:
    """Return one figure per metric, and one of all metrics if one setting is left."""
    cross = crossing(data, by)
    if cross is None:
        return []
    titles = [title_of(cross.others, setting) for setting in cross.settings()]
    caption = f"{cross.by[0]} by {cross.by[1]}: mean over seeds, in %; a dash is not measured."
    caption += left_out(titles, MAX_PANELS)
    for key, limit in zip(cross.by, (MAX_ROWS, MAX_COLUMNS), strict=True):
        caption += left_out([f"{key} {label}" for label in cross.labels(key)], limit)
    drawings = []
    if len(titles) == 1:
        drawings.append(Drawing("heatmap", caption, partial(heatmap, data, RATES, by)))
    for metric in RATES:
        draw = partial(heatmap, data, (metric,), by)
        drawings.append(Drawing(f"heatmap_{metric}", f"{metric}, {caption}", draw))
    return drawings


@plot_style(PAPER_STYLE)
def heatmap(
    data: ReportData, metrics: Sequence[str] = RATES, by: tuple[str, str] | None = None
) -> Figure | None:
    """Draw one panel per metric and setting; None if there is nothing to compare or measured."""
    cross = crossing(data, by)
    if cross is None:
        return None
    rows = short_names(cross.labels(cross.by[0])[:MAX_ROWS])
    columns = short_names(cross.labels(cross.by[1])[:MAX_COLUMNS])
    tables = heat_tables(cross, metrics, [*rows], [*columns])
    if not tables:
        return None
    several = len(metrics) == 1 and bool(cross.others)  # panels differ in their setting
    names = [*rows.values()], [*columns.values()]
    figure, panels, n_across = _page(len(tables), *names, several)
    for i, (axes, table) in enumerate(zip(panels, tables, strict=True)):
        _draw_cells(axes, table)
        _name_cells(axes, *names, i % n_across == 0, is_lowest(i, len(tables), n_across))
        title = title_of(cross.others, table.setting) if several else f"{table.metric} (%)"
        axes.set_title(fit(title, inches(axes)[0] + 0.8 * GAP), y=1.0)
    if several:
        top = 1 - EDGE / figure.get_size_inches()[1]
        figure.text(0.01, top, f"{metrics[0]} (%)", va="top", size=LABEL)
    return figure


def heat_tables(
    cross: Crossing, metrics: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> list[HeatTable]:
    """Return the panels that have a value, at most MAX_PANELS."""
    import numpy as np

    found = []
    for setting, group in cross.settings().items():
        for metric in metrics:
            means = np.full((len(rows), len(columns)), np.nan)
            for row in group:
                place = cross.label(row, cross.by[0]), cross.label(row, cross.by[1])
                estimate = cross.data.estimate(row, metric)
                if estimate is not None and place[0] in rows and place[1] in columns:
                    means[rows.index(place[0]), columns.index(place[1])] = 100 * estimate.mean
            if not np.isnan(means).all():
                found.append(HeatTable(metric, setting, means))
    return found[:MAX_PANELS]


def _page(
    n: int, rows: Sequence[str], columns: Sequence[str], has_label: bool
) -> tuple[Figure, list[Axes], int]:
    """Return the page, its panels, and the number of panels side by side."""
    left = max(widest(rows) + 0.12, SLANT * widest(columns) - NARROWEST / 2)

    def across(width: float) -> int:
        return max(1, min(n, int((width - left + GAP) / (len(columns) * NARROWEST + GAP))))

    width = SINGLE if across(SINGLE) == n else DOUBLE
    n_across = balanced(n, across(width))
    room = (width - left - RIGHT - (n_across - 1) * GAP) / n_across
    cell = min(room / len(columns), WIDEST)
    width = left + n_across * (cell * len(columns) + GAP) - GAP + RIGHT
    names = names_height(columns, cell - 0.04)
    shorter = n % n_across > 0  # the last row of panels: names of columns are above it as well
    margins = Margins(
        left=left,
        bottom=names,
        top=(2 if has_label else 1) * LINE + 0.05,
        right=RIGHT,
        between=GAP,
        below=LINE + 0.06 + (names if shorter else 0),
    )
    panel = cell * len(columns), CELL_HEIGHT * len(rows)
    return *fixed_grid(n, n_across, width, panel, margins), n_across


def _draw_cells(axes: Axes, table: HeatTable) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    shades = BAD if table.metric in LOWER_IS_BETTER else GOOD
    colors = LinearSegmentedColormap.from_list("rates", shades).with_extremes(bad=EMPTY)
    n_rows, n_columns = table.means.shape
    masked = np.ma.masked_invalid(table.means)
    axes.pcolormesh(masked, cmap=colors, vmin=0, vmax=100, edgecolors="white", linewidth=0.8)
    axes.set(xlim=(0, n_columns), ylim=(n_rows, 0))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    decimals, size = number_format(inches(axes)[0] / n_columns)
    for (row, column), value in np.ndenumerate(table.means):
        text = "–" if np.isnan(value) else f"{value:.{decimals}f}"
        color = GRAY if np.isnan(value) else "white" if value > DARK else BLACK
        place = column + 0.5, row + 0.5
        axes.text(*place, text, size=size, color=color, ha="center", va="center_baseline")


def number_format(width: float) -> tuple[int, float]:
    """Return decimals and font size with which 100 % fits into a cell."""
    for decimals, least in ((1, 5.5), (0, 4.0)):
        size = min(6.5, 6.5 * (width - 0.04) / text_width(f"{100:.{decimals}f}", 6.5))
        if size >= least:
            break
    return decimals, size


def _name_cells(
    axes: Axes, rows: Sequence[str], columns: Sequence[str], is_first: bool, is_lowest: bool
) -> None:
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    places = [i + 0.5 for i in range(len(columns))]
    name_values(axes, places, columns, inches(axes)[0] / len(columns) - 0.04)
    axes.tick_params(labelleft=is_first, labelbottom=is_lowest)
