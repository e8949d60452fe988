"""The table for a paper in LaTeX, with booktabs and siunitx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedbench.report.latex_caption import AT_LEAST, caption, footnotes, label, marks_of
from fedbench.report.latex_text import comment, escape
from fedbench.report.pivot_table import (
    PAPER_METRICS,
    PivotCell,
    PivotTable,
    direction,
    half_width,
    number,
    pivot,
)
from fedbench.report.report_data import ReportData
from fedbench.report.statistics import Estimate

# Lengths are in pt, for \small. IEEE and ACM: text is 505 to 516 wide, one of two columns 240.
TEXT_WIDTH = 490
COLUMN_WIDTH = 240
CHARACTER, DIGIT, NOTE_CHARACTER, PLUS_MINUS, GAP = 4.8, 4.4, 3.4, 10.5, 6.0
AT_LEAST_DIGITS = 2  # width of the sign and its space, in digits
MAX_NAME = 32  # characters; longer names of rows wrap
MAX_LINES = 45  # of a table on one page
MAX_MISSING = 20  # missing runs that the comment names
ARROWS = {1: r"\,$\uparrow$", -1: r"\,$\downarrow$", 0: ""}
DOCUMENT = r"""\documentclass{{article}}
\usepackage[a4paper,margin=15mm]{{geometry}}
\usepackage{{booktabs,siunitx}}
\setlength{{\belowcaptionskip}}{{6pt}}
\makeatletter\setlength{{\@fptop}}{{0pt}}\makeatother
\begin{{document}}
{table}\end{{document}}
"""


@dataclass(frozen=True)
class ValueColumn:
    """A metric below a heading: mean, half-width and notes, each in a column of the tabular."""

    heading: str
    metric: str
    with_interval: bool
    notes: int  # characters of the longest note, 0 without notes
    digits: int  # of the longest mean and half-width

    @property
    def span(self) -> int:
        return 1 + self.with_interval + bool(self.notes)

    @property
    def spec(self) -> str:
        return "r" + r"@{\,$\pm$\,}r" * self.with_interval + "@{}l" * bool(self.notes)

    @property
    def width(self) -> float:
        signs = PLUS_MINUS if self.with_interval else 0.0
        return max(
            self.digits * DIGIT + signs + self.notes * NOTE_CHARACTER + GAP,
            (len(self.metric) + 2) * CHARACTER + GAP,
        )

    def cells(self, cell: PivotCell | None, n_seeds: int) -> list[str]:
        """Return the LaTeX of mean, half-width and notes; a dash if there is no value."""
        estimate = cell.estimates[self.metric] if cell else None
        if cell is None or estimate is None:
            return [rf"\multicolumn{{{self.span}}}{{c}}{{--}}"]
        mean = rf"\num{{{number(self.metric, estimate.mean)}}}"
        mark = cell.marks[self.metric]
        mean = {"best": rf"\textbf{{{mean}}}", "tie": rf"\underline{{{mean}}}", "": mean}[mark]
        if cell.row.censored_seeds(self.metric):
            mean = rf"{AT_LEAST}\,{mean}"
        half = _half(self.metric, estimate)
        if self.with_interval and not half:
            mean = rf"\multicolumn{{1}}{{r@{{\phantom{{\,$\pm$\,}}}}}}{{{mean}}}"
        notes = "".join(marks_of(self.metric, estimate, n_seeds))
        noted = [rf"\textsuperscript{{{notes}}}" if notes else ""] if self.notes else []
        interval = [rf"\num{{{half}}}" if half else ""] if self.with_interval else []
        return [mean, *interval, *noted]


Block = list[tuple[str, list[str]]]  # sections and their rows


def to_latex(
    data: ReportData, metrics: Sequence[str] = PAPER_METRICS, by: Sequence[str] | None = None
) -> str:
    """Return a table environment; several if the table is longer than a page.

    The best value among defenses in the same setting is bold. Values whose interval overlaps that
    of the best are underlined. Columns that do not fit side by side are stacked.
    """
    table = pivot(data, metrics, by)
    name = MAX_NAME if _wraps(table) else max(map(len, [table.row_key, *table.rows]), default=0)
    panels = list(_panels(_value_columns(table), TEXT_WIDTH - name * CHARACTER - GAP))
    tabulars = [(p, block) for p in panels for block in _blocks(table)]
    parts = _pages(tabulars, heading_lines=3)
    width = max(sum(c.width for c in panel) for panel in panels) + name * CHARACTER + GAP
    environment = "table" if width <= COLUMN_WIDTH else "table*"
    lines = [
        r"% Needs \usepackage{booktabs} and \usepackage{siunitx}.",
        comment(f"Width: about {width:.0f}pt, in \\small. Rows: one per {table.row_key}."),
        *(comment(f"Left out: {run}") for run in data.missing[:MAX_MISSING]),
    ]
    if len(data.missing) > MAX_MISSING:
        lines.append(comment(f"... and {len(data.missing) - MAX_MISSING} more runs"))
    for i, part in enumerate(parts):
        suffix = f" Part {i + 1} of {len(parts)}." if len(parts) > 1 else ""
        lines += [
            rf"\begin{{{environment}}}[tbp]",
            r"\centering\small\sisetup{detect-all}\setlength{\tabcolsep}{3pt}%",
            rf"\caption{{{caption(data, table)}{suffix}}}",
            rf"\label{{{label(data)}{f'-{i + 1}' if i else ''}}}",
            "\n\\par\\medskip\n".join(_tabular(table, columns, block) for columns, block in part),
            *footnotes(table),
            rf"\end{{{environment}}}",
        ]
    return "\n".join([*lines, ""])


def to_latex_document(
    data: ReportData, metrics: Sequence[str] = PAPER_METRICS, by: Sequence[str] | None = None
) -> str:
    """Return a document with the table, to look at."""
    return DOCUMENT.format(table=to_latex(data, metrics, by))


def _half(metric: str, estimate: Estimate) -> str:
    half = half_width(estimate)
    return "" if half is None else number(metric, half)


def _wraps(table: PivotTable) -> bool:
    return max(map(len, table.rows), default=0) > MAX_NAME


def _value_columns(table: PivotTable) -> list[ValueColumn]:
    n_seeds, found = table.n_seeds(), []
    for heading in table.columns:
        cells = [c for s in table.sections.values() for (_, h), c in s.items() if h == heading]
        for metric in table.metrics:
            present = [e for cell in cells if (e := cell.estimates[metric])]
            halves = [_half(metric, e) for e in present]
            means = [number(metric, e.mean) for e in present]
            notes = ["".join(marks_of(metric, e, n_seeds)).replace(r"\d", "") for e in present]
            digits = max(map(len, means), default=2) + max(map(len, halves), default=0)
            digits += AT_LEAST_DIGITS * any(cell.row.censored_seeds(metric) for cell in cells)
            longest = max(map(len, notes), default=0)
            found.append(ValueColumn(heading, metric, any(halves), longest, digits))
    return found


def _panels(columns: Sequence[ValueColumn], width: float) -> Iterator[list[ValueColumn]]:
    """Divide the columns into panels of this width; the metrics of a heading stay together.

    Only a heading that is too wide by itself is divided.
    """
    panel: list[ValueColumn] = []
    for _, group in groupby(columns, lambda column: column.heading):
        same = list(group)
        if panel and sum(c.width for c in (*panel, *same)) > width:
            yield panel
            panel = []
        for column in same:
            if panel and sum(c.width for c in (*panel, column)) > width:
                yield panel
                panel = []
            panel.append(column)
    yield panel


def _blocks(table: PivotTable) -> Iterator[Block]:
    """Divide the rows into blocks that fit on a page, between sections where possible."""
    block: Block = []
    left = MAX_LINES
    for section in table.sections:
        rows = table.rows_of(section)
        if block and len(rows) + 1 > left:
            yield block
            block, left = [], MAX_LINES
        for start in range(0, len(rows), MAX_LINES):
            some = rows[start : start + MAX_LINES]
            if start:
                yield block
                block, left = [], MAX_LINES
            block.append((section, some))
            left -= len(some) + 1
    yield block


def _pages(
    tabulars: Sequence[tuple[list[ValueColumn], Block]], heading_lines: int
) -> list[list[tuple[list[ValueColumn], Block]]]:
    """Put as many tabulars on a page as fit."""
    pages: list[list[tuple[list[ValueColumn], Block]]] = []
    left = 0
    for columns, block in tabulars:
        n_lines = heading_lines + sum(len(rows) + 1 for _, rows in block)
        if not pages or n_lines > left:
            pages.append([])
            left = MAX_LINES + heading_lines
        pages[-1].append((columns, block))
        left -= n_lines
    return pages


def _tabular(table: PivotTable, columns: Sequence[ValueColumn], block: Block) -> str:
    first = rf">{{\raggedright}}p{{{MAX_NAME * CHARACTER:.0f}pt}}" if _wraps(table) else "l"
    span = 1 + sum(column.span for column in columns)
    lines = [
        rf"\begin{{tabular}}{{@{{}}{first}{''.join(column.spec for column in columns)}@{{}}}}",
        r"\toprule",
        *_headings(table, columns),
    ]
    n_seeds = table.n_seeds()
    for section, rows in block:
        lines.append(r"\midrule")
        if section:
            lines.append(rf"\multicolumn{{{span}}}{{@{{}}l}}{{\textit{{{escape(section)}}}}} \\")
        for row in rows:
            cells = [table.sections[section].get((row, column.heading)) for column in columns]
            values = [
                text
                for column, cell in zip(columns, cells, strict=True)
                for text in column.cells(cell, n_seeds)
            ]
            lines.append(" & ".join([_row_name(row, _wraps(table)), *values]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _row_name(name: str, wraps: bool) -> str:
    text = escape(name)
    return (
        text.replace(r"\_", r"\_\allowbreak{}").replace("=", r"=\allowbreak{}") if wraps else text
    )


def _headings(table: PivotTable, columns: Sequence[ValueColumn]) -> list[str]:
    """Return the lines above the first rule: headings, then metrics if there are several."""
    metrics = [
        rf"\multicolumn{{{c.span}}}{{c}}{{{escape(c.metric)}{ARROWS[direction(c.metric)]}}}"
        for c in columns
    ]
    key = escape(table.row_key)
    if table.columns == [""]:
        return [" & ".join([key, *metrics]) + r" \\"]
    tops, rules, place = [], [], 2
    for heading, group in groupby(columns, lambda column: column.heading):
        same = list(group)
        span = sum(column.span for column in same)
        stacked = _stacked(heading, sum(column.width for column in same))
        tops.append(rf"\multicolumn{{{span}}}{{c}}{{{stacked}}}")
        rules.append(rf"\cmidrule(lr){{{place}-{place + span - 1}}}")
        place += span
    if len(table.metrics) == 1:
        return [" & ".join([key, *tops]) + r" \\"]
    return [" & ".join(["", *tops]) + r" \\", "".join(rules), " & ".join([key, *metrics]) + r" \\"]


def _stacked(heading: str, width: float) -> str:
    """Return a heading in as many lines as it needs, broken at spaces and after underscores."""
    lines = [""]
    for word in heading.replace("_", "_\0").replace(" ", " \0").split("\0"):
        if lines[-1] and len((lines[-1] + word).strip()) * CHARACTER > width:
            lines.append("")
        lines[-1] += word
    text = r"\\".join(map(escape, lines))
    return text if len(lines) == 1 else rf"\shortstack{{{text}}}"
