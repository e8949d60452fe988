"""Layout of figures for papers, in inches: text is measured first, then panels are placed.

matplotlib's own layout engines solve the layout anew for every file, which takes most of the time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fedbench.report.defense_styles import DefenseStyle
from fedbench.report.plotting import SANS, printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE, DOUBLE = 3.5, 7.16  # inches: one column of a paper, and both
TICK, LABEL = 7.0, 7.5  # points: numbers and names; labels of axes and panels
LINE = 0.135  # inches: height of a line of text with its gap
EDGE = 0.04  # inches between the outermost text and the edge of the page
HANDLE, COLUMN_GAP = 0.27, 0.14  # inches: sample of a legend's entry; between entries
SLANT = math.sqrt(0.5)  # height of slanted text over its width
MAX_NAME = 26  # characters of a defense or a value


@dataclass(frozen=True)
class Margins:
    """Inches around the panels and between them."""

    left: float
    bottom: float
    top: float
    right: float = 0.06
    between: float = 0.1  # columns
    below: float = 0.0  # between rows


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = TICK) -> float:
    """Width of a line of text, in inches."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(SANS))
    font.set_size(100, 72)  # large: widths of small letters are rounded to whole pixels
    font.set_text(text, 0.0)
    return float(font.get_width_height()[0]) / 64 / 72 * size / 100


def widest(texts: Iterable[str], size: float = TICK) -> float:
    return max((text_width(text, size) for text in texts), default=0.0)


def shorten(text: str, limit: int = MAX_NAME) -> str:
    """Cut text in the middle: values at the end tell `krum m=5` from `krum m=6`."""
    text = printable(text)
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}"


def short_names(names: Iterable[str], limit: int = MAX_NAME) -> dict[str, str]:
    """Shorten names; those that would look the same get a number."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        short, number = shorten(name, limit), 1
        while short in found.values():
            number += 1
            short = f"{shorten(name, limit - 3)} {number}"
        found[name] = short
    return found


def fit(text: str, width: float, size: float = LABEL) -> str:
    """Shorten text until it is at most `width` inches wide."""
    text = printable(text)
    if text_width(text, size) <= width:
        return text
    most = max(3, int(len(text) * width / text_width(text, size)))
    return next(
        (cut for n in range(most, 3, -1) if text_width(cut := shorten(text, n), size) <= width),
        shorten(text, 3),
    )


def wrap(text: str, width: float, size: float = TICK) -> str | None:
    """Break text after spaces and underscores into at most three lines; None if it does not fit."""
    lines = [""]
    for word in re.findall(r"[^ _]*[ _]?", text)[:-1]:
        if lines[-1] and text_width((lines[-1] + word).rstrip(), size) > width:
            lines.append(word)
        else:
            lines[-1] += word
    lines = [line.rstrip() for line in lines]
    fits = len(lines) <= 3 and widest(lines, size) <= width
    return "\n".join(lines) if fits else None


def name_values(axes: Axes, places: Sequence[float], names: Sequence[str], width: float) -> None:
    """Write names below the x axis, each at most `width` inches wide, or else slanted."""
    wrapped = [wrap(name, width) for name in names]
    if None in wrapped:
        axes.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(places, [text or "" for text in wrapped])


def names_height(names: Sequence[str], width: float) -> float:
    """Inches that `name_values` needs below the axis."""
    wrapped = [wrap(name, width) for name in names]
    if None in wrapped:
        return SLANT * widest(names) + 0.14
    return 0.06 + LINE * max(1 + (text or "").count("\n") for text in wrapped)


def grid(
    n: int, n_columns: int, width: float, panel_height: float, margins: Margins
) -> tuple[Figure, list[Axes]]:
    """Return a page with n panels, row by row; the last row may be shorter."""
    panel = (width - margins.left - margins.right + margins.between) / n_columns - margins.between
    return fixed_grid(n, n_columns, width, (panel, panel_height), margins)


def fixed_grid(
    n: int, n_columns: int, width: float, panel: tuple[float, float], margins: Margins
) -> tuple[Figure, list[Axes]]:
    """Return a page with n panels of a given width and height."""
    from matplotlib.figure import Figure

    n_rows = math.ceil(n / n_columns)
    rows = n_rows * panel[1] + (n_rows - 1) * margins.below
    height = margins.bottom + rows + margins.top
    figure, axes = Figure((width, height)), []
    for i in range(n):
        row, column = divmod(i, n_columns)
        left = margins.left + column * (panel[0] + margins.between)
        low = margins.bottom + (n_rows - 1 - row) * (panel[1] + margins.below)
        box = (left / width, low / height, panel[0] / width, panel[1] / height)
        axes.append(figure.add_axes(box))
    return figure, axes


def balanced(n: int, most: int) -> int:
    """Return how many of n panels stand side by side: rows are of about the same length."""
    return math.ceil(n / math.ceil(n / most))


def is_lowest(i: int, n: int, n_columns: int) -> bool:
    """Whether no panel is below panel i."""
    return i + n_columns >= n


def inches(axes: Axes) -> tuple[float, float]:
    """Width and height of a panel."""
    figure: Any = axes.figure
    width, height = figure.get_size_inches()
    box = axes.get_position()
    return box.width * width, box.height * height


@dataclass(frozen=True)
class Legend:
    """One legend for all panels, in rows at the top of the page."""

    handles: Sequence[Artist]  # their labels are short and printable
    width: float  # of the page

    @property
    def n_columns(self) -> int:
        entries = [text_width(str(handle.get_label())) + HANDLE for handle in self.handles]

        def fits(n: int) -> bool:
            return sum(max(entries[i::n]) + COLUMN_GAP for i in range(n)) <= self.width

        most = next((n for n in range(len(entries), 1, -1) if fits(n)), 1)
        n_rows = math.ceil(len(entries) / most)
        fewer = math.ceil(len(entries) / n_rows)  # rows of about the same length
        return fewer if fits(fewer) else most

    @property
    def height(self) -> float:
        """Inches that the legend takes, with a gap below."""
        if not self.handles:
            return 0.0
        return math.ceil(len(self.handles) / self.n_columns) * LINE + 0.04

    def draw(self, figure: Figure) -> None:
        if not self.handles:
            return
        # matplotlib fills columns first; readers go along rows.
        n = self.n_columns
        handles = [handle for i in range(n) for handle in self.handles[i::n]]
        figure.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 1 - 0.02 / figure.get_size_inches()[1]),
            ncols=n,
            borderaxespad=0,
            borderpad=0,
            labelspacing=(LINE - 0.115) * 72 / TICK,
            columnspacing=COLUMN_GAP * 72 / TICK,
        )


def defense_handles(
    names: Iterable[str], styles: Mapping[str, DefenseStyle], line: bool = True
) -> list[Artist]:
    """Return the legend's entries of defenses: marker, and line if the figure has lines."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], label=short, **look(styles[name], line))
        for name, short in short_names(names).items()
    ]


