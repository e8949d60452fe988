"""Output of benchmarks: a table on the terminal, a JSON file, a comparison of two such files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._measure import Options
from fedbench.errors import UserError

Record = dict[str, Any]

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "runs"  # ignored by git
KEY = ("benchmark", "case", "what", "against")  # identifies a row across files
TEXT = ("benchmark", "case", "what", "baseline")  # their columns, aligned left; numbers right
# Columns and their widths
TABLE = {
    "benchmark": 10,
    "case": 40,
    "what": 18,
    "seconds": 9,
    "baseline": 18,
    "baseline s": 10,
    "ratio": 7,
    "times as fast": 13,
}
COMPARISON = {
    **{name: TABLE[name] for name in TEXT},
    "old ratio": 9,
    "new ratio": 9,
    "change": 8,
}


def default_path(now: datetime) -> Path:
    return FOLDER / f"{now:%Y-%m-%d-%H%M%S}.json"


class ResultWriter:
    """Prints and saves every row at once, so that an interrupted run keeps its rows."""

    def __init__(self, path: Path, options: Options) -> None:
        self.path = path
        self.head = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "options": asdict(options),
        }
        self.records: list[Record] = []
        self._write()
        print(format_line(TABLE, {name: name for name in TABLE}) + "  notes", flush=True)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._write()
        print(format_row(record), flush=True)

    def _write(self) -> None:
        text = json.dumps({**self.head, "rows": self.records}, indent=1, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text + "\n")
        except OSError as error:
            raise UserError(f"--json {self.path}: cannot be written ({error.strerror})") from error


def machine() -> Record:
    """Hardware and software that the times depend on."""
    from fedbench.results.provenance import versions

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "commit": _commit(),
        **versions(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str | None:
    """Commit such as `1427cd4a3b2c`, with -dirty if files were changed; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def format_line(columns: Mapping[str, int], cells: Mapping[str, str]) -> str:
    return "  ".join(
        f"{cells[name]:<{width}}" if name in TEXT else f"{cells[name]:>{width}}"
        for name, width in columns.items()
    )


def format_row(record: Record) -> str:
    cells = {
        **{name: record[key] or "-" for name, key in zip(TEXT, KEY, strict=True)},
        "seconds": format_number(record["median"]),
        "baseline s": format_number(record["against_median"]),
        "ratio": format_number(record["ratio"]),
        "times as fast": format_number(record["times_as_fast"]),
    }
    notes = ", ".join(f"{name} {format_number(value)}" for name, value in record["notes"].items())
    return f"{format_line(TABLE, cells)}  {notes}".rstrip()


def format_number(value: float | None) -> str:
    """Format with three significant digits, or as an integer from 100 on: 0.0123, 1,610,000."""
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def compare(old: Path, new: Path) -> None:
    """Print how ratios changed between two files; seconds of different runs are not comparable."""
    old_run, new_run = _read(old), _read(new)
    for name in sorted({*old_run["machine"], *new_run["machine"]}):
        _print_difference(name, old_run["machine"].get(name), new_run["machine"].get(name))
    for name in ("threads", "repeats", "quick"):
        _print_difference(name, old_run["options"][name], new_run["options"][name])
    print(format_line(COMPARISON, {name: name for name in COMPARISON}))
    old_ratios, new_ratios = _ratios(old_run["rows"]), _ratios(new_run["rows"])
    for key in dict.fromkeys([*old_ratios, *new_ratios]):
        print(_format_change(key, old_ratios.get(key), new_ratios.get(key)))


def _print_difference(name: str, old: object, new: object) -> None:
    if old != new:
        print(f"{name}: {old} -> {new}")


def _read(path: Path) -> Record:
    try:
        read = json.loads(path.read_text())
        return {part: read[part] for part in ("machine", "options", "rows")}
    except OSError as error:
        raise UserError(f"--compare {path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--compare {path}: not written by python -m benchmarks") from error


def _ratios(records: Sequence[Record]) -> dict[tuple[str, ...], float]:
    return {
        tuple(record[key] for key in KEY): record["ratio"]
        for record in records
        if record["ratio"] is not None
    }


def _format_change(key: tuple[str, ...], old: float | None, new: float | None) -> str:
    change = "-" if old is None or new is None else f"{100 * (new / old - 1):+.1f} %"
    cells = {
        **dict(zip(TEXT, key, strict=True)),
        "old ratio": format_number(old),
        "new ratio": format_number(new),
        "change": change,
    }
    return format_line(COMPARISON, cells)
