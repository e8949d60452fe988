"""Cost of Lightning's Trainer: `executor=trainer` against `executor=sequential`, same clients.

    python -m benchmarks trainer

The networks do not need the Trainer, so that both executors can train them, to the same bits. A
measurement is a round of 10 clients for one epoch. `ms/client` is the median time of a client in
the Trainer, `more/client` by how much that exceeds sequential training.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks._fedbench import rank_group
from benchmarks._measure import Options, Row, time_interleaved
from fedbench.data import DATASETS, Dataset
from fedbench.engine.launch import keep_freed_memory

NETWORKS = ("mlp", "cnn")
SAMPLES = (100, 600)  # per client
N_CLIENTS = 10
BATCH_SIZE = 32


def measure(options: Options) -> Iterator[Row]:
    keep_freed_memory()  # as every process of a run does
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    for network in NETWORKS[:1] if options.quick else NETWORKS:
        for n in SAMPLES[:1] if options.quick else SAMPLES:
            yield trainer_and_sequential(network, n, data, options)


def trainer_and_sequential(network: str, n: int, data: Dataset, options: Options) -> Row:
    chosen = slice(n * N_CLIENTS)
    few = replace(data, x_train=data.x_train[chosen], y_train=data.y_train[chosen])
    settings: dict[str, Any] = {"n_clients": N_CLIENTS, "batch_size": BATCH_SIZE}
    rounds = {
        name: rank_group(few, {"name": network}, name, options.threads, **settings)
        for name in ("trainer", "sequential")
    }
    times = time_interleaved(
        {name: partial(ranks.train, round_) for name, (ranks, round_) in rounds.items()},
        options.repeats,
    )
    updates = [ranks.train(round_)[0] for ranks, round_ in rounds.values()]
    assert torch.equal(*updates), "the Trainer must give the bits of sequential training"
    pairs = zip(times["trainer"], times["sequential"], strict=True)
    more = statistics.median(a - b for a, b in pairs) / N_CLIENTS * 1000
    notes = {
        "ms/client": statistics.median(times["trainer"]) / N_CLIENTS * 1000,
        "more/client": more,
    }
    return Row.of(f"{network}, {n} samples per client", times, "trainer", "sequential", notes)
