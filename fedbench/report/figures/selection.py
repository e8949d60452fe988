"""What figures show of a report: settings, their titles, runs, and what was left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbench.report.comparison import TableRow
from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = ("BA", "MA", "TPR", "TNR")
CHOICES = ("attack", "dataset", "model", "defense")  # their values need no name beside them
MAX_NAMED = 6  # names in the sentence about what was left out

Setting = tuple[str, ...]  # labels of some keys


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn, and the words for its caption."""

    name: str  # of the files
    caption: str
    draw: Callable[[], Figure | None]  # None if there is nothing to draw


def swept_names(data: ReportData, without: Sequence[str] = ()) -> list[str]:
    """Return the settings that differ between rows."""
    return [key.name for key in data.swept if key.name not in without]


def by_setting(data: ReportData, keys: Sequence[str]) -> dict[Setting, list[TableRow]]:
    """Group the rows by some settings, in order of the table."""
    groups: dict[Setting, list[TableRow]] = {}
    for row in data.rows:
        groups.setdefault(tuple(data.setting(row, key) for key in keys), []).append(row)
    return groups


def title_of(keys: Sequence[str], setting: Setting) -> str:
    """Name a setting: `dba, pmr 0.2`; empty if nothing differs."""
    pairs = zip(keys, setting, strict=True)
    return ", ".join(value if key in CHOICES else f"{key} {value}" for key, value in pairs)


def row_title(data: ReportData, row: TableRow) -> str:
    """Name the setting of a row; empty if all rows have the same."""
    keys = swept_names(data)
    return title_of(keys, tuple(data.setting(row, key) for key in keys))


def drawn_runs(data: ReportData, row: TableRow) -> list[RunRounds]:
    """Return the rounds of a row's finished runs, or of all its runs if none has finished."""
    runs = row.finished or row.runs
    found = [data.rounds[run.folder] for run in runs if run.folder in data.rounds]
    return [rounds for rounds in found if len(rounds)]


def first_run(data: ReportData, row: TableRow) -> RunRounds | None:
    """Return the rounds of the first seed that has any."""
    return next(iter(drawn_runs(data, row)), None)


def left_out(titles: Sequence[str], limit: int) -> str:
    """Return a sentence about the settings after the first `limit`; empty if there are none."""
    rest = titles[limit:]
    if not rest:
        return ""
    more = f" and {len(rest) - MAX_NAMED} more" if len(rest) > MAX_NAMED else ""
    return f" Not shown: {'; '.join(rest[:MAX_NAMED])}{more}."


def file_name(*parts: str) -> str:
    """Return a name for files on any system."""
    plain = [part.encode("ascii", "backslashreplace").decode() for part in parts]
    words = [re.sub(r"[^A-Za-z0-9.=+-]+", "_", part).strip("_.") for part in plain]
    return "_".join(word for word in words if word)[:100] or "figure"


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
