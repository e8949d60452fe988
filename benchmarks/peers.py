"""A round of fedbench against the same round of PyPI's byzfl and flwr, on as many cores.

    python -m benchmarks peers

The same 30 clients with the same samples (Fashion-MNIST if it is on this machine, else the part of
it that ships) train the same network one epoch from the same model, in the same number of steps of
SGD with momentum, and their models are averaged: nobody attacks, nothing is evaluated. The
frameworks do some rounds in turn, each in a process of its own. The peers' clients train in the
loop that their documentation shows, over a DataLoader: of tensors in memory, as good as it gets,
and of images that are made ready one by one, as the data sets of torchvision in their documentation
are. Once each has two cores: fedbench and flwr for two processes, byzfl for two threads, since it
has no other way to use them.

Start-up has rows of its own: from the start of the process to the end of its first round, less the
median of the rounds that follow. `MA` is the accuracy after all rounds, to see that all have
trained alike; byzfl's clients keep their momentum from round to round, the others' do not.

Differs from their documentation: byzfl is imported without its `__init__`, which wants torchvision;
both get fedbench's networks, and byzfl the loss that goes with them. Theirs keep PyTorch's usual
order of numbers; if fedbench takes another for itself, that is part of what is measured. flwr has
its server, its one worker and Ray in processes of their own, none of them bound to a core; a round
of it ends when the server looks for answers, ten times a second.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks._measure import Options, Row
from benchmarks._sides import Side, Task, rounds_in_turn, started
from benchmarks._tasks import accuracy, prepared, samples
from fedbench.data import Dataset

OURS = "fedbench"
# Peer -> the modules it needs, and how they are installed
PEERS = {
    "byzfl": (("byzfl", "scipy"), "pip install --no-deps byzfl==0.0.11 scipy"),
    "flwr": (("flwr", "ray"), "pip install 'flwr[simulation]'"),
}


# Network, whether images are made ready one by one, processes
CASES = (
    ("784-100-10", False, 1),
    ("784-100-10", True, 1),
    ("784-100-10", False, 2),
    ("cnn", False, 1),
)


def measure(options: Options) -> Iterator[Row]:
    peers = []
    for name, (modules, install) in PEERS.items():
        if all(map(found, modules)):
            peers.append(name)
        else:
            print(f"peers: {name} is not installed: {install}", file=sys.stderr)
    data = samples(options.quick)
    for model, image_by_image, devices in CASES[:1] if options.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            task = prepared(model, data, Path(folder), options.threads)
            task = replace(task, image_by_image=image_by_image, devices=devices)
            yield from compare(task, data, peers, options.repeats)


def found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def compare(task: Task, data: Dataset, peers: list[str], repeats: int) -> Iterator[Row]:
    how = "one by one" if task.image_by_image else "as tensors"
    case = f"{task.model}, {len(data.y_train):,} images {how}"
    case += f", {task.devices} cores" * (task.devices > 1)
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        first = {}
        for name in (OURS, *peers):  # one at a time, so that none is slowed down by another's start
            sides[name] = stack.enter_context(started(name, task))
            first[name] = sides[name].first_round()
        times = rounds_in_turn(sides, repeats)
        scores = {name: accuracy(task, side.end(), data) for name, side in sides.items()}
    start_up = {name: [first[name] - statistics.median(times[name])] for name in sides}
    if not peers:
        yield Row(f"{case}, a round", OURS, times[OURS], notes={"MA": scores[OURS]})
        yield Row(f"{case}, start-up", OURS, start_up[OURS])
    for peer in peers:
        notes = {"MA": scores[OURS], f"MA of {peer}": scores[peer]}
        yield Row.of(f"{case}, a round", times, OURS, peer, notes)
        yield Row.of(f"{case}, start-up", start_up, OURS, peer)
