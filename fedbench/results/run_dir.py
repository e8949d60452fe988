"""RunDir: writes the files of a run: config, origin, rounds, checkpoint, summary, traceback.

A run killed at any moment loses at most the round in progress.
"""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedbench.config import RunConfig
from fedbench.results.atomic_files import (
    LOCK_FILE,
    locked,
    remove,
    remove_partial_files,
    write_atomically,
)
from fedbench.results.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedbench.results.origin import ORIGIN_FILE, Origin
from fedbench.results.provenance import provenance
from fedbench.results.rounds_file import LAST_CHECK, RoundsFile
from fedbench.results.sealed import (
    DamageError,
    damage_told,
    seal_json,
    seal_text,
    unseal_json,
    unseal_text,
)

if TYPE_CHECKING:
    import torch

Record = dict[str, Any]  # one line of rounds.jsonl, or summary.json


class RunDir:
    """The run directory `<out>/<name>/<run id>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.rounds_file = RoundsFile(path, self.id)
        self.checkpoint_file = path / "checkpoint.pt"
        self.summary_file = path / "summary.json"
        self.traceback_file = path / "traceback.txt"
        self.config_file = path / "config.yaml"
        self.origin_file = path / ORIGIN_FILE
        # What a run leaves, apart from figures and the files of W&B
        self.files = (
            *(self.summary_file, self.checkpoint_file, self.rounds_file.path),
            *(self.traceback_file, self.origin_file, self.config_file),
        )
        self.remedy = f"delete {path} and repeat the command"

    def locked(self, wait: bool = True) -> AbstractContextManager[None]:
        """Hold the directory's lock, so that only one process runs these settings at a time.

        Without `wait`, raise a Timeout if another process holds it.
        """
        return locked(self.path / LOCK_FILE, wait)

    def finished(self) -> Record | None:
        """Return the summary of a finished run, None for any other run.

        Also None if summary.json or rounds.jsonl is damaged: whoever resumes the run mends or
        reports it.
        """
        try:
            summary = unseal_json(self.summary_file.read_bytes(), self.id)
            if summary["status"] != "finished":
                return None
            self.rounds_file.lines(summary[LAST_CHECK])
        except (OSError, DamageError):
            return None
        return summary

    def start(self, config: RunConfig, origin: Origin | None = None) -> list[str]:
        """Write config.yaml unless it exists: its modification time is the run's start time.

        Write origin.json alike: a run keeps the origin of its first command. Files that are
        damaged are written again, a summary.json when the run ends; return a line about each.
        """
        settings = asdict(config)
        del settings["rerun"]  # of the command, not of the run
        text = yaml.safe_dump(settings, sort_keys=False)
        lines = []
        if origin is not None:
            lines += self._write_once(self.origin_file, seal_json(asdict(origin), self.id))
        lines += self._write_once(self.config_file, seal_text(text, self.id))
        return lines + self._without_damaged(self.summary_file)

    def _write_once(self, path: Path, content: bytes) -> list[str]:
        """Write a file unless it is intact."""
        lines = self._without_damaged(path)
        if not path.exists():
            write_atomically(path, lambda file: file.write(content))
        return lines

    def _without_damaged(self, path: Path) -> list[str]:
        """Delete a file that is damaged, and return a line about it."""
        if (reason := self._damage(path)) is None:
            return []
        remove(path)
        return [f"{path.name} {reason}; it is written again"]

    def _damage(self, path: Path) -> str | None:
        """Return what is wrong with config.yaml, origin.json or summary.json, if anything is."""
        try:
            content = path.read_bytes()
            if path == self.config_file:
                run = unseal_text(content)[1]
                return None if run == self.id else f"is of another run, {run}"
            unseal_json(content, self.id)
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return "is a directory"
        except DamageError as error:
            return str(error)
        return None

    def clear(self) -> None:
        """Delete an earlier attempt, so that the run starts over."""
        for path in self.files:
            remove(path)

    def resume(self, device: torch.device) -> Checkpoint | None:
        """Load the last checkpoint onto `device`; drop lines of rounds.jsonl written after it."""
        remove_partial_files(self.path)
        if not self.checkpoint_file.exists():
            remove(self.rounds_file.path)
            return None
        checkpoint = self.load_checkpoint(device)
        with damage_told(self.rounds_file.path, self.remedy):
            self.rounds_file.keep(checkpoint.next_round)
        return checkpoint

    def load_checkpoint(self, device: torch.device) -> Checkpoint:
        """Return the last checkpoint; UserError if it is damaged or of another run."""
        return load_checkpoint(self.checkpoint_file, device, self.remedy, self.id)

    def record(self, record: Record) -> None:
        """Append a line to rounds.jsonl; it counts once the next checkpoint is written."""
        self.rounds_file.append(record)

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        save_checkpoint(self.checkpoint_file, checkpoint, self.id)

    def rounds(self) -> list[Record]:
        """Return the records in rounds.jsonl; UserError if it is damaged."""
        with damage_told(self.rounds_file.path, self.remedy):
            return self.rounds_file.read()

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
            remove(self.traceback_file)
            summary = {**summary, LAST_CHECK: self.rounds_file.end()}
        content = seal_json(summary, self.id)
        write_atomically(self.summary_file, lambda file: file.write(content))
