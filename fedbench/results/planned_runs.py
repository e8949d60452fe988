"""The runs of the last sweep into a folder, so that a report can name those that never started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedbench.results.atomic_files import write_atomically

PLANNED_FILE = "planned.json"


def write_planned_runs(folder: Path, titles: Mapping[str, str]) -> None:
    """Write run id -> title of all runs of a sweep, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(titles, indent=2) + "\n"
    write_atomically(folder / PLANNED_FILE, lambda file: file.write(text.encode()))


def read_planned_runs(folder: Path) -> dict[str, str]:
    """Return run id -> title; empty if no sweep wrote to the folder or the file is damaged."""
    try:
        planned = json.loads((folder / PLANNED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in planned.items()} if isinstance(planned, dict) else {}
