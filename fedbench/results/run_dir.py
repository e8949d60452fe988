"""RunDir: writes the files of a run: config, origin, rounds, checkpoint, summary, traceback.

A run killed at any moment loses at most the round in progress.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.atomic_files import LOCK_FILE, locked, write_atomically
from fedbench.results.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedbench.results.origin import ORIGIN_FILE, Origin
from fedbench.results.provenance import provenance

if TYPE_CHECKING:
    import torch

Record = dict[str, Any]  # one line of rounds.jsonl, or summary.json


class RunDir:
    """The run directory `<out>/<name>/<run id>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds_file = path / "rounds.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"
        self.summary_file = path / "summary.json"
        self.traceback_file = path / "traceback.txt"
        self.config_file = path / "config.yaml"
        self.origin_file = path / ORIGIN_FILE

    def locked(self, wait: bool = True) -> AbstractContextManager[None]:
        """Hold the directory's lock, so that only one process runs these settings at a time.

        Without `wait`, raise a Timeout if another process holds it.
        """
        return locked(self.path / LOCK_FILE, wait)

    def finished(self) -> Record | None:
        """Return the summary of a finished run, None for any other run."""
        if not self.summary_file.exists():
            return None
        summary: Record = json.loads(self.summary_file.read_text())
        return summary if summary["status"] == "finished" else None

    def start(self, config: RunConfig, origin: Origin | None = None) -> None:
        """Write config.yaml unless it exists: its modification time is the run's start time.

        Write origin.json alike: a run keeps the origin of its first command.
        """
        if origin is not None and not self.origin_file.exists():
            content = json.dumps(_json_safe(asdict(origin)), indent=2) + "\n"
            write_atomically(self.origin_file, lambda file: file.write(content.encode()))
        if not self.config_file.exists():
            settings = asdict(config)
            del settings["rerun"]  # of the command, not of the run
            text = yaml.safe_dump(settings, sort_keys=False)
            write_atomically(self.config_file, lambda file: file.write(text.encode()))

    def clear(self) -> None:
        """Delete an earlier attempt, so that the run starts over."""
        results = (self.summary_file, self.checkpoint_file, self.rounds_file, self.traceback_file)
        for path in (*results, self.origin_file, self.config_file):
            path.unlink(missing_ok=True)

    def resume(self, device: torch.device) -> Checkpoint | None:
        """Load the last checkpoint onto `device`; drop lines of rounds.jsonl written after it."""
        if not self.checkpoint_file.exists():
            self.rounds_file.unlink(missing_ok=True)
            return None
        checkpoint = load_checkpoint(self.checkpoint_file, device)
        lines = self.rounds_file.read_bytes().splitlines(keepends=True)[: checkpoint.next_round]
        if len(lines) < checkpoint.next_round:
            raise UserError(
                f"{self.rounds_file} has {len(lines)} rounds, its checkpoint "
                f"{checkpoint.next_round}; delete {self.path} to start over"
            )
        write_atomically(self.rounds_file, lambda file: file.writelines(lines))
        return checkpoint

    def record(self, record: Record) -> None:
        """Append a line to rounds.jsonl; it counts once the next checkpoint is written."""
        line = json.dumps(_json_safe(record), allow_nan=False) + "\n"
        with self.rounds_file.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        save_checkpoint(self.checkpoint_file, checkpoint)

    def rounds(self) -> list[Record]:
        if not self.rounds_file.exists():
            return []
        return [json.loads(line) for line in self.rounds_file.read_text().splitlines()]

    def fail(self, error: Exception) -> None:
        """Mark the run as failed on behalf of a process that died."""
        with self.locked():
            if self.finished() is None:
                self.finish({"status": "failed", "error": str(error), **provenance()})

    def keep_traceback(self, error: BaseException) -> None:
        """Write traceback.txt."""
        text = "".join(traceback.format_exception(error))
        write_atomically(
            self.traceback_file, lambda file: file.write(text.encode("utf-8", "replace"))
        )

    def finish(self, summary: Record) -> None:
        """Write summary.json; a run that has finished at last needs no traceback."""
        if summary["status"] == "finished":
            self.traceback_file.unlink(missing_ok=True)
        text = json.dumps(_json_safe(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(self.summary_file, lambda file: file.write(text.encode()))


def _json_safe(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
