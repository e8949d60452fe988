"""The table of `python -m fedbench.report`, for a terminal or as markdown."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType

from fedbench.report.comparison import Comparison, compare
from fedbench.report.missing_runs import missing_runs
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
    return markdown_of(compare(runs, columns))


def markdown_of(compared: Comparison) -> str:
    """Return a comparison as markdown, with its caption."""
    table = markdown_table(compared, lambda cell: cell.replace("|", "\\|"))
    return f"{table}\n\n{compared.caption()}\n"


def markdown_table(compared: Comparison, escape: Callable[[str], str]) -> str:
    """Return a comparison as markdown, without its caption."""
    words, numbers = [*compared.keys, "defense"], compared.headings
    lines = [[*words, *numbers]]
    lines += [[*row.setting, row.defense, *row.cells(numbers)] for row in compared.rows]
    return markdown_lines([[escape(cell) for cell in line] for line in lines], len(words))


def markdown_lines(lines: Sequence[Sequence[str]], n_words: int) -> str:
    """Return lines of cells as markdown: the first is the heading, the first columns are words."""
    heading, *rest = lines
    rule = ["---"] * n_words + ["---:"] * (len(heading) - n_words)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, rule, *rest))


def notes(runs: Sequence[RunResult]) -> list[str]:
    """Return one line for each run that the averages leave out: its folder and the reason."""
    return [str(run) for run in missing_runs(runs, compare(runs))]


def print_runs(
    runs: Sequence[RunResult], markdown: bool = False, columns: Sequence[str] = METRICS
) -> None:
    """Print the table to stdout, and to stderr the runs that it leaves out."""
    compared = compare(runs, columns)
    print_comparison(compared, [str(run) for run in missing_runs(runs, compared)], markdown)


def print_comparison(compared: Comparison, missing: Sequence[str], markdown: bool = False) -> None:
    """Print the table to stdout, and the lines about missing runs to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for encodings without ±
    console = Console()
    if not console.file.isatty() and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    if markdown:
        console.out(markdown_of(compared), end="", highlight=False)
    else:
        console.print(render(fit(compared, console.width), console.width))
    for line in missing:
        print(line, file=sys.stderr)
