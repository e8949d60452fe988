"""How the clients of a round are trained: one after another, on one device or dealt to several."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.registry import Registry

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from lightning.fabric import Fabric

    from fedbench.backdoor import Implant
    from fedbench.population import Order, Population

    Message = Order | tuple[Implant, ...] | None  # none: there is nothing more to do

ACCELERATORS = ("cpu", "cuda", "mps", "auto")
PRECISIONS = ("32-true", "bf16-mixed")

# Else Lightning tells of every process that it starts. Here, so that those processes hear it too.
for package in ("lightning.fabric", "lightning.pytorch"):
    logging.getLogger(f"{package}.utilities").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Executor(ABC):
    """Settings of an executor. Lightning Fabric owns devices, precision and processes."""

    devices: int = 1  # processes, or GPUs; each trains its share of the clients
    accelerator: str = "cpu"  # cpu, cuda, mps, or auto
    precision: str = "32-true"
    threads: int = 1  # of each process; another number may change the last bits of the results

    def __post_init__(self) -> None:
        if self.devices < 1 or self.threads < 1:
            raise ValueError(
                f"devices and threads must be at least 1, got {self.devices}, {self.threads}"
            )
        if self.accelerator not in ACCELERATORS:
            raise ValueError(f"accelerator must be one of {ACCELERATORS}, got {self.accelerator!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")

    def fabric(self) -> Fabric:
        from lightning.fabric import Fabric

        # Processes that run a function, not the command line again, which may be a whole sweep's.
        strategy = "auto" if self.devices == 1 else "ddp_spawn"
        try:
            return Fabric(
                accelerator=self.accelerator,
                strategy=strategy,
                devices=self.devices,
                precision=self.precision,  # type: ignore[arg-type]
            )
        except RuntimeError as error:
            raise UserError(f"executor.accelerator={self.accelerator}: {error}") from error

    @abstractmethod
    def train(
        self, population: Population, order: Order, clients: Sequence[int], updates: Tensor
    ) -> Tensor:
        """Trains some of the order's clients on this rank.

        `clients` are positions in `order.jobs`; row k of `updates` [n, P] becomes the update of the
        k-th of them, and row k of what is returned [n, Q] its buffers.
        """


EXECUTORS: Registry[Executor] = Registry("executor", "fedbench.executors")


@EXECUTORS.register("sequential")
@dataclass(frozen=True)
class Sequential(Executor):
    """One client after another: the same bits on any number of processes."""

    def train(
        self, population: Population, order: Order, clients: Sequence[int], updates: Tensor
    ) -> Tensor:
        layout = population.layout
        buffers = updates.new_empty(len(clients), layout.n_buffers)
        for row, client in enumerate(clients):
            population.train(order, order.jobs[client], out=updates[row])
            layout.read_buffers(out=buffers[row])
        return buffers


class Workforce:
    """The ranks of a run: rank 0 is the server's and gives orders, the others serve."""

    def __init__(self, executor: Executor, fabric: Fabric, population: Population) -> None:
        self.executor = executor
        self.fabric = fabric
        self.population = population
        self.training = False

    def brief(self, implants: Sequence[Implant]) -> None:
        """Gives every rank the backdoors that are made ready."""
        self.population.implants = implants
        self._exchange(tuple(implants))

    def train(self, order: Order) -> tuple[Tensor, Tensor]:
        """Updates [N, P] and buffers [N, Q] of the order's clients, in the order of its jobs."""
        self.training = True
        self._exchange(order)
        updates, buffers = self._train_share(order)
        self.training = False
        return updates, buffers

    def serve(self) -> None:
        """Trains this rank's share of every order, until the server sends none."""
        while (message := self._exchange(None)) is not None:
            if isinstance(message, tuple):
                self.population.implants = message
            else:
                self._train_share(message)

    def dismiss(self) -> None:
        """Ends `serve`; not after a failure in training, where nobody waits for an order."""
        if not self.training:
            self._exchange(None)

    def _exchange(self, message: Message) -> Message:
        """What rank 0 holds, on every rank."""
        return self.fabric.broadcast(message) if self.fabric.world_size > 1 else message

    def _train_share(self, order: Order) -> tuple[Tensor, Tensor]:
        n, ranks = len(order.jobs), self.fabric.world_size
        layout = self.population.layout
        updates = order.params.new_empty(n, layout.n_params)
        if ranks == 1:
            return updates, self.executor.train(self.population, order, range(n), updates)
        shares = [range(rank, n, ranks) for rank in range(ranks)]
        mine = shares[self.fabric.global_rank]
        rows = updates.new_empty(len(mine), layout.n_params)
        buffers = self.executor.train(self.population, order, mine, rows)
        gathered = updates.new_empty(n, layout.n_buffers)
        for rank, share in enumerate(shares):
            updates[share.start :: ranks] = self._share_of(rank, len(share), rows)
            gathered[share.start :: ranks] = self._share_of(rank, len(share), buffers)
        return updates, gathered

    def _share_of(self, rank: int, n_rows: int, mine: Tensor) -> Tensor:
        theirs = mine if rank == self.fabric.global_rank else mine.new_empty(n_rows, mine.shape[1])
        torch.distributed.broadcast(theirs, src=rank)
        return theirs
