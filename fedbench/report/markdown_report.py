"""The tables of a report as markdown: the long table, rows x columns, every seed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedbench.report.comparison import AT_LEAST, LOWER_BOUND, TableRow
from fedbench.report.pivot_table import (
    PAPER_METRICS,
    PivotCell,
    PivotTable,
    direction,
    is_backdoor_accuracy,
    number,
    pivot,
)
from fedbench.report.report_data import ReportData
from fedbench.report.statistics import Estimate, Seed
from fedbench.report.table import markdown_lines, markdown_table
from fedbench.results.settings import show

MARKS = {"best": "**{}**", "tie": "<ins>{}</ins>", "": "{}"}
LEGEND = (
    "Mean [95 % t-interval over seeds]; rates in %. Bold: best defense in the same setting. "
    "Underlined: the interval overlaps that of the best."
)
SPLIT = "† k/n: BA is above 50 % in k of n seeds; the mean describes none of them."


def to_markdown_report(
    data: ReportData, metrics: Sequence[str] = PAPER_METRICS, by: Sequence[str] | None = None
) -> str:
    """Return the long table, the table of rows x columns, all seeds, and the runs left out."""
    table = pivot(data, metrics, by)
    compared = data.comparison
    parts = ["# Results", markdown_table(compared, escape), escape(compared.caption())]
    parts.append(f"## By {escape(_title(table))}")
    for section in table.sections:
        parts += [f"### {escape(section)}"] if section else []
        parts.append(_pivot_table(table, section))
    values = [(metric, e) for cell in table.cells() for metric, e in cell.estimates.items()]
    split = any(e and e.is_split for metric, e in values if is_backdoor_accuracy(metric))
    censored = any(cell.row.censored_seeds(metric) for cell in table.cells() for metric in metrics)
    notes = [*[SPLIT] * split, *[f"{AT_LEAST}: {LOWER_BOUND}."] * censored]
    parts += [LEGEND, *notes, "## Seeds", _seeds(data, metrics)]
    if data.missing:
        missing = [f"- {escape(str(run))}" for run in data.missing]
        parts += ["## Runs left out", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return markdown, also within a table, that shows the text as it is, in one line."""
    one_line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    plain = re.sub(r"[\\`*|~$\[\]]", r"\\\g<0>", one_line)
    plain = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\_", plain)  # a_b is no emphasis
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _title(table: PivotTable) -> str:
    return " and ".join(filter(None, [table.row_key, table.column_key]))


def _pivot_table(table: PivotTable, section: str) -> str:
    cells, n_seeds = table.sections[section], table.n_seeds()
    headings = [
        " ".join(filter(None, [column, metric]))
        for column in table.columns
        for metric in table.metrics
    ]
    lines = [[escape(text) for text in (table.row_key, *headings)]]
    for row in table.rows_of(section):
        line = [escape(row)]
        for column in table.columns:
            line += _values(cells.get((row, column)), table.metrics, n_seeds)
        lines.append(line)
    return markdown_lines(lines, 1)


def _values(cell: PivotCell | None, metrics: Sequence[str], n_seeds: int) -> list[str]:
    """Return the cells of all metrics; the first is the status if no run has finished."""
    if cell is None:
        return ["-"] * len(metrics)
    if not cell.row.finished:
        return [cell.row.cells(metrics)[0], *["-"] * (len(metrics) - 1)]
    return [_value(cell, metric, n_seeds) for metric in metrics]


def _value(cell: PivotCell, metric: str, n_seeds: int) -> str:
    """Return `**83.3** [82.1, 84.5]`."""
    estimate = cell.estimates[metric]
    if estimate is None:
        return "-"
    mean = MARKS[cell.marks[metric]].format(number(metric, estimate.mean))
    parts = [AT_LEAST, mean] if cell.row.censored_seeds(metric) else [mean]
    if estimate.low is not None and estimate.high is not None:
        parts.append(f"[{number(metric, estimate.low)}, {number(metric, estimate.high)}]")
    if is_backdoor_accuracy(metric) and estimate.is_split:
        parts.append(f"†{estimate.n_above()}/{estimate.n}")
    if estimate.n < n_seeds:
        parts.append(f"({estimate.n} of {n_seeds} seeds)")
    return " ".join(parts)


def _seeds(data: ReportData, metrics: Sequence[str]) -> str:
    """Return every value: one line per setting, defense and metric, one column per seed."""
    keys = [key.name for key in data.swept]
    found = [
        (row, metric, estimate)
        for row in data.rows
        for metric in metrics
        if (estimate := data.estimate(row, metric)) is not None
    ]
    seeds: dict[Seed, None] = dict.fromkeys(data.comparison.seeds)
    seeds |= dict.fromkeys(seed for _, _, estimate in found for seed in estimate.values)
    lines = [[*keys, "defense", "metric", *(f"seed {show(seed)}" for seed in seeds), "worst seed"]]
    for row, metric, estimate in found:
        settings = [data.setting(row, key) for key in keys]
        values = [_of_seed(row, metric, estimate, seed) for seed in seeds]
        lines.append([*settings, row.defense, metric, *values, _worst(row, metric, estimate)])
    return markdown_lines([[escape(cell) for cell in line] for line in lines], len(keys) + 2)


def _of_seed(row: TableRow, metric: str, estimate: Estimate, seed: Seed) -> str:
    """Return `99.4`, or `≥ 20.0` for a lower bound; a dash without a value."""
    if seed not in estimate.values:
        return "-"
    text = number(metric, estimate.values[seed])
    return f"{AT_LEAST} {text}" if seed in row.censored_seeds(metric) else text


def _worst(row: TableRow, metric: str, estimate: Estimate) -> str:
    """Return `99.4 (seed 2)`; a dash if neither high nor low is bad."""
    if direction(metric) == 0:
        return "-"
    seed, _ = estimate.worst(direction(metric) < 0)
    return f"{_of_seed(row, metric, estimate, seed)} (seed {show(seed)})"
