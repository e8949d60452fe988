"""Client training on 1 and 2 processes, compared to a hand-written loop.

    python -m benchmarks training

All train the same 30 clients on the same samples (Fashion-MNIST if it is on this machine, or else
the shipped sample of it) for one epoch in batches of 64 by SGD with momentum, and average the
updates. Each runs in a process of its own with one thread; their rounds are timed alternately. The
hand-written loop has the network as usually written. So the comparison includes everything fedbench
does for speed, such as pooling before ReLU and another memory format.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks._frameworks import NETWORKS, start_framework, time_rounds
from benchmarks._measure import Options, Row
from benchmarks._tasks import accuracy, load_dataset, prepare_task
from fedbench.data import Dataset

HAND, ONE, TWO = "by hand", "fedbench", "fedbench, 2 processes"


def measure(options: Options) -> Iterator[Row]:
    data = load_dataset(options.quick)
    for model in ("cnn",) if options.quick else NETWORKS:
        yield from compare(model, data, options)


def compare(model: str, data: Dataset, options: Options) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        task = prepare_task(model, data, Path(folder), options.threads)
        two = replace(task, devices=2)
        variants = {HAND: ("hand", task), ONE: ("fedbench", task), TWO: ("fedbench", two)}
        processes = {
            label: stack.enter_context(start_framework(name, variant, label))
            for label, (name, variant) in variants.items()
        }
        for process in processes.values():  # warm-up
            process.rounds(1)
        times = time_rounds(processes, options)
        scores = {
            f"MA {label}": accuracy(task, process.finish(), data)
            for label, process in processes.items()
        }
    case = f"{model}, {len(data.y_train):,} images"
    yield Row.of(case, times, ONE, HAND, scores)
    yield Row.of(case, times, TWO, ONE)
