"""checkpoint.pt: everything the next round depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.results.atomic_files import write_atomically


@dataclass(frozen=True)
class Checkpoint:
    """The state between two rounds."""

    next_round: int  # negative while pretraining
    params: Tensor  # [P]
    buffers: Tensor  # [Q]
    initial_params: Tensor  # [P] before round 0
    initial_buffers: Tensor  # [Q]
    defense_state: Any


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    write_atomically(path, lambda file: torch.save(vars(checkpoint), file))


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint onto `device`, whichever device it was saved from.

    Runs no code stored in the file.
    """
    with _readable(path):
        return Checkpoint(**torch.load(path, map_location=device, weights_only=True))


def next_round_of(path: Path) -> int:
    """Read the number of a checkpoint's next round, without its tensors."""
    with _readable(path):
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return int(saved["next_round"])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error of torch.load into a UserError; its own messages fill a page."""
    try:
        yield
    except Exception as error:
        reason = type(error).__name__
        raise UserError(f"{path} is unreadable ({reason}); delete it to start over") from error
