"""What failed in a sweep: one line per run, whatever state its folder is in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

from fedbench.results.run_reader import read_runs

SHOWN = 20  # runs
LONGEST = 300  # characters of a reason
NOT_STARTED = "did not start, see above"


def failed_runs(runs: Mapping[Path, str]) -> list[str]:
    """Return `label: reason` of each run that has not finished; `runs` maps folders to labels."""
    found = []
    for folder, label in runs.items():
        if (reason := _reason(folder)) is not None:
            name = f"{label} ({folder.name})" if label else folder.name
            found.append(f"{name}: {shorten(reason, LONGEST)}")
    return found


def _reason(folder: Path) -> str | None:
    """Why the run has not finished; None if it has."""
    if not (folder / "config.yaml").exists():
        return NOT_STARTED
    try:
        (run,) = read_runs([folder])
    except Exception as error:  # a folder in any state must not hide the others
        return f"cannot be read: {type(error).__name__}: {error}"
    if run.status == "finished":
        return None
    return f"{run.status}: {run.reason}" if run.reason else run.status


def print_failed_runs(failed: list[str], n_runs: int) -> None:
    """Print the list to stderr; of many runs, the first ones."""
    lines = [f"{len(failed)} of {n_runs} runs failed:", *failed[:SHOWN]]
    if len(failed) > SHOWN:
        lines.append(f"and {len(failed) - SHOWN} more")
    print("\n  ".join(lines), file=sys.stderr, flush=True)
