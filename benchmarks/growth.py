"""How time and memory of a round grow with the numbers of clients and of parameters.

    python -m benchmarks growth

A round is training, FedAvg and evaluation; every client has 100 images in batches of 50. Each case
runs in a fresh process, which reports its peak memory at the end. `per unit` is the time relative
to the smallest case, divided by the growth of the work: 1 is linear growth, less is better.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from benchmarks._fedbench import rank_group
from benchmarks._measure import Options, Row, process_memory, time_call
from fedbench.data import DATASETS
from fedbench.engine.launch import keep_freed_memory

CLIENTS = (10, 30, 100, 300)
WIDTHS = {10_000: 12, 100_000: 125, 1_000_000: 1_257, 10_000_000: 12_578}  # P -> hidden units
SAMPLES = 100  # per client


def measure(options: Options) -> Iterator[Row]:
    for case, sizes in (("clients", CLIENTS), ("parameters", tuple(WIDTHS))):
        first: list[float] = []
        for size in sizes[:2] if options.quick else sizes:
            n, width = (size, 125) if case == "clients" else (10, WIDTHS[size])
            seconds, peak = measure_in_fresh_process(n, width, options)
            first = first or seconds
            growth = size / sizes[0]
            notes = {
                "per unit": statistics.median(seconds) / statistics.median(first) / growth,
                "peak MB": peak / 1e6,
            }
            yield Row(f"{size:,} {case}", "a round", seconds, notes=notes)


def measure_in_fresh_process(n: int, width: int, options: Options) -> tuple[list[float], int]:
    """Seconds of each round, and the peak memory in bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(n, width, options, theirs))
    process.start()
    theirs.close()
    result: tuple[list[float], int] = ours.recv()
    process.join()
    return result


def _main(n: int, width: int, options: Options, connection: Connection) -> None:
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    copies = -(-n * SAMPLES // len(data.y_train))
    x, y = data.x_train.repeat(copies, 1, 1, 1), data.y_train.repeat(copies)
    data = replace(data, x_train=x[: n * SAMPLES], y_train=y[: n * SAMPLES])
    model = {"name": "mlp", "hidden": [width]}
    ranks, round_ = rank_group(
        data, model, "sequential", options.threads, n_clients=n, non_iid=0.0, batch_size=50
    )

    def one_round() -> None:
        updates, buffers = ranks.train(round_)
        ranks.evaluate(round_.params + updates.mean(dim=0), buffers.mean(dim=0))

    one_round()
    seconds = [time_call(one_round) for _ in range(options.repeats)]
    connection.send((seconds, process_memory("VmHWM") or 0))
