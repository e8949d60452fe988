"""The frameworks that `peers` compares, each in a process of its own that does a round when told.

A side is a module `_<name>.py` with `run(task, link)`: it makes ready and lets `link.serve` call it
for every round.
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

from benchmarks._measure import clocked, in_turn
from fedbench.models import MODELS

NETWORKS: dict[str, dict[str, Any]] = {
    "784-100-10": {"name": "mlp", "hidden": [100]},
    "mlp": {"name": "mlp"},
    "cnn": {"name": "cnn"},
}
SHAPE, N_CLASSES = (1, 28, 28), 10  # of Fashion-MNIST
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
IN_A_ROW = 1.0  # seconds of rounds that are timed together
PATIENCE = 30  # seconds for a side to end by itself
LOGGED = 8000  # characters that are shown of a log: the first error is the cause of the others


@dataclass(frozen=True)
class Work:
    """What is in a task's file."""

    x: Tensor  # [n, 1, 28, 28] float32, as the network reads it
    raw: Tensor  # [n, 1, 28, 28] uint8
    mean: float
    std: float
    y: Tensor  # [n]
    shards: list[Tensor]  # client -> indices of its samples
    start: dict[str, Tensor]  # the model before the first round


class ImageByImage(Dataset[tuple[Tensor, int]]):
    """Images that are made ready one at a time, as torchvision's MNIST with the transforms
    ToTensor and Normalize of the frameworks' documentation does it: by the same steps."""

    def __init__(self, work: Work) -> None:
        self.images, self.labels = work.raw[:, 0], work.y
        self.mean, self.std = torch.tensor([[[work.mean]]]), torch.tensor([[[work.std]]])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].numpy(), mode="L")
        pixels = torch.from_numpy(np.array(image, copy=True)).view(1, *image.size[::-1])
        return pixels.float().div(255).sub_(self.mean).div_(self.std), int(self.labels[index])


@dataclass(frozen=True)
class Task:
    """What all sides do; only words and numbers, since Flower sends it to its clients as JSON."""

    file: str
    model: str  # one of NETWORKS
    n_clients: int
    batch_size: int
    lr: float
    momentum: float
    threads: int
    devices: int = 1  # processes, or cores for sides that have one
    executor: str = "auto"  # of fedbench
    image_by_image: bool = False  # how samples are made ready, in the peers

    def samples(self, work: Work) -> Dataset[Any]:
        """What a peer's data loaders load."""
        return ImageByImage(work) if self.image_by_image else TensorDataset(work.x, work.y)

    def network(self) -> nn.Module:
        """The network as one would write it, its numbers in PyTorch's usual order."""
        network = MODELS.build(NETWORKS[self.model]).build(SHAPE, N_CLASSES)
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return network

    def save(self, work: Work) -> None:
        torch.save(vars(work), self.file)

    def load(self) -> Work:
        return Work(**torch.load(self.file))


@dataclass(frozen=True)
class Link:
    """A side's end of the line."""

    connection: Connection

    def serve(self, one_round: Callable[[], object], params: Callable[[], Tensor]) -> None:
        """Does so many rounds for every order and answers with the seconds of one; at the end, an
        order for none, with params."""
        while n := self.connection.recv():
            self.connection.send(clocked(lambda n=n: [one_round() for _ in range(n)]) / n)
        self.connection.send(params().numpy())


@dataclass(frozen=True)
class Side:
    """A framework in its process, as the benchmark sees it."""

    name: str
    log: Path
    connection: Connection
    begun: float  # when its process was started

    def first_round(self) -> float:
        """Seconds from the start of the process to the end of its first round."""
        self.rounds(1)
        return time.perf_counter() - self.begun

    def rounds(self, n: int) -> float:
        """Its seconds for one round, of n in a row."""
        return float(self._answer_to(n))

    def end(self) -> Tensor:
        """The parameters [P] of its global model; it does no more rounds."""
        return torch.from_numpy(self._answer_to(0))

    def _answer_to(self, order: int) -> Any:
        try:
            self.connection.send(order)
            return self.connection.recv()
        except (EOFError, OSError) as error:
            told = self.log.read_text(errors="replace") if self.log.exists() else ""
            raise RuntimeError(f"{self.name} failed:\n{told[:LOGGED]}") from error


def rounds_in_turn(sides: Mapping[str, Side], repeats: int) -> dict[str, list[float]]:
    """Seconds of a round of each side in each repetition, all sides in turn; they are warm already.

    As many rounds in a row as take the fastest a second, by a first one of each that does not
    count: as in a run, where no processor rests between two rounds.
    """
    n = max(round(IN_A_ROW / min(side.rounds(1) for side in sides.values())), 1)
    clocks = {name: partial(side.rounds, n) for name, side in sides.items()}
    return in_turn(clocks, repeats, warm_up=False)


@contextmanager
def started(name: str, task: Task, label: str | None = None) -> Iterator[Side]:
    """A side at work; what it prints goes into a log beside the task's file."""
    log = Path(task.file).with_suffix(f".{label or name}.log".replace(" ", "_"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    begun = time.perf_counter()
    process = context.Process(target=_work, args=(name, task, theirs, log))
    process.start()
    theirs.close()  # so that the end of the process is the end of the line
    try:
        yield Side(name, log, ours, begun)
    finally:
        ours.close()
        process.join(PATIENCE)
        if process.is_alive():
            process.terminate()
            process.join()


def _work(name: str, task: Task, connection: Connection, log: Path) -> None:
    """The process of a side."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(OFFLINE)
    torch.set_num_threads(task.threads)
    try:
        importlib.import_module(f"benchmarks._{name}").run(task, Link(connection))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
