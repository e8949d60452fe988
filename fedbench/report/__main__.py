"""`python -m fedbench.report runs/NAME`: print a table of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedbench.errors import UserError, nearest
from fedbench.report.table import print_runs
from fedbench.results.run_reader import METRICS, STEALTH, RunResult, read_runs


def _columns(text: str, runs: Sequence[RunResult]) -> list[str]:
    """Parse and check `--columns`."""
    known = dict.fromkeys([*METRICS, *STEALTH, *(name for run in runs for name in run.metrics)])
    columns = [name.strip() for name in text.split(",")]
    for name in columns:
        if name not in known:
            raise UserError(f"--columns {text}: no column {name!r}{nearest(name, known)}")
    return columns


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fedbench report",
        description="Print a table of runs, one row per setting and defense.",
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="runs/NAME, or a single run")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument(
        "--columns",
        default=",".join(METRICS),
        help="metrics to show, like BA,MA,norm_ratio,cosine or BA,BA/0,BA/1 (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        columns = _columns(options.columns, runs)
    except UserError as error:
        print(f"fedbench.report: {error}", file=sys.stderr)
        return 2
    print_runs(runs, options.markdown, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
