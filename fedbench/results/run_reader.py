"""Read run directories for reports; damaged or unfinished ones are marked, not skipped.

A file counts only if its check and the run that it names are those of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fedbench.errors import UserError
from fedbench.results.after_attack import LIFESPANS, ROUNDS_AFTER, censored_lifespans
from fedbench.results.atomic_files import LOCK_FILE, in_words
from fedbench.results.origin import ORIGIN_FILE, Origin, read_origin
from fedbench.results.rounds_file import LAST_CHECK, ROUNDS_FILE, RoundsFile
from fedbench.results.sealed import DamageError, damage_told, unseal_json, unseal_text
from fedbench.results.settings import Value, flat

# libyaml is ten times as fast as the Python loader; both are safe.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
METRICS = ("BA", "MA", "TPR", "TNR", "AUC", "seconds")
STEALTH = ("norm_ratio", "cosine", "benign_cosine")  # compare poisoned updates with benign ones
DURABILITY = ("BA_cumulative", *LIFESPANS, ROUNDS_AFTER)  # of the backdoor, over the rounds
LACKING = "-"  # stands for a setting that a run does not have
LARGEST = 1e15  # metrics beyond are damage, and sums of them could overflow
WRITE_AGAIN = "the same command writes it again"  # the remedy for a file that the run can remake
START_OVER = "delete the folder and repeat its command"


@dataclass(frozen=True)
class RunResult:
    """Everything that could be read from one run directory."""

    folder: Path
    status: str  # finished | failed | running | unfinished | unreadable
    config: Mapping[str, Value]  # flat: `attack` is the attack's name, `attack.x` a parameter
    metrics: Mapping[str, float | None]  # METRICS, DURABILITY, BA/0, ...; empty unless finished
    reason: str = ""  # why the run failed or could not be read
    origin: Origin | None = None  # None for runs of older versions
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, if there is one
    id: str = ""  # as the files say; folders may be renamed
    censored: frozenset[str] = frozenset()  # metrics that are lower bounds: the run ended first

    def value(self, key: str) -> Value:
        """Return a setting, or a dash if the run lacks it (a parameter of another attack)."""
        return self.config.get(key, LACKING)


def read_runs(folders: Iterable[str | Path], check_rounds: bool = True) -> list[RunResult]:
    """Return every run below the folders, ordered by folder and then by start time.

    Without `check_rounds`, damage to rounds.jsonl is left to `read_rounds`.
    """
    runs: dict[Path, RunResult] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            what = f"{folder} is not a folder" if folder.exists() else f"no folder {folder}"
            raise UserError(what)
        if not (found := list(_run_folders(folder))):
            raise UserError(f"no runs below {folder}: no folder there has a config.yaml")
        for run in sorted(found, key=lambda run: (_start_time(run), run)):
            runs.setdefault(run.resolve(), _read_run(run, check_rounds))
    return list(runs.values())


def read_rounds(run: RunResult) -> list[dict[str, Any]]:
    """Return the rounds of a run, without a last line that a killed run left incomplete.

    UserError if they are not as they were written, or if the run is unreadable.
    """
    if run.status == "unreadable":
        raise UserError(f"{run.folder}: {run.reason}")
    rounds = RoundsFile(run.folder, run.id)
    with damage_told(rounds.path, START_OVER):
        return rounds.read(run.summary.get(LAST_CHECK))


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


def _read_run(folder: Path, check_rounds: bool) -> RunResult:
    run = RunResult(folder, "unreadable", {}, {})
    reading, remedy = "config.yaml", WRITE_AGAIN
    try:
        config, run_id = _read_config(folder / reading)
        run = replace(run, config=config, id=run_id)
        reading = ORIGIN_FILE
        run = replace(run, origin=read_origin(folder, run_id))
        reading = "summary.json"
        run = _with_summary(run, folder / reading)
        if check_rounds:
            reading, remedy = ROUNDS_FILE, START_OVER
            RoundsFile(folder, run_id).lines(run.summary.get(LAST_CHECK))
        return run
    except OSError as error:
        reason = f"{reading} cannot be read ({in_words(error)})"
    except DamageError as error:
        reason = f"{reading} {error}; {remedy}"
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"{reading}: {_single_line(error)}"
    return unreadable(run, reason)


def unreadable(run: RunResult, reason: str) -> RunResult:
    """Return a run of which a file is damaged: it has no results."""
    return replace(run, status="unreadable", metrics={}, reason=reason, censored=frozenset())


def _with_summary(run: RunResult, path: Path) -> RunResult:
    try:
        summary = unseal_json(path.read_bytes(), run.id)
    except FileNotFoundError:
        return replace(run, status="running" if _is_locked(run.folder) else "unfinished")
    status = summary.get("status")
    if status == "failed":
        reason = _single_line(summary.get("error") or "")
        return replace(run, status=status, reason=reason, summary=summary)
    if status != "finished":
        raise ValueError("status must be finished or failed")
    metrics = _metrics(summary)
    censored = censored_lifespans(metrics)
    return replace(run, status=status, metrics=metrics, summary=summary, censored=censored)


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


def _read_config(path: Path) -> tuple[dict[str, Value], str]:
    """Return the settings and the id of a run."""
    text, run_id = unseal_text(path.read_bytes())
    try:
        loaded = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError("not YAML") from error
    config = flat(loaded) if isinstance(loaded, dict) else {}
    if not isinstance(config.get("defense"), str):
        raise ValueError("no defense name")
    return config, run_id


def _metrics(summary: Mapping[str, Any]) -> dict[str, float | None]:
    by_backdoor = summary.get("BA_by_backdoor") or {}
    if not isinstance(by_backdoor, dict):
        raise ValueError(f"BA_by_backdoor is {by_backdoor!r}")
    if missing := [key for key in METRICS if key not in summary]:
        raise ValueError(f"no {missing[0]}")
    known = (*METRICS, *STEALTH, *DURABILITY)  # older versions lack some
    metrics = {key: summary[key] for key in known if key in summary}
    metrics |= {f"BA/{name}": value for name, value in by_backdoor.items()}
    for key, value in metrics.items():
        if value is not None and not (type(value) in (int, float) and abs(value) <= LARGEST):
            raise ValueError(f"{key} is {value!r}")
    return metrics
