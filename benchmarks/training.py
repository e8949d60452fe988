"""Client training through the harness against a loop written by hand, on 1 and 2 processes.

    python -m benchmarks training

All train the same 30 clients on the same samples (Fashion-MNIST if it is on this machine, else the
part of it that ships), an epoch in batches of 64 by SGD with momentum, and average the updates.
Each is in a process of its own, with one thread, and they do some rounds in turn. The loop by hand
has the network as it is usually written; pooling before ReLU, the order of numbers in memory and
all else that fedbench does for speed is part of what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks._measure import Options, Row
from benchmarks._sides import NETWORKS, rounds_in_turn, started
from benchmarks._tasks import accuracy, prepared, samples
from fedbench.data import Dataset

HAND, ONE, TWO = "by hand", "fedbench", "fedbench, 2 processes"


def measure(options: Options) -> Iterator[Row]:
    data = samples(options.quick)
    for model in NETWORKS:
        yield from compare(model, data, options)


def compare(model: str, data: Dataset, options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        task = prepared(model, data, Path(folder), options.threads)
        two = replace(task, devices=2)
        kinds = {HAND: ("hand", task), ONE: ("fedbench", task), TWO: ("fedbench", two)}
        sides = {
            label: stack.enter_context(started(name, work, label))
            for label, (name, work) in kinds.items()
        }
        for side in sides.values():  # to warm up
            side.rounds(1)
        times = rounds_in_turn(sides, options.repeats)
        scores = {f"MA {label}": accuracy(task, side.end(), data) for label, side in sides.items()}
    case = f"{model}, {len(data.y_train):,} images"
    yield Row.of(case, times, ONE, HAND, scores)
    yield Row.of(case, times, TWO, ONE)
