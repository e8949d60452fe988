"""checkpoint.pt: everything the next round depends on."""

from __future__ import annotations

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


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without running any code stored in it."""
    try:
        return Checkpoint(**torch.load(path, weights_only=True))
    except Exception as error:
        reason = type(error).__name__  # torch's own messages fill a page
        raise UserError(f"{path} is unreadable ({reason}); delete it to start over") from error