def look(style: DefenseStyle, line: bool = True) -> dict[str, Any]:
    """Return the look of a defense as arguments of `plot`."""
    is_open = style.symbol.endswith("-open")
    return {
        "color": style.color,
        "marker": style.marker,
        "linestyle": style.line if line else "none",
        "markerfacecolor": "white" if is_open else style.color,
        "markeredgecolor": style.color if is_open else "white",
        "markeredgewidth": 0.9 if is_open else 0.3,
        "markersize": 4.5 if style.marker in "*PX" else 3.8,
    }


# Labels and titles have fixed places. matplotlib would measure all numbers of an axis to find them,
# for every file, which takes a third of the time.
def label_x(axes: Axes, text: str, below: float = 0.2) -> None:
    """Write the label of the x axis `below` inches under it."""
    axes.set_xlabel(text, va="top")
    axes.xaxis.set_label_coords(0.5, -below / inches(axes)[1])


def label_y(axes: Axes, text: str, left: float = 0.1) -> None:
    """Write the label of the y axis `left` inches beside it."""
    axes.set_ylabel(text, va="bottom")
    axes.yaxis.set_label_coords(-left / inches(axes)[0], 0.5)


def percent_axis(axes: Axes, label: str, labels: bool = True) -> None:
    """Give the y axis the range 0 to 100 %."""
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y")
    if label:
        label_y(axes, f"{label} (%)", 0.29)
    if not labels:
        axes.tick_params(labelleft=False)


def plain_numbers(axis: Any) -> None:
    """Write numbers without powers of ten, which need mathematical text: 0.001, not 10^-3."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axis.set_minor_locator(NullLocator())


def plain_number(value: float) -> str:
    """Format a number in about six characters."""
    return f"{value:g}" if value == 0 or 1e-4 <= abs(value) < 1e5 else f"{value:.2g}"


def panel_title(axes: Axes, text: str, width: float | None = None) -> None:
    """Name what a panel shows, at most as wide as the panel."""
    size = width if width is not None else inches(axes)[0] + 0.05
    axes.set_title(fit(text, size), loc="left", y=1.0, pad=5)
