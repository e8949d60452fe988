"""Clients stacked into one network against one client after another, by size and batch.

    python -m benchmarks vectorized

A round of 30 clients on the images that ship, by each executor in one process; both end with the
same updates but for rounding. What `executor=auto` takes is by this table. `worst` is the largest
relative difference of a client's update, `median` that of most clients: where a unit is at zero but
for rounding, a client can take another way.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks._fedbench import rank_group, thinned
from benchmarks._measure import Options, Row, side_by_side
from fedbench.data import DATASETS, Dataset
from fedbench.engine.launch import keep_freed_memory

HIDDEN = ([], [16], [32], [64], [100], [256, 128])
BATCHES = (8, 32, 64)


def measure(options: Options) -> Iterator[Row]:
    keep_freed_memory()  # as every process of a run does
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    if options.quick:
        yield compare([16], 32, thinned(data, 5), options)
        return
    for hidden in HIDDEN:
        for batch_size in BATCHES:
            yield compare(hidden, batch_size, data, options)


def compare(hidden: list[int], batch_size: int, data: Dataset, options: Options) -> Row:
    made = {
        name: rank_group(
            data, {"name": "mlp", "hidden": hidden}, name, options.threads, batch_size=batch_size
        )
        for name in ("vectorized", "sequential", "auto")
    }
    chosen = made.pop("auto")[0].trainer.name
    cases = {
        name: lambda ranks=ranks, order=order: ranks.train(order)
        for name, (ranks, order) in made.items()
    }
    times = side_by_side(cases, options.repeats)
    stacked, alone = (ranks.train(order)[0] for ranks, order in made.values())
    errors = (stacked - alone).norm(dim=1) / alone.norm(dim=1)
    n_params = stacked.shape[1]
    notes = {
        "worst": float(errors.max()),
        "median": float(errors.median()),
        "auto takes it": float(chosen == "vectorized"),
    }
    case = f"{n_params:,} parameters, batch {batch_size}"
    return Row.of(case, times, "vectorized", "sequential", notes)
