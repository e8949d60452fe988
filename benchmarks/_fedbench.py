"""fedbench's own training, put together without a command line; and as a side of others."""

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
from fedbench.engine.executors import EXECUTORS
from fedbench.engine.launch import fabric_of, launch
from fedbench.engine.population import Order, Population
from fedbench.engine.ranks import RankGroup
from fedbench.models import MODELS
from fedbench.rng import generator

if TYPE_CHECKING:
    from benchmarks._sides import Link, Task

CONFIG = RunConfig(local_epochs=1)


def workforce_of(
    data: Dataset,
    model: Mapping[str, Any],
    executor: str,
    threads: int = 1,
    fabric: Fabric | None = None,
    **settings: Any,
) -> tuple[RankGroup, Order]:
    """CONFIG's clients, ready to train, and the order of their first round; nobody attacks.

    The only place of benchmarks/ that knows how fedbench puts them together.
    """
    how = EXECUTORS.build({"name": executor, "threads": threads})
    fabric = fabric or fabric_of(how)
    config = replace(CONFIG, **settings)
    torch.manual_seed(config.seed)
    network = MODELS.build(model).build(data.input_shape, data.n_classes)
    attack = ATTACKS.build({"name": "none"})
    population = Population(config, data, network, attack, fabric)
    layout = population.layout
    order = Order(0, population.select(0), layout.read_params(), layout.read_buffers())
    return RankGroup(how, fabric, population), order


def thinned(data: Dataset, step: int) -> Dataset:
    """Every step-th of the training samples."""
    return replace(data, x_train=data.x_train[::step], y_train=data.y_train[::step])


def dataset_file(task: Task) -> Path:
    return Path(task.file).with_suffix(".dataset")


def run(task: Task, link: Link) -> None:
    how = EXECUTORS.build({"name": task.executor, "threads": task.threads})
    launch(how, task.devices, on_rank, task, link)


def on_rank(fabric: Fabric, task: Task, link: Link) -> None:
    from benchmarks._sides import NETWORKS

    data = torch.load(dataset_file(task), weights_only=False)
    model = NETWORKS[task.model]
    workforce, order = workforce_of(data, model, task.executor, task.threads, fabric)
    if fabric.global_rank > 0:
        workforce.serve()
        return
    rule, initial = DEFENSES.build({"name": "fedavg"}), order.params

    def one_round() -> None:
        nonlocal order
        updates, _ = workforce.train(order)
        view = ServerView(
            index=order.index,
            client_ids=torch.tensor([job.client for job in order.jobs]),
            global_params=order.params,
            initial_params=initial,
            layers=workforce.population.layout.layers,
            rng=generator(CONFIG.seed, "defense", order.index),
        )
        aggregate, _ = rule.aggregate(updates, rule.init(), view)
        order = replace(order, index=order.index + 1, params=order.params + aggregate.update)

    link.serve(one_round, lambda: order.params)
    workforce.dismiss()
