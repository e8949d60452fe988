"""How seconds and memory grow with the number of clients and of parameters.

    python -m benchmarks growth

A round (training, FedAvg, evaluation) of n clients of 100 images each in batches of 50, and of
networks of P parameters; each in a fresh process, whose peak of memory is read at the end.
`per unit` is seconds over those of the smallest case, over the growth of the work: 1 is linear,
less is better.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from benchmarks._fedbench import rank_group
from benchmarks._measure import Options, Row, clocked, resident
from fedbench.data import DATASETS
from fedbench.engine.launch import keep_freed_memory

CLIENTS = (10, 30, 100, 300)
WIDTHS = {10_000: 12, 100_000: 125, 1_000_000: 1_257, 10_000_000: 12_578}  # P -> hidden units
SAMPLES = 100  # of a client


def measure(options: Options) -> Iterator[Row]:
    for case, sizes in (("clients", CLIENTS), ("parameters", tuple(WIDTHS))):
        first: list[float] = []
        for size in sizes[:2] if options.quick else sizes:
            n, width = (size, 125) if case == "clients" else (10, WIDTHS[size])
            seconds, peak = alone(n, width, options)
            first = first or seconds
            growth = size / sizes[0]
            notes = {
                "per unit": statistics.median(seconds) / statistics.median(first) / growth,
                "peak MB": peak / 1e6,
            }
            yield Row(f"{size:,} {case}", "a round", seconds, notes=notes)


def alone(n: int, width: int, options: Options) -> tuple[list[float], int]:
    """Seconds of rounds in a fresh process, and its peak of memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=rounds, args=(n, width, options, theirs))
    process.start()
    theirs.close()
    answer: tuple[list[float], int] = ours.recv()
    process.join()
    return answer


def rounds(n: int, width: int, options: Options, connection: Connection) -> None:
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    copies = -(-n * SAMPLES // len(data.y_train))
    x, y = data.x_train.repeat(copies, 1, 1, 1), data.y_train.repeat(copies)
    data = replace(data, x_train=x[: n * SAMPLES], y_train=y[: n * SAMPLES])
    model = {"name": "mlp", "hidden": [width]}
    settings = {"n_clients": n, "non_iid": 0.0, "batch_size": 50}
    ranks, order = rank_group(data, model, "sequential", options.threads, **settings)

    def one_round() -> None:
        updates, buffers = ranks.train(order)
        ranks.evaluate(order.params + updates.mean(dim=0), buffers.mean(dim=0))

    one_round()
    seconds = [clocked(one_round) for _ in range(options.repeats)]
    connection.send((seconds, resident("VmHWM") or 0))
