"""fedbench, assembled without its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric

from fedbench.attack import ATTACKS
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.defense import DEFENSES, ServerView
from fedbench.engine.client_selection import Round
from fedbench.engine.executors import EXECUTORS
from fedbench.engine.launch import launch, make_fabric
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.models import MODELS
from fedbench.rng import generator

if TYPE_CHECKING:
    from benchmarks._frameworks import RoundServer, Task

CONFIG = RunConfig(local_epochs=1)


def rank_group(
    data: Dataset,
    model: Mapping[str, Any],
    executor: str,
    threads: int = 1,
    fabric: Fabric | None = None,
    switches: Mapping[str, bool] | None = None,
    **settings: Any,
) -> tuple[RankGroup, Round]:
    """Build CONFIG's clients, ready to train, and their first round, without an attack.

    `switches` are further settings of the executor. This is the only place in benchmarks/ that
    knows how fedbench assembles a rank.
    """
    built = EXECUTORS.build({"name": executor, "threads": threads, **(switches or {})})
    fabric = fabric or make_fabric(built)
    config = replace(CONFIG, **settings)
    torch.manual_seed(config.seed)
    network = MODELS.build(model).build(data.input_shape, data.n_classes)
    attack = ATTACKS.build({"name": "none"})
    rank_context = RankContext(config, data, network, attack, fabric)
    layout = rank_context.replica.layout
    round_ = Round(0, rank_context.selection.select(0), layout.read_params(), layout.read_buffers())
    return RankGroup(built, rank_context), round_


def thinned(data: Dataset, step: int) -> Dataset:
    """Keep every step-th training sample."""
    return replace(data, x_train=data.x_train[::step], y_train=data.y_train[::step])


def dataset_file(task: Task) -> Path:
    return Path(task.file).with_suffix(".dataset")


def run(task: Task, server: RoundServer) -> None:
    executor = EXECUTORS.build({"name": task.executor, "threads": task.threads})
    launch(executor, task.devices, on_rank, task, server)


def on_rank(fabric: Fabric, task: Task, server: RoundServer) -> None:
    from benchmarks._frameworks import NETWORKS

    data = torch.load(dataset_file(task), weights_only=False)
    model = NETWORKS[task.model]
    ranks, round_ = rank_group(data, model, task.executor, task.threads, fabric)
    if fabric.global_rank > 0:
        ranks.serve()
        return
    fedavg, initial = DEFENSES.build({"name": "fedavg"}), round_.params

    def one_round() -> None:
        nonlocal round_
        updates, _ = ranks.train(round_)
        view = ServerView(
            index=round_.index,
            client_ids=torch.tensor([participant.client for participant in round_.participants]),
            global_params=round_.params,
            initial_params=initial,
            layers=ranks.rank_context.replica.layout.layers,
            rng=generator(CONFIG.seed, "defense", round_.index),
        )
        aggregate, _ = fedavg.aggregate(updates, fedavg.init(), view)
        round_ = replace(round_, index=round_.index + 1, params=round_.params + aggregate.update)

    server.serve(one_round, lambda: round_.params)
    ranks.stop()
