"""Isolates a client's training: from other ranks, and from a Trainer that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from torch import distributed

from fedbench.errors import UserError

IS_INITIALIZED = distributed.is_initialized  # read once: two threads may be isolated at a time


@contextmanager
def isolated() -> Iterator[None]:
    """Hide a process group of the user's script, and the rank: clients train as in a process alone.

    Lightning's barriers and torchmetrics' `compute` would wait for processes that never join, and
    code for rank 0 would run for some clients only.
    """
    marker: Any = rank_zero_only
    rank = marker.rank
    distributed.is_initialized = _never
    marker.rank = 0
    try:
        yield
    finally:
        distributed.is_initialized = IS_INITIALIZED
        marker.rank = rank


def _never() -> bool:
    return False


class NoTrainer:
    """In the place of a Trainer. Without it, `current_epoch` and others would silently be 0."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise UserError(
            f"{self._name} uses {attribute} of Lightning's Trainer; set executor=trainer"
        )


@contextmanager
def without_trainer(module: LightningModule) -> Iterator[None]:
    """Make `self.log` do nothing, since it would warn, and any use of the Trainer an error."""
    modules = [part for part in module.modules() if isinstance(part, LightningModule)]
    for part in modules:
        absent = NoTrainer(type(part).__name__)
        vars(part).update(log=_nothing, log_dict=_nothing, _trainer=absent)
    try:
        yield
    finally:
        for part in modules:
            vars(part).update(_trainer=None)
            del vars(part)["log"], vars(part)["log_dict"]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
