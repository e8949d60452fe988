"""The run directory: written so that a kill at any moment loses nothing but the round under way."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fedbench import __version__
from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.metrics import mean, rates
from fedbench.results.reader import STEALTH
from fedbench.results.storage import locked, write_atomically

Record = dict[str, Any]  # a line of rounds.jsonl, or summary.json


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round depends on."""

    next_round: int
    params: Tensor  # [P]
    buffers: Tensor  # [Q]
    initial_params: Tensor  # [P] before round 0
    initial_buffers: Tensor  # [Q]
    defense_state: Any


class RunDir:
    """`<out>/<name>/<run id>`: config.yaml, rounds.jsonl, checkpoint.pt, summary.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds_file = path / "rounds.jsonl"
        self.checkpoint_file = path / "checkpoint.pt"
        self.summary_file = path / "summary.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time works in a run directory; the next one waits, and finds it done."""
        with locked(self.path / ".lock"):
            yield

    def finished(self) -> Record | None:
        """The summary of a finished run."""
        if not self.summary_file.exists():
            return None
        summary: Record = json.loads(self.summary_file.read_text())
        return summary if summary["status"] == "finished" else None

    def start(self, config: RunConfig) -> None:
        """Writes config.yaml, once: its time tells when the run was first started."""
        path = self.path / "config.yaml"
        if not path.exists():
            text = yaml.safe_dump(asdict(config), sort_keys=False)
            write_atomically(path, lambda file: file.write(text.encode()))

    def resume(self) -> Checkpoint | None:
        """The last checkpoint, with rounds.jsonl cut back to the rounds that it contains."""
        if not self.checkpoint_file.exists():
            self.rounds_file.unlink(missing_ok=True)
            return None
        checkpoint = load_checkpoint(self.checkpoint_file)
        lines = self.rounds_file.read_bytes().splitlines(keepends=True)[: checkpoint.next_round]
        if len(lines) < checkpoint.next_round:
            raise UserError(
                f"{self.rounds_file} has {len(lines)} rounds, its checkpoint "
                f"{checkpoint.next_round}; delete {self.path} to start over"
            )
        write_atomically(self.rounds_file, lambda file: file.writelines(lines))
        return checkpoint

    def record(self, record: Record) -> None:
        """Adds a line; the checkpoint that follows makes it count."""
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
        """Marks a run failed that cannot do it any more itself."""
        with self.locked():
            if self.finished() is None:
                self.finish({"status": "failed", "error": str(error)})

    def finish(self, summary: Record) -> None:
        text = json.dumps(_json_safe(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(self.summary_file, lambda file: file.write(text.encode()))


def summarise(rounds: list[Record]) -> Record:
    """What a run comes to: MA and BA after its last round, TPR and TNR over the attacked rounds.

    A run without an attack has no poisoned update, so its TPR is None; its TNR is the share of
    honest updates that were kept, over all rounds.
    """
    judged = [record for record in rounds if record["attacked"]] or rounds
    tpr, tnr = rates(client for record in judged for client in record["clients"])
    last = rounds[-1]
    seconds = {step: sum(record["seconds"][step] for record in rounds) for step in last["seconds"]}
    return {
        "status": "finished",
        "MA": last["MA"],
        "BA": last["BA"],
        "TPR": tpr,
        "TNR": tnr,
        "AUC": mean(record["AUC"] for record in judged),
        **{key: mean(record[key] for record in judged) for key in STEALTH},
        "BA_by_backdoor": last["BA_by_backdoor"],
        "rounds": len(rounds),
        "seconds": sum(seconds.values()),
        "seconds_by_step": seconds,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "lightning", "numpy")}
    return {"fedbench": __version__, "python": platform.python_version(), **packages}


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    fields = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
    write_atomically(path, lambda file: torch.save(fields, file))


def load_checkpoint(path: Path) -> Checkpoint:
    try:
        return Checkpoint(**torch.load(path, weights_only=True))
    except Exception as error:
        reason = type(error).__name__  # torch's own messages are a page long
        raise UserError(f"{path} is unreadable ({reason}); delete it to start over") from error


def _json_safe(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
