"""Speedup of each fast path: switched on and off alone, for every network it serves.

    python -m benchmarks value

The fast paths are captured steps, fused SGD and stacked clients (vmap); the networks are the
shipped ones and smaller MLPs, with batches of 8 to 64. Both variants train the same clients, one
right after the other. `auto stacks` is 1 where executor=auto stacks clients; `worst` is the largest
relative difference between a client's stacked and sequential update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks._fedbench import rank_group, thinned
from benchmarks._measure import Options, Row, time_interleaved
from fedbench.data import DATASETS, Dataset, Images
from fedbench.engine.captured_step import can_capture
from fedbench.engine.client_selection import Round
from fedbench.engine.launch import keep_freed_memory
from fedbench.engine.local_training import Classifier
from fedbench.engine.ranks import RankGroup

BATCHES = (8, 16, 32, 64)
# Hidden layers of MLPs small enough for stacking.
SMALL: tuple[list[int], ...] = ([], [16], [32], [64], [100])
N_CLIENTS = 10


@dataclass(frozen=True)
class Case:
    """A network and the data it trains on."""

    name: str
    model: Mapping[str, Any]
    data: Dataset
    settings: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = BATCHES

    def group(self, batch_size: int, executor: str = "sequential", **how: Any) -> RankGroup:
        return self.prepared(batch_size, executor, **how)[0]

    def prepared(
        self, batch_size: int, executor: str = "sequential", **how: Any
    ) -> tuple[RankGroup, Round]:
        settings = {"n_clients": N_CLIENTS, **self.settings, "batch_size": batch_size}
        return rank_group(self.data, self.model, executor, **how, **settings)


def measure(options: Options) -> Iterator[Row]:
    keep_freed_memory()  # as every process of a run does
    for case in cases(options.quick):
        for batch_size in case.batches:
            if can_capture(case.group(batch_size).rank_context.replica.module):
                yield captured_steps(case, batch_size, options)
            yield fused_sgd(case, batch_size, options)
            if case.model["name"] == "mlp":
                yield stacked_clients(case, batch_size, options)


def cases(quick: bool) -> Iterator[Case]:
    """Every shipped network, with few enough samples that a round takes about a second at most."""
    images = DATASETS.build({"name": "fmnist_sample"}).load()
    if quick:
        yield Case("mlp [16]", {"name": "mlp", "hidden": [16]}, thinned(images, 50), batches=(8,))
        return
    for hidden in SMALL:
        yield Case(f"mlp {hidden}", {"name": "mlp", "hidden": hidden}, thinned(images, 3))
    yield Case("mlp", {"name": "mlp"}, thinned(images, 3))
    yield Case("cnn", {"name": "cnn"}, thinned(images, 15))
    yield Case("resnet18_light", {"name": "resnet18_light"}, _random_photographs(640))
    natural = {"partition": "natural"}
    words = DATASETS.build({"name": "reddit_sample"}).load()
    yield Case("lstm", {"name": "lstm"}, words, {**natural, "clip_grad": 0.25})
    packets = DATASETS.build({"name": "iot_sample"}).load()
    yield Case("gru", {"name": "gru"}, packets, natural)


def captured_steps(case: Case, batch_size: int, options: Options) -> Row:
    groups = {
        name: case.prepared(batch_size, threads=options.threads, switches={"capture": on})
        for name, on in (("captured steps", True), ("autograd", False))
    }
    times = time_interleaved(_rounds(groups), options.repeats)
    return Row.of(f"{case.name}, batch {batch_size}", times, "captured steps", "autograd")


def fused_sgd(case: Case, batch_size: int, options: Options) -> Row:
    groups = {
        name: case.prepared(batch_size, threads=options.threads)
        for name in ("fused SGD", "plain SGD")
    }
    module = groups["plain SGD"][0].rank_context.replica.module
    assert isinstance(module, Classifier)
    module.fused = False
    times = time_interleaved(_rounds(groups), options.repeats)
    return Row.of(f"{case.name}, batch {batch_size}", times, "fused SGD", "plain SGD")


def stacked_clients(case: Case, batch_size: int, options: Options) -> Row:
    """Use the default 30 clients, which fill stacks of up to 16."""
    full = replace(case, settings={**case.settings, "n_clients": 30})
    groups = {
        name: full.prepared(batch_size, name, threads=options.threads)
        for name in ("vectorized", "sequential")
    }
    chosen = full.group(batch_size, "auto").backend.name
    times = time_interleaved(_rounds(groups), options.repeats)
    stacked, alone = (ranks.train(round_)[0] for ranks, round_ in groups.values())
    errors = (stacked - alone).norm(dim=1) / alone.norm(dim=1)
    notes = {"worst": float(errors.max()), "auto stacks": float(chosen == "vectorized")}
    label = f"{case.name}, {stacked.shape[1]:,} parameters, batch {batch_size}"
    return Row.of(label, times, "vectorized", "sequential", notes)


def _rounds(groups: Mapping[str, tuple[RankGroup, Round]]) -> dict[str, partial[Any]]:
    return {name: partial(ranks.train, round_) for name, (ranks, round_) in groups.items()}


def _random_photographs(n: int) -> Images:
    """Images of CIFAR-10's size: the time of a step does not depend on what they show."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8)
    y = torch.arange(n) % 10
    return Images("random", x, y, x[:10], y[:10], 10, mean=0.5, std=0.25)
