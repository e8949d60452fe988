"""The model before round 0: loaded, or pretrained once for all runs that share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.display.run_display import RunDisplay
from fedbench.errors import UserError
from fedbench.results.atomic_files import locked, remove
from fedbench.results.checkpoint import (
    Checkpoint,
    load_checkpoint,
    next_round_of,
    save_checkpoint,
)

if TYPE_CHECKING:  # Lightning takes seconds to import; user errors must print before that
    from fedbench.federation import Federation
    from fedbench.plan import Plan


def pretrained(plan: Plan, federation: Federation, display: RunDisplay) -> Checkpoint:
    """The state before round 0, from `pretrained=PATH` or from shared benign rounds."""
    config = plan.config
    if config.pretrained is not None and plan.pretrained is not None:
        return _load(config.pretrained, plan.pretrained, federation)
    if not config.pretrain_rounds:
        return federation.initial()
    with exclusive(plan):
        state = train(plan, federation, display)
    return replace(state, defense_state=federation.defense.init())


def is_due(plan: Plan) -> bool:
    """Whether benign rounds before round 0 are still to be trained."""
    return rounds_due(plan) > 0


def rounds_due(plan: Plan) -> int:
    """Number of benign rounds before round 0 that are still to be trained.

    Reads no tensors. A model that turns out to be damaged is due after all, in `train`.
    """
    if plan.config.pretrained is not None or not plan.config.pretrain_rounds:
        return 0
    path = _path(plan)
    if path.exists() and not plan.starts_over(path):
        next_round = next_round_of(path)
        if next_round is not None:
            return max(-next_round, 0)
    return plan.config.pretrain_rounds


@contextmanager
def exclusive(plan: Plan) -> Iterator[None]:
    """Let one process pretrain while others that need the same model wait for it."""
    with locked(_path(plan).with_suffix(".lock")):
        yield


def train(plan: Plan, federation: Federation, display: RunDisplay) -> Checkpoint:
    """Train the remaining benign rounds, saving each; call this while `exclusive`."""
    config, path = plan.config, _path(plan)
    path.with_name(f".{path.name}.partial").unlink(missing_ok=True)  # of a killed process
    state = _shared(plan, federation, display) or federation.initial()
    if state.next_round < 0:
        federation.ranks.on_trained = display.trained
        display.begin_pretraining(config.pretrain_rounds + state.next_round, config.pretrain_rounds)
    while state.next_round < 0:
        state = federation.pretrain(state)
        shared = replace(state, defense_state=None)  # by all defenses
        save_checkpoint(path, shared, plan.pretrain_id)
        display.pretrain(config.pretrain_rounds + state.next_round, config.pretrain_rounds)
    return state


def _shared(plan: Plan, federation: Federation, display: RunDisplay) -> Checkpoint | None:
    """The model that an earlier run has left; None if there is none, or if it is damaged."""
    path = _path(plan)
    if not path.exists() or plan.starts_over(path):
        return None
    try:
        return load_checkpoint(path, federation.device, "it is trained again", plan.pretrain_id)
    except UserError as error:
        display.say(f"{plan.title}  {error}")
        remove(path)
        return None


def _path(plan: Plan) -> Path:
    return Path(plan.config.out, ".pretrained", f"{plan.pretrain_id}.pt")


def _load(path: str, file: Path, federation: Federation) -> Checkpoint:
    """Start round 0 from the model of a checkpoint, which the user named by `path`."""
    try:
        loaded = load_checkpoint(file, federation.device, "name another")
    except UserError as error:
        reason = str(error).removeprefix(str(file))
        raise UserError(f"pretrained={path}: not a fedbench checkpoint, it{reason}") from error
    fresh = federation.initial()
    for what, have, want in (
        ("parameters", loaded.params, fresh.params),
        ("buffer values", loaded.buffers, fresh.buffers),
    ):
        if have.shape != want.shape:
            raise UserError(
                f"pretrained={path}: its model has {have.numel():,} {what}, "
                f"this run's has {want.numel():,}"
            )
    return replace(
        fresh,
        next_round=0,
        params=loaded.params,
        buffers=loaded.buffers,
        initial_params=loaded.params,
        initial_buffers=loaded.buffers,
    )
