"""checkpoint.pt: everything the next round depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from fedbench.results.atomic_files import write_atomically
from fedbench.results.sealed import DamageError, SealingWriter, damage_told, require_intact


@dataclass(frozen=True)
class Checkpoint:
    """The state between two rounds."""

    next_round: int  # negative while pretraining
    params: Tensor  # [P]
    buffers: Tensor  # [Q]
    initial_params: Tensor  # [P] before round 0
    initial_buffers: Tensor  # [Q]
    defense_state: Any


def save_checkpoint(path: Path, checkpoint: Checkpoint, run: str) -> None:
    """Write a checkpoint of the run or pretraining with the id `run`."""

    def write(file: BinaryIO) -> None:
        writer = SealingWriter(file)
        try:
            torch.save(vars(checkpoint), cast("BinaryIO", writer))
        finally:
            writer.end(run)

    write_atomically(path, write)


def load_checkpoint(
    path: Path, device: torch.device, remedy: str, run: str | None = None
) -> Checkpoint:
    """Read a checkpoint onto `device`, whichever device it was saved from.

    Runs no code stored in the file. UserError, which ends with `remedy`, if it is not as it was
    written, not finite, or not of `run`.
    """
    with damage_told(path, remedy):
        require_intact(path, run)
        with _readable():
            checkpoint = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
        if not (checkpoint.params.isfinite().all() and checkpoint.buffers.isfinite().all()):
            raise DamageError("holds a model that is not finite")
    return checkpoint


def next_round_of(path: Path) -> int | None:
    """Read the number of a checkpoint's next round, without its tensors; None if it is damaged."""
    try:
        with _readable():
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return int(saved["next_round"])
    except (DamageError, OSError):
        return None


@contextmanager
def _readable() -> Iterator[None]:
    """Shorten any error of torch.load, whose own messages fill a page."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise DamageError(f"is unreadable ({type(error).__name__})") from error
