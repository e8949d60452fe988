"""`python -m fedbench.report runs/NAME`: print a table of runs, and write a report beside them."""

from __future__ import annotations

import argparse
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from fedbench.collector import paused_collector
from fedbench.errors import UserError, nearest
from fedbench.report.benign_pairs import PAIRED
from fedbench.report.pivot_table import PAPER_METRICS
from fedbench.report.report_data import ReportData, read_report_data
from fedbench.report.report_files import FORMATS, By, ReportOptions, write_report
from fedbench.report.report_watch import WATCH_INTERVAL, watch
from fedbench.report.table import print_comparison, print_runs
from fedbench.results.run_reader import DURABILITY, METRICS, STEALTH, RunResult, read_runs

REPORT_FOLDER = "report"
NO_FILES = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with paused_collector():
            _report(options, sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"fedbench.report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedbench report",
        description="Print a table of runs, one row per setting and defense, and write a report: "
        "a page to look at, tables and figures for papers, and CSV.",
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="folder", help="runs/NAME, or a single run")
    columns = "metrics to show, like BA,MA,MA_lost,lifespan_50 or BA,BA/0,BA/1"
    add("--columns", help=f"{columns} (default: {','.join(METRICS)})")
    add(
        "--by",
        metavar="[ROWS,]COLUMNS",
        help="what to compare in heat maps and in tables for papers, like pmr or attack,pmr "
        "(default: defenses by attack, or by the first setting that differs)",
    )
    formats = f"what to write (default: %(default)s); {NO_FILES}: print the table only"
    add("--format", default=",".join(FORMATS), help=formats)
    add("--to", type=Path, help="where to write (default: report/ in the first folder)")
    add("--open", action="store_true", help="open the page in a browser")
    add("--markdown", action="store_true", help="print the table as markdown")
    add(
        "--watch",
        nargs="?",
        type=int,
        const=WATCH_INTERVAL,
        metavar="SECONDS",
        help="write the page anew while runs are in progress, by default every "
        f"{WATCH_INTERVAL} seconds; an open page reloads itself",
    )
    return parser


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Print the table, write the files, and say where they are."""
    formats = _formats(options.format)
    if not formats:
        paired = {*_names(options.columns or "")} & {*PAIRED}
        # Pairs need the rounds, which take a while to read.
        runs = read_report_data(options.folders).runs if paired else read_runs(options.folders)
        print_runs(runs, options.markdown, _columns(options.columns, runs))
        return
    data = read_report_data(options.folders)
    columns = _columns(options.columns, data.runs)
    data = data.with_columns(columns)
    metrics = PAPER_METRICS if options.columns is None else columns
    command = shlex.join(["python", "-m", "fedbench.report", *arguments])
    chosen = ReportOptions(formats, metrics, _by(options.by, data), command)
    folder = options.to or Path(options.folders[0], REPORT_FOLDER)
    if options.watch is not None:
        data = watch(data, folder, chosen, options.watch, options.open)
    missing = [str(run) for run in data.missing]
    print_comparison(data.comparison, missing, options.markdown)
    files = write_report(data, folder, chosen)
    print(f"report: {files[0]}", file=sys.stderr)
    if options.open and options.watch is None:
        webbrowser.open(files[0].resolve().as_uri())


def _columns(text: str | None, runs: Sequence[RunResult]) -> Sequence[str]:
    """Parse and check `--columns`."""
    if text is None:
        return METRICS
    names = (*METRICS, *STEALTH, *DURABILITY, *PAIRED)
    known = dict.fromkeys([*names, *(name for run in runs for name in run.metrics)])
    columns = _names(text)
    for name in columns:
        if name not in known:
            raise UserError(f"--columns {text}: no column {name!r}{nearest(name, known)}")
    return columns


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _formats(text: str) -> tuple[str, ...]:
    """Parse and check `--format`."""
    names = _names(text)
    if names == [NO_FILES]:
        return ()
    for name in names:
        if name not in FORMATS:
            known = (*FORMATS, NO_FILES)
            raise UserError(f"--format {text}: no format {name!r}{nearest(name, known)}")
    return tuple(names)


def _by(text: str | None, data: ReportData) -> By:
    """Parse and check `--by`: columns, or rows and columns."""
    if text is None:
        return None
    *rows, columns = _names(text)
    known = ["defense", *(key.name for key in data.swept)]
    for name in (*rows, columns):
        if name not in known:
            raise UserError(f"--by {text}: {name!r} is not swept{nearest(name, known)}")
    others = rows or [
        name for name in ("defense", "attack", *known) if name in {*known} - {columns}
    ]
    if len(rows) > 1 or others[:1] in ([], [columns]):
        raise UserError(f"--by {text}: must be COLUMNS or ROWS,COLUMNS, such as defense,pmr")
    return others[0], columns


if __name__ == "__main__":
    sys.exit(main())
