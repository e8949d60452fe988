"""The model before round 0: given, or trained once for all runs that would train the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.report.console import Display
from fedbench.results.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedbench.results.storage import locked

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from fedbench.federation import Federation


def pretrained(config: RunConfig, federation: Federation, display: Display) -> Checkpoint:
    """The model before round 0: a given one, or trained once for all that would train the same."""
    if config.pretrained is not None:
        return _given(config.pretrained, federation)
    if not config.pretrain_rounds:
        return federation.initial()
    with alone(config):
        state = train(config, federation, display)
    return replace(state, defense_state=federation.defense.init())


def is_due(config: RunConfig) -> bool:
    """Whether there are benign rounds before round 0 that nobody has trained yet."""
    if config.pretrained is not None or not config.pretrain_rounds:
        return False
    path = _path(config)
    return not path.exists() or load_checkpoint(path).next_round < 0


@contextmanager
def alone(config: RunConfig) -> Iterator[None]:
    """One process at a time trains what others would repeat; they wait, and find it done."""
    with locked(_path(config).with_suffix(".lock")):
        yield


def train(config: RunConfig, federation: Federation, display: Display) -> Checkpoint:
    """The benign rounds that are left, each kept; to be called `alone`."""
    path = _path(config)
    state = load_checkpoint(path) if path.exists() else federation.initial()
    while state.next_round < 0:
        state = federation.pretrain(state)
        save_checkpoint(path, replace(state, defense_state=None))  # other defenses read it too
        display.pretrain(config.pretrain_rounds + state.next_round, config.pretrain_rounds)
    return state


def _path(config: RunConfig) -> Path:
    return Path(config.out, ".pretrained", f"{config.pretrain_id()}.pt")


def _given(path: str, federation: Federation) -> Checkpoint:
    """The model of a checkpoint as that before round 0."""
    try:
        given = load_checkpoint(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"pretrained={path}: no checkpoint of fedbench's") from error
    fresh = federation.initial()
    for what, have, want in (
        ("parameters", given.params, fresh.params),
        ("numbers in buffers", given.buffers, fresh.buffers),
    ):
        if have.shape != want.shape:
            raise UserError(
                f"pretrained={path}: a model of {have.numel():,} {what}, "
                f"this run's has {want.numel():,}"
            )
    return replace(
        fresh,
        next_round=0,
        params=given.params,
        buffers=given.buffers,
        initial_params=given.params,
        initial_buffers=given.buffers,
    )
