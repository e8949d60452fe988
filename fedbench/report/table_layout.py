"""TableLayout: how a table fits the width of a terminal without breaking a word or a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from rich import box
from rich.cells import cell_len
from rich.console import Group, JustifyMethod, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedbench.report.comparison import Comparison, TableRow

CAPTION_WIDTH = 50  # a caption is at least as wide, even below a narrow table
MOST_KEYS = 8  # up to as many settings, all ways to divide them are tried
LABELS = ("defense", "attack", "dataset", "model")  # their cells are words and may wrap


@dataclass(frozen=True)
class TableLayout:
    """Where the settings and metrics of a comparison go."""

    compared: Comparison
    widths: Mapping[str, int]  # of every column, named or not
    metrics: list[str]  # those with a column
    headed: tuple[str, ...] = ()  # settings in a line above each section, without a column
    with_defense: bool = True  # otherwise the caption names the only defense

    @property
    def settings(self) -> list[str]:
        """The settings with a column, besides the defense."""
        return [key for key in self.compared.keys if key not in self.headed]

    @property
    def names(self) -> list[str]:
        """The columns before the metrics."""
        return self.settings + ["defense"] * self.with_defense

    @property
    def width(self) -> int:
        """The width of the table: two spaces between columns, one at either edge."""
        return sum(self.widths[name] + 2 for name in (*self.names, *self.metrics))

    def sections(self) -> dict[str, list[TableRow]]:
        """Return the rows by their heading, in order of appearance."""
        found: dict[str, list[TableRow]] = {}
        for row in self.compared.rows:
            heading = ", ".join(f"{key} {self.value(row, key)}" for key in self.headed)
            found.setdefault(heading, []).append(row)
        return found

    def value(self, row: TableRow, key: str) -> str:
        return row.setting[self.compared.keys.index(key)]


def fit(compared: Comparison, width: int) -> TableLayout:
    """Return the most readable layout that fits; if none does, the narrowest, to be folded."""
    narrowest = None
    for layout in _layouts(compared):
        if layout.width <= width:
            return layout
        if narrowest is None or layout.width <= narrowest.width:
            narrowest = layout
    assert narrowest is not None
    return narrowest


def _layouts(compared: Comparison) -> Iterator[TableLayout]:
    """Yield all layouts, the most readable first. To leave out a metric is the last resort."""
    keys, rows = compared.keys, compared.rows
    lines = [[*row.setting, row.defense, *row.cells(compared.headings)] for row in rows]
    names = [*keys, "defense", *compared.headings]
    cells = dict(zip(names, zip(*lines, strict=True), strict=True))
    widths = {name: _width(name, texts) for name, texts in cells.items()}
    # Long labels may take several lines.
    wrapped = {key: _width(key, " ".join(cells[key]).split()) for key in LABELS if key in cells}
    few = len(keys) <= MOST_KEYS
    sizes = range(len(keys) + 1)
    subsets = [c for n in sizes for c in (combinations(keys, n) if few else [tuple(keys[:n])])]
    places = [(headed, True) for headed in subsets]
    if keys and len({*cells["defense"]}) == 1:  # then the caption can name it
        places = [places[0], *((headed, False) for headed in subsets[:-1]), places[-1]]
    for metrics in _metrics(compared, cells.get("seeds", ())):
        for chosen in (widths, widths | wrapped):
            for headed, with_defense in places:
                yield TableLayout(compared, chosen, metrics, headed, with_defense)


def _width(name: str, texts: Sequence[str]) -> int:
    return max(map(cell_len, [name, *texts]))


def _metrics(compared: Comparison, seeds: Sequence[str]) -> Iterator[list[str]]:
    """Yield all metrics; without `seeds` if the caption says the same; then fewer and fewer."""
    yield compared.headings
    metrics = [name for name in compared.headings if name != "seeds"]
    kept = [] if {*seeds} <= {str(len(compared.seeds))} else ["seeds"]
    for n in range(len(metrics), 0, -1):
        yield metrics[:n] + kept


def render(layout: TableLayout, width: int) -> RenderableType:
    """Return the table with its caption, for a terminal of this width."""
    compared = layout.compared
    parts: list[RenderableType] = []
    if not layout.headed:
        parts.append(_table(layout, compared.rows, width))
    else:
        parts += ["", _inset(_table(layout, [], width))]
        for heading, rows in layout.sections().items():
            parts += [_inset(Text(heading, "bold")), _inset(_table(layout, rows, width)), ""]
    lines = [
        compared.caption(layout.metrics, "" if layout.with_defense else compared.rows[0].defense)
    ]
    hidden = [name for name in compared.headings if name not in (*layout.metrics, "seeds")]
    if hidden:
        command = f"python -m fedbench.report --columns {','.join(hidden)}"
        lines.append(f"No space for {', '.join(hidden)}; see {command}")
    words = " ".join(lines).split()
    narrow = min(width, max([layout.width, CAPTION_WIDTH, *map(cell_len, words)]))
    parts += [Constrain(Text(line, "table.caption"), narrow) for line in lines]
    return Group(*parts)


def _inset(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 1), expand=False)


def _table(layout: TableLayout, rows: Sequence[TableRow], width: int) -> Table:
    """Return rows as a table; only the first row of a setting names it.

    The headings of a table with sections are a table of their own, without rows.
    """
    whole = not layout.headed
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=whole)
    table.show_header = whole or not rows
    folded = whole and layout.width > width  # then cells wrap instead of being cut off
    for name in (*layout.names, *layout.metrics):
        side: JustifyMethod = "left" if name in layout.names else "right"
        fixed = None if folded else layout.widths[name]
        table.add_column(Text(name), overflow="fold", justify=side, width=fixed)
    settings = [list(group) for _, group in groupby(rows, lambda row: row.setting)]
    for same in settings:
        if len(settings) < len(rows):  # otherwise each row would be a section
            table.add_section()
        for i, row in enumerate(same):
            named = ["" if i else layout.value(row, key) for key in layout.settings]
            line = [*named, *[row.defense] * layout.with_defense, *row.cells(layout.metrics)]
            table.add_row(*map(Text, line), style="" if row.finished else "yellow")
    return table
