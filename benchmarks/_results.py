"""What a run of benchmarks leaves: a table as it goes, a file of JSON, two files compared."""

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
FOLDER = Path(__file__).parent / "runs"  # git ignores every folder of that name
KEY = ("benchmark", "case", "what", "against")
# Column -> width; numbers are as wide as their heads need
TABLE = {
    "benchmark": 10,
    "case": 40,
    "what": 18,
    "seconds": 9,
    "against": 18,
    "its seconds": 11,
    "ratio": 7,
    "times as fast": 13,
}
COMPARED = {
    **{key: TABLE[key] for key in ("benchmark", "case", "what", "against")},
    "old ratio": 9,
    "new ratio": 9,
    "change": 8,
}
WORDS = KEY  # columns of words are flush left, of numbers flush right


def default_path(now: datetime) -> Path:
    return FOLDER / f"{now:%Y-%m-%d-%H%M%S}.json"


class Book:
    """The records of a run, printed and written as they come: a run cut short leaves its rows."""

    def __init__(self, path: Path, options: Options) -> None:
        self.path = path
        self.head = {
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "options": asdict(options),
        }
        self.records: list[Record] = []
        self._write()
        print(line(TABLE, {name: name for name in TABLE}) + "  notes", flush=True)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._write()
        print(told(record), flush=True)

    def _write(self) -> None:
        text = json.dumps({**self.head, "rows": self.records}, indent=1, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text + "\n")
        except OSError as error:
            raise UserError(f"--json {self.path}: cannot be written ({error.strerror})") from error


def machine() -> Record:
    """What the seconds depend on, beside the options."""
    from fedbench.results.summary import versions

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
    """`1427cd4a3b2c`, with -dirty if files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None


def line(columns: Mapping[str, int], cells: Mapping[str, str]) -> str:
    return "  ".join(
        f"{cells[name]:<{width}}" if name in WORDS else f"{cells[name]:>{width}}"
        for name, width in columns.items()
    )


def told(record: Record) -> str:
    """A record as a line of the table."""
    cells = {
        **{key: record[key] or "-" for key in KEY},
        "seconds": number(record["median"]),
        "its seconds": number(record["against_median"]),
        "ratio": number(record["ratio"]),
        "times as fast": number(record["times_as_fast"]),
    }
    notes = ", ".join(f"{name} {number(value)}" for name, value in record["notes"].items())
    return f"{line(TABLE, cells)}  {notes}".rstrip()


def number(value: float | None) -> str:
    """Three digits that count, more only before the point: 0.0123, 12.3, 1,610,000."""
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def compare(old: Path, new: Path) -> None:
    """Prints the ratios of two files and their change; seconds of different runs say little."""
    was, now = _read(old), _read(new)
    for name in sorted({*was["machine"], *now["machine"]}):
        before, after = was["machine"].get(name), now["machine"].get(name)
        if before != after:
            print(f"{name}: {before} -> {after}")
    for name in ("threads", "repeats", "quick"):
        before, after = was["options"][name], now["options"][name]
        if before != after:
            print(f"{name}: {before} -> {after}")
    print(line(COMPARED, {name: name for name in COMPARED}))
    olds, news = _ratios(was["rows"]), _ratios(now["rows"])
    for key in dict.fromkeys([*olds, *news]):
        print(_changed(key, olds.get(key), news.get(key)))


def _read(path: Path) -> Record:
    try:
        read = json.loads(path.read_text())
        return {part: read[part] for part in ("machine", "options", "rows")}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not written by python -m benchmarks") from error


def _ratios(records: Sequence[Record]) -> dict[tuple[str, ...], float]:
    return {
        tuple(record[key] for key in KEY): record["ratio"]
        for record in records
        if record["ratio"] is not None
    }


def _changed(key: tuple[str, ...], old: float | None, new: float | None) -> str:
    change = "-" if old is None or new is None else f"{100 * (new / old - 1):+.1f} %"
    cells = {
        **dict(zip(KEY, key, strict=True)),
        "old ratio": number(old),
        "new ratio": number(new),
        "change": change,
    }
    return line(COMPARED, cells)
