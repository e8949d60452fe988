"""Runs frameworks in processes of their own and times their rounds alternately.

A framework is a module `_<name>.py` with `run(task, server)`. It prepares the task and then passes
a function that does one round to `server.serve`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks._measure import Options, repeat_interleaved, time_call
from fedbench.models import MODELS

NETWORKS: dict[str, dict[str, Any]] = {
    "784-100-10": {"name": "mlp", "hidden": [100]},
    "mlp": {"name": "mlp"},
    "cnn": {"name": "cnn"},
}
SHAPE, N_CLASSES = (1, 28, 28), 10  # of Fashion-MNIST
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
MIN_SECONDS = 1.0  # of consecutive rounds that are timed as one
EXIT_TIMEOUT = 30  # seconds for a process to exit by itself
LOG_CHARACTERS = 8000  # shown from the start of a log: the first error causes the others


@dataclass(frozen=True)
class TaskData:
    """Contents of a task's file."""

    x: Tensor  # [n, 1, 28, 28] float32, the network's input
    raw: Tensor  # [n, 1, 28, 28] uint8
    mean: float
    std: float
    y: Tensor  # [n]
    shards: list[Tensor]  # client -> indices of its samples
    start: dict[str, Tensor]  # the model before the first round


class PerImageDataset(Dataset[tuple[Tensor, int]]):
    """Prepares images one at a time.

    Repeats the steps of torchvision's MNIST with the transforms ToTensor and Normalize, which the
    frameworks' documentation uses.
    """

    def __init__(self, data: TaskData) -> None:
        self.images, self.labels = data.raw[:, 0], data.y
        self.mean, self.std = torch.tensor([[[data.mean]]]), torch.tensor([[[data.std]]])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].numpy(), mode="L")
        pixels = torch.from_numpy(np.array(image, copy=True)).view(1, *image.size[::-1])
        return pixels.float().div(255).sub_(self.mean).div_(self.std), int(self.labels[index])


@dataclass(frozen=True)
class Task:
    """What all frameworks do. Plain values only: Flower sends it to its clients as JSON."""

    file: str
    model: str  # one of NETWORKS
    n_clients: int
    batch_size: int
    lr: float
    momentum: float
    threads: int
    devices: int = 1  # processes, or cores for frameworks with one process
    executor: str = "auto"  # fedbench only
    per_image: bool = False  # whether the other frameworks prepare images one at a time

    def samples(self, data: TaskData) -> Dataset[Any]:
        """Dataset for the DataLoaders of the other frameworks."""
        return PerImageDataset(data) if self.per_image else TensorDataset(data.x, data.y)

    def network(self) -> nn.Module:
        """The network in PyTorch's default memory format."""
        network = MODELS.build(NETWORKS[self.model]).build(SHAPE, N_CLASSES)
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return network

    def save(self, data: TaskData) -> None:
        torch.save(vars(data), self.file)

    def load(self) -> TaskData:
        return TaskData(**torch.load(self.file))


@dataclass(frozen=True)
class RoundServer:
    """Does rounds on request, in the framework's process."""

    connection: Connection

    def serve(self, one_round: Callable[[], object], params: Callable[[], Tensor]) -> None:
        """Answer a request for n rounds with the seconds per round, and one for 0 with params.

        A request for 0 rounds is the last.
        """
        while n := self.connection.recv():
            self.connection.send(time_call(partial(_repeat, one_round, n)) / n)
        self.connection.send(params().numpy())


def _repeat(one_round: Callable[[], object], n: int) -> None:
    for _ in range(n):
        one_round()


@dataclass(frozen=True)
class FrameworkProcess:
    """A framework's process, seen from the benchmark."""

    name: str
    log: Path
    connection: Connection
    started: float  # by time.perf_counter

    def first_round(self) -> float:
        """Do the first round; return the seconds since the process was started."""
        self.rounds(1)
        return time.perf_counter() - self.started

    def rounds(self, n: int) -> float:
        """Do n consecutive rounds; return the seconds per round."""
        return float(self._request(n))

    def finish(self) -> Tensor:
        """Stop the framework; return the parameters [P] of its global model."""
        return torch.from_numpy(self._request(0))

    def _request(self, n_rounds: int) -> Any:
        try:
            self.connection.send(n_rounds)
            return self.connection.recv()
        except (EOFError, OSError) as error:
            output = self.log.read_text(errors="replace") if self.log.exists() else ""
            raise RuntimeError(f"{self.name} failed:\n{output[:LOG_CHARACTERS]}") from error


def time_rounds(
    processes: Mapping[str, FrameworkProcess], options: Options
) -> dict[str, list[float]]:
    """Time rounds of all frameworks alternately; return the seconds per round of each repetition.

    All must be warmed up. A measurement is as many consecutive rounds as take the fastest framework
    MIN_SECONDS: in a real run, too, cores do not idle between rounds. With --quick it is one round.
    """
    n = 1
    if not options.quick:
        fastest = min(process.rounds(1) for process in processes.values())
        n = max(round(MIN_SECONDS / fastest), 1)
    timers = {name: partial(process.rounds, n) for name, process in processes.items()}
    return repeat_interleaved(timers, options.repeats, warm_up=False)


@contextmanager
def start_framework(name: str, task: Task, label: str | None = None) -> Iterator[FrameworkProcess]:
    """Start a framework; its output goes to a log next to the task's file."""
    log = Path(task.file).with_suffix(f".{label or name}.log".replace(" ", "_"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = time.perf_counter()
    process = context.Process(target=_main, args=(name, task, theirs, log))
    process.start()
    theirs.close()  # if the process dies, our end of the pipe sees it
    try:
        yield FrameworkProcess(name, log, ours, started)
    finally:
        ours.close()
        process.join(EXIT_TIMEOUT)
        if process.is_alive():
            process.terminate()
            process.join()


def _main(name: str, task: Task, connection: Connection, log: Path) -> None:
    """Main function of a framework's process."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(NO_TELEMETRY)
    torch.set_num_threads(task.threads)
    try:
        importlib.import_module(f"benchmarks._{name}").run(task, RoundServer(connection))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
