"""Helpers for tests of the engine: attacks, settings, and the updates of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fedbench.engine.client_selection import Round
from fedbench.engine.executors import Executor
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup

MakeRankContext = Callable[..., RankContext]

# Together, these attacks use everything that an attack may change in a local training.
ATTACK_SETTINGS: dict[str, dict[str, Any]] = {
    "constrain_and_scale": {"alpha": 0.5, "epochs": 3, "gamma": "bounded"},
    "edge_case": {"backdoors": ["patch"], "lr": 0.02, "lr_decay": 0.1, "lr_decay_at": [0.5]},
    "adaptive_baybfed": {"epochs": 2},
    "gaussian": {},
    "none": {},
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"partition": "dirichlet", "dirichlet_alpha": 0.3},  # clients of very different sizes
    {"clip_grad": 0.3, "weight_decay": 0.01},
    {"momentum": 0.0, "local_epochs": 3, "batch_size": 7},
]


class DataDependent(nn.Module):
    """Runs different operations on different samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def round_of(rank_context: RankContext, index: int) -> Round:
    layout = rank_context.replica.layout
    participants = rank_context.selection.select(index)
    return Round(index, participants, layout.read_params(), layout.read_buffers())


def first_round(rank_context: RankContext) -> Round:
    return round_of(rank_context, 0)


def updates_of(executor: Executor, rank_context: RankContext, index: int = 0) -> Tensor:
    """Return the updates [N, P] of a round, by default the first; restore the model."""
    round_ = round_of(rank_context, index)
    updates, _ = RankGroup(executor, rank_context).train(round_)
    rank_context.replica.layout.write(round_.params, round_.buffers)
    return updates
