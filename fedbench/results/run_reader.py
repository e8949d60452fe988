"""Read run directories for reports; damaged or unfinished ones are marked, not skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from filelock import FileLock, Timeout

from fedbench.errors import UserError
from fedbench.results.atomic_files import LOCK_FILE
from fedbench.results.origin import Origin, read_origin
from fedbench.results.settings import Value, flat

# libyaml is ten times as fast as the Python loader; both are safe.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
METRICS = ("BA", "MA", "TPR", "TNR", "AUC", "seconds")
STEALTH = ("norm_ratio", "cosine", "benign_cosine")  # compare poisoned updates with benign ones
LACKING = "-"  # stands for a setting that a run does not have
LARGEST = 1e15  # metrics beyond are damage, and sums of them could overflow
# Settings missing from the config.yaml of older runs, with the values those runs used.
ADDED_SETTINGS = {"pretrain_non_iid": None}


@dataclass(frozen=True)
class RunResult:
    """Everything that could be read from one run directory."""

    folder: Path
    status: str  # finished | failed | running | unfinished | unreadable
    config: Mapping[str, Value]  # flat: `attack` is the attack's name, `attack.x` a parameter
    metrics: Mapping[str, float | None]  # METRICS, STEALTH, BA/0, ...; empty unless finished
    reason: str = ""  # why the run failed or could not be read
    origin: Origin | None = None  # None for runs of older versions
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, if there is one

    def value(self, key: str) -> Value:
        """Return a setting, or a dash if the run lacks it (a parameter of another attack)."""
        return self.config.get(key, LACKING)


def read_runs(folders: Iterable[str | Path]) -> list[RunResult]:
    """Return every run below the folders, ordered by folder and then by start time."""
    runs: dict[Path, RunResult] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            what = f"{folder} is not a folder" if folder.exists() else f"no folder {folder}"
            raise UserError(what)
        if not (found := list(_run_folders(folder))):
            raise UserError(f"no runs below {folder}: no folder there has a config.yaml")
        for run in sorted(found, key=lambda run: (_start_time(run), run)):
            runs.setdefault(run.resolve(), replace(_read_run(run), origin=_origin(run)))
    return list(runs.values())


def read_rounds(run: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run; a last line that a killed run left incomplete is dropped."""
    path = run / "rounds.jsonl"
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(orjson.loads(line))  # four times as fast as json
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON") from error
    return records


def _run_folders(top: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(top):
        # Skip hidden folders: Hydra's .hydra/config.yaml and the caches next to the runs.
        below[:] = [name for name in below if not name.startswith(".")]
        if "config.yaml" in (*files, *below):
            below.clear()
            yield Path(folder)


def _start_time(run: Path) -> int:
    try:
        return (run / "config.yaml").stat().st_mtime_ns
    except OSError:  # a link to nowhere
        return 0


def _origin(run: Path) -> Origin | None:
    """Return the origin of a run; None if its settings are no flat settings."""
    origin = read_origin(run)
    if origin is None:
        return None
    settings = [*origin.choices.values(), *(origin.changed or {}).values()]
    return origin if all(isinstance(value, Value | None) for value in settings) else None


def _read_run(folder: Path) -> RunResult:
    config: dict[str, Value] = {}
    reading = "config.yaml"
    try:
        config = _read_config(folder / reading)
        reading = "summary.json"
        if not (folder / reading).exists():
            return RunResult(folder, "running" if _is_locked(folder) else "unfinished", config, {})
        summary = json.loads((folder / reading).read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or summary.get("status") not in ("finished", "failed"):
            raise ValueError("status must be finished or failed")
        if summary["status"] == "failed":
            reason = _single_line(summary.get("error") or "")
            return RunResult(folder, "failed", config, {}, reason, summary=summary)
        return RunResult(folder, "finished", config, _metrics(summary), summary=summary)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return RunResult(folder, "unreadable", config, {}, f"{reading}: {_single_line(error)}")


def _is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of the run."""
    lock = folder / LOCK_FILE
    if not lock.exists():
        return False
    try:
        with FileLock(lock).acquire(blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of somebody else
        return False


def _single_line(text: object) -> str:
    return " ".join(str(text).split())


def _read_config(path: Path) -> dict[str, Value]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        raise ValueError("not YAML") from error
    config = flat(loaded) if isinstance(loaded, dict) else {}
    if not isinstance(config.get("defense"), str):
        raise ValueError("no defense name")
    return {**ADDED_SETTINGS, **config}


def _metrics(summary: Mapping[str, Any]) -> dict[str, float | None]:
    by_backdoor = summary.get("BA_by_backdoor") or {}
    if not isinstance(by_backdoor, dict):
        raise ValueError(f"BA_by_backdoor is {by_backdoor!r}")
    if missing := [key for key in METRICS if key not in summary]:
        raise ValueError(f"no {missing[0]}")
    metrics = {key: summary[key] for key in (*METRICS, *STEALTH) if key in summary}
    metrics |= {f"BA/{name}": value for name, value in by_backdoor.items()}
    for key, value in metrics.items():
        if value is not None and not (type(value) in (int, float) and abs(value) <= LARGEST):
            raise ValueError(f"{key} is {value!r}")
    return metrics
