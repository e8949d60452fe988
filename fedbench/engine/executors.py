"""How the clients of a round are trained: one after another, or several stacked into one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbench.errors import UserError
from fedbench.registry import Registry

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from fedbench.engine.population import Population
    from fedbench.engine.sequential import Trainer

ACCELERATORS = ("cpu", "gpu", "cuda", "mps", "auto")
PRECISIONS = ("32-true", "bf16-mixed")

# Where stacking pays on a CPU, by benchmarks/vectorized.py (docs/speed.md): in larger networks the
# products take most of the time, and k models at once leave the cache.
STACKED_PARAMS = 100_000
STACKED_WORK = 1_000_000  # parameters times samples of a batch

# Else Lightning tells of every process that it starts. Here, so that those processes hear it too.
for package in ("lightning.fabric", "lightning.pytorch"):
    logging.getLogger(f"{package}.utilities").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Executor(ABC):
    """Settings of an executor. Lightning Fabric owns devices, precision and processes."""

    # Processes, or GPUs, each of which trains its share of the clients; None: what is free, if the
    # run is long enough.
    devices: int | None = None
    accelerator: str = "cpu"  # cpu, gpu, cuda, mps, or auto
    precision: str = "32-true"
    threads: int = 1  # of each process; another number may change the last bits of the results

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices must be at least 1, or null, got {self.devices}")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.accelerator not in ACCELERATORS:
            raise ValueError(f"accelerator must be one of {ACCELERATORS}, got {self.accelerator!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")

    @property
    def full_precision(self) -> bool:
        return self.precision == "32-true"

    @abstractmethod
    def trainer(self, population: Population) -> Trainer:
        """Who trains these clients; UserError if that cannot be."""


EXECUTORS: Registry[Executor] = Registry("executor", "fedbench.engine.executors")


@EXECUTORS.register("sequential")
@dataclass(frozen=True)
class Sequential(Executor):
    """One client after another."""

    def trainer(self, population: Population) -> Trainer:
        from fedbench.engine.sequential import OneByOne

        return OneByOne(population, self.full_precision)


@EXECUTORS.register("vectorized")
@dataclass(frozen=True)
class Vectorized(Executor):
    """Several clients at once: the numbers of `sequential` but for rounding."""

    stack: int = 16  # clients that are trained together, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stack < 1:
            raise ValueError(f"stack must be at least 1, got {self.stack}")

    def trainer(self, population: Population) -> Trainer:
        from fedbench.engine.vectorized import Stacks, unsuited

        if (reason := unsuited(population.module)) is not None:
            name = population.config.model["name"]
            raise UserError(f"executor=vectorized: not for model {name}, {reason}; take sequential")
        return Stacks(population, self.stack, self.full_precision)


@EXECUTORS.register("auto")
@dataclass(frozen=True)
class Auto(Vectorized):
    """`vectorized` where that pays, else `sequential`."""

    def trainer(self, population: Population) -> Trainer:
        from fedbench.engine.captured_step import can_record
        from fedbench.engine.sequential import OneByOne

        n_params, batch_size = population.layout.n_params, population.config.batch_size
        small = n_params <= STACKED_PARAMS and n_params * batch_size <= STACKED_WORK
        if small and can_record(population.module):
            return super().trainer(population)
        return OneByOne(population, self.full_precision)
