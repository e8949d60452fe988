"""`python -m reproduction [FOLDERS]`: keep the results of runs, then write docs/reproduction.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedbench.errors import UserError
from fedbench.report.report_data import read_report_data
from fedbench.results.atomic_files import write_atomically
from reproduction.experiments import read_experiments
from reproduction.figures import write_figures
from reproduction.kept import keep
from reproduction.page import page

DOCS = Path(__file__).parent.parent / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description="Write docs/reproduction.md, its figures and docs/reproduction/*.csv.",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        help="runs of sweeps/paper and sweeps/beyond, whose results replace or join the kept ones",
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="where to write (default: docs)")
    options = parser.parse_args(arguments)
    kept = options.docs / "reproduction"
    try:
        if options.folders:
            sweeps = {sweep for experiment in read_experiments() for sweep in experiment.sweeps}
            found = keep(read_report_data(options.folders), kept, sweeps)
            print(f"kept: {', '.join(found) or 'nothing: no finished run of these sweeps'}")
        write_figures(kept, options.docs)
        path, text = options.docs / "reproduction.md", page(kept)
        write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    except UserError as error:
        print(f"reproduction: {error}", file=sys.stderr)
        return 2
    print(f"page: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
