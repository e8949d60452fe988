"""A round of fedbench compared to the same round of byzfl and flwr (from PyPI), on as many cores.

    python -m benchmarks peers

All frameworks train the same 30 clients on the same samples (Fashion-MNIST if it is on this
machine, or else the shipped sample of it). Clients train the same network for one epoch from the
same model, with the same number of steps of SGD with momentum, and the server averages their
models. There is no attack and no evaluation. Each framework has a process of its own; their rounds
are timed alternately.

Clients of byzfl and flwr run the training loop of their documentation, over a DataLoader. It reads
either tensors in memory, the best case, or images that are prepared one by one, like torchvision's
data sets in their documentation. One case has two cores: fedbench and flwr use two processes, byzfl
two threads, its only way to use two cores.

Start-up has rows of its own: the time from the start of the process to the end of the first round,
minus the median of later rounds. `MA` is the accuracy after all rounds; it shows that all
frameworks learn equally well. byzfl's clients keep their momentum across rounds, the others do not.

Differs from their documentation: byzfl is imported without its `__init__`, which needs torchvision;
both use fedbench's networks, and byzfl the loss that goes with them. Their networks keep PyTorch's
default memory format; if fedbench chooses another, the comparison includes that. flwr runs its
server, its one worker and Ray in processes of their own, none bound to a core. Its rounds end when
the server polls for replies, ten times a second.
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

from benchmarks._frameworks import FrameworkProcess, Task, start_framework, time_rounds
from benchmarks._measure import Options, Row
from benchmarks._tasks import accuracy, load_dataset, prepare_task
from fedbench.data import Dataset

OURS = "fedbench"
# Framework -> the modules it needs, and how to install them
PEERS = {
    "byzfl": (("byzfl", "scipy"), "pip install --no-deps byzfl==0.0.11 scipy"),
    "flwr": (("flwr", "ray"), "pip install 'flwr[simulation]'"),
}
# Network, whether images are prepared one by one, cores
CASES = (
    ("784-100-10", False, 1),
    ("784-100-10", True, 1),
    ("784-100-10", False, 2),
    ("cnn", False, 1),
)


def measure(options: Options) -> Iterator[Row]:
    peers = []
    for name, (modules, install) in PEERS.items():
        if all(map(is_installed, modules)):
            peers.append(name)
        else:
            print(f"peers: skipping {name}; to install it: {install}", file=sys.stderr)
    data = load_dataset(options.quick)
    for model, per_image, devices in CASES[:1] if options.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            task = prepare_task(model, data, Path(folder), options.threads)
            task = replace(task, per_image=per_image, devices=devices)
            yield from compare(task, data, peers, options)


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def compare(task: Task, data: Dataset, peers: list[str], options: Options) -> Iterator[Row]:
    format_ = "one by one" if task.per_image else "as tensors"
    case = f"{task.model}, {len(data.y_train):,} images {format_}"
    case += f", {task.devices} cores" * (task.devices > 1)
    with ExitStack() as stack:
        processes: dict[str, FrameworkProcess] = {}
        first = {}
        for name in (OURS, *peers):  # one at a time, so that they do not slow each other down
            processes[name] = stack.enter_context(start_framework(name, task))
            first[name] = processes[name].first_round()
        times = time_rounds(processes, options)
        scores = {name: accuracy(task, each.finish(), data) for name, each in processes.items()}
    start_up = {name: [first[name] - statistics.median(times[name])] for name in processes}
    if not peers:
        yield Row(f"{case}, a round", OURS, times[OURS], notes={"MA": scores[OURS]})
        yield Row(f"{case}, start-up", OURS, start_up[OURS])
    for peer in peers:
        notes = {"MA": scores[OURS], f"MA of {peer}": scores[peer]}
        yield Row.of(f"{case}, a round", times, OURS, peer, notes)
        yield Row.of(f"{case}, start-up", start_up, OURS, peer)
