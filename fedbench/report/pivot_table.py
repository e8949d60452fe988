"""PivotTable: rows x columns of estimates, in sections, for the tables of papers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from fedbench.errors import UserError, nearest
from fedbench.report.comparison import NOT_PERCENT, TableRow
from fedbench.report.report_data import LOWER_IS_BETTER, ReportData
from fedbench.report.statistics import Estimate
from fedbench.results.after_attack import ROUNDS_AFTER
from fedbench.results.run_reader import STEALTH

PAPER_METRICS = ("BA", "MA", "TPR", "TNR")
NAMED = ("attack", "defense", "dataset", "model")  # their values say what they are
LACKING = "-"  # label of a setting that a run lacks, such as a parameter of another attack

Mark = Literal["best", "tie", ""]


@dataclass(frozen=True)
class PivotCell:
    """One defense in one setting."""

    row: TableRow
    estimates: Mapping[str, Estimate | None]  # by metric
    marks: Mapping[str, Mark]


@dataclass(frozen=True)
class PivotTable:
    """Cells by section, row and column. A combination that was not run has no cell."""

    metrics: tuple[str, ...]
    row_key: str
    column_key: str  # "" if only the metrics are columns
    rows: list[str]
    columns: list[str]  # [""] without a column key
    sections: Mapping[str, Mapping[tuple[str, str], PivotCell]]  # by heading, "" if there is one

    def rows_of(self, section: str) -> list[str]:
        """Return the rows with a cell in the section."""
        present = {row for row, _ in self.sections[section]}
        return [row for row in self.rows if row in present]

    def cells(self) -> list[PivotCell]:
        return [cell for section in self.sections.values() for cell in section.values()]

    def n_seeds(self) -> int:
        """Return the largest number of seeds behind a value."""
        return max((e.n for cell in self.cells() for e in cell.estimates.values() if e), default=0)


def pivot(
    data: ReportData,
    metrics: Sequence[str] = PAPER_METRICS,
    by: Sequence[str] | None = None,
) -> PivotTable:
    """Arrange the rows of the table as rows x columns.

    By default, rows are defenses, and columns are attacks, or else the first setting that was
    swept. Other swept settings become sections. `by` names the columns, or rows and columns.
    """
    row_key, column_key = _axes(data, by)
    row_keys, column_keys = _with_parameters(data, row_key), _with_parameters(data, column_key)
    others = [key for key in _keys(data) if key not in (*row_keys, *column_keys)]
    row_rank, column_rank, section_rank = (
        _ranks(data, keys) for keys in (row_keys, column_keys, others)
    )
    sections: dict[str, dict[tuple[str, str], PivotCell]] = {}
    rows, columns = [], []
    for cell in sorted(_cells(data, metrics), key=lambda cell: section_rank(cell.row)):
        labels = [(key, _label(data, cell.row, key)) for key in others]
        heading = ", ".join(f"{key} {label}" for key, label in labels if label != LACKING)
        section = sections.setdefault(heading, {})
        name, column = _name(data, cell.row, row_keys), _heading(data, cell.row, column_keys)
        row = _unused(name, {row for row, other in section if other == column})
        section[row, column] = cell
        rows.append((row_rank(cell.row), row))
        columns.append((column_rank(cell.row), column))
    ordered = _in_order(rows), _in_order(columns)
    return PivotTable(tuple(metrics), row_key, column_key, *ordered, sections)


def number(metric: str, value: float) -> str:
    """Format a value: rates in percent, without a sign for zero."""
    decimals = 2 if metric in STEALTH else 1
    text = f"{value if metric in NOT_PERCENT else 100 * value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def is_backdoor_accuracy(metric: str) -> bool:
    """Whether a metric is BA or the BA of a single backdoor, such as `BA/0`."""
    return metric.partition("/")[0] == "BA"


def direction(metric: str) -> int:
    """Return 1 if higher is better, -1 if lower is, 0 if neither."""
    if metric in (*STEALTH, ROUNDS_AFTER):
        return 0
    return -1 if metric.partition("/")[0] in LOWER_IS_BETTER else 1


def marks(metric: str, estimates: Sequence[Estimate | None]) -> list[Mark]:
    """Mark the best of some estimates, and those whose interval overlaps that of the best.

    Values that look the same as the best are best, too. Without another value there is no best.
    """
    present = [estimate for estimate in estimates if estimate is not None]
    sign = direction(metric)
    if len(present) < 2 or sign == 0:
        return [""] * len(estimates)
    best = max(present, key=lambda estimate: sign * estimate.mean)

    def mark(estimate: Estimate | None) -> Mark:
        if estimate is None:
            return ""
        if number(metric, estimate.mean) == number(metric, best.mean):
            return "best"
        return "tie" if _overlap(estimate, best) else ""

    return [mark(estimate) for estimate in estimates]


def _overlap(a: Estimate, b: Estimate) -> bool:
    """Whether intervals overlap; a single seed counts as a point."""
    (a_low, a_high), (b_low, b_high) = (
        (e.mean if e.low is None else e.low, e.mean if e.high is None else e.high) for e in (a, b)
    )
    return a_low <= b_high and b_low <= a_high


def _cells(data: ReportData, metrics: Sequence[str]) -> list[PivotCell]:
    """Return a cell per row of the long table; defenses in the same setting are compared."""
    settings: dict[tuple[str, ...], list[TableRow]] = {}
    for row in data.rows:
        settings.setdefault(tuple(row.setting), []).append(row)
    cells = []
    for rows in settings.values():
        estimates = {metric: [data.estimate(row, metric) for row in rows] for metric in metrics}
        marked = {metric: marks(metric, estimates[metric]) for metric in metrics}
        for i, row in enumerate(rows):
            found = {metric: estimates[metric][i] for metric in metrics}
            cells.append(PivotCell(row, found, {metric: marked[metric][i] for metric in metrics}))
    return cells


def _keys(data: ReportData) -> list[str]:
    return [*(key.name for key in data.swept), *["defense"] * (len(data.defenses) > 1)]


def _axes(data: ReportData, by: Sequence[str] | None) -> tuple[str, str]:
    """Return the keys of rows and columns; the latter is empty if only metrics are columns."""
    swept = [key.name for key in data.swept]
    first = "attack" if "attack" in swept else next(iter(swept), "")
    if by:
        known = ["defense", *swept]
        given = ",".join(by)
        for name in by:
            if name not in known:
                hint = nearest(name, known)
                raise UserError(f"--by {given}: {name!r} has not several values here{hint}")
        if len(by) > 2 or len({*by}) < len(by):
            raise UserError(f"--by {given}: must be a setting for columns, or ROWS,COLUMNS")
        if len(by) == 2:
            return by[0], by[1]
        return (first if by[0] == "defense" else "defense"), by[0]
    return "defense", first


def _with_parameters(data: ReportData, key: str) -> list[str]:
    """Return the key and its parameters that were swept, as in `attack` and `attack.alpha`."""
    return [key, *(k.name for k in data.swept if k.name.startswith(f"{key}."))] if key else []


def _label(data: ReportData, row: TableRow, key: str) -> str:
    return row.defense if key == "defense" else data.setting(row, key)


def _name(data: ReportData, row: TableRow, keys: Sequence[str]) -> str:
    """Return `0.2`, or `constrain_and_scale alpha=0.5`; parameters that it lacks are left out."""
    first, *parameters = [(key, _label(data, row, key)) for key in keys] or [("", "")]
    named = [
        (key.removeprefix(f"{first[0]}."), label) for key, label in parameters if label != LACKING
    ]
    return " ".join([first[1], *(f"{key}={label}" for key, label in named)])


def _heading(data: ReportData, row: TableRow, keys: Sequence[str]) -> str:
    """Return the heading of a column: `dba`, or `pmr 0.2`."""
    name = _name(data, row, keys)
    return name if not keys or keys[0] in NAMED else f"{keys[0]} {name}"


def _unused(name: str, used: Collection[str]) -> str:
    """Return the name, or `name (2)` where labels are alike: the text "null" and no value."""
    names = (f"{name} ({i})" if i > 1 else name for i in count(1))
    return next(name for name in names if name not in used)


def _ranks(data: ReportData, keys: Sequence[str]) -> Callable[[TableRow], list[int]]:
    """Return a sort key for rows: the places of their values among all values of the keys."""
    labels = {key.name: key.labels for key in data.swept} | {"defense": data.defenses}
    order = [(key, {label: i for i, label in enumerate(labels[key])}) for key in keys]
    return lambda row: [ranks[_label(data, row, key)] for key, ranks in order]


def _in_order(ranked: Iterable[tuple[list[int], str]]) -> list[str]:
    return list(dict.fromkeys(label for _, label in sorted(ranked)))


def half_width(estimate: Estimate) -> float | None:
    """Return the distance from the mean to the farther end of the interval; None for one seed.

    Both are equally far unless the interval was cut to the possible range.
    """
    if estimate.low is None or estimate.high is None:
        return None
    return max(estimate.high - estimate.mean, estimate.mean - estimate.low)
