"""The table of `python -m fedbench.report`, for a terminal or as markdown."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from rich.console import Console, RenderableType

from fedbench.report.comparison import compare
from fedbench.report.table_layout import fit, render
from fedbench.results.run_reader import METRICS, RunResult

UNLIMITED = 1000  # columns, for files and pipes


def to_terminal(
    runs: Sequence[RunResult], columns: Sequence[str] = METRICS, width: int = UNLIMITED
) -> RenderableType:
    """Return the table for a terminal of this width; only the first row of a setting names it."""
    return render(fit(compare(runs, columns), width), width)


def to_markdown(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> str:
    """Return the table as markdown; every row names its setting."""
    compared = compare(runs, columns)
    words, numbers = [*compared.keys, "defense"], compared.headings
    lines = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers)]
    lines += [[*row.setting, row.defense, *row.cells(numbers)] for row in compared.rows]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", compared.caption(), ""])


def notes(runs: Sequence[RunResult]) -> list[str]:
    """Return one line for each run that the averages leave out: its folder and the reason."""
    counted = {run.folder for row in compare(runs).rows for run in row.runs}
    lines = []
    for run in runs:
        if run.status != "finished":
            lines.append(f"{run.status}: {run.folder}" + (f": {run.reason}" if run.reason else ""))
        elif run.folder not in counted:
            lines.append(f"not counted: {run.folder}: a newer run has the same settings and seed")
    return lines


def print_runs(
    runs: Sequence[RunResult], markdown: bool = False, columns: Sequence[str] = METRICS
) -> None:
    """Print the table to stdout, and to stderr the runs that it leaves out."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for encodings without ±
    console = Console()
    if not console.file.isatty() and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    if markdown:
        console.out(to_markdown(runs, columns), end="", highlight=False)
    else:
        console.print(to_terminal(runs, columns, console.width))
    for line in notes(runs):
        print(line, file=sys.stderr)
