"""Executors: settings of how clients are trained. Backends: what trains them on one rank."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedbench.errors import UserError
from fedbench.multirun import resources
from fedbench.registry import Registry, require

if TYPE_CHECKING:  # Lightning takes seconds to import; user errors must print before that
    from fedbench.config import RunConfig
    from fedbench.engine.flat_parameters import FlatModel
    from fedbench.engine.local_training import LocalTraining
    from fedbench.engine.model_replica import ModelReplica

ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
PRECISIONS = ("32-true", "bf16-mixed")
MOST_CORES = 1024  # more threads than a machine has cores only slow it down, then crash

# Where stacking is at least 1.15 times as fast as sequential training with captured steps, on CPUs
# (python -m benchmarks value; docs/speed.md).
STACKED_BATCH = 16
STACKED_WORK = 500_000  # parameters times samples of a batch

# Lightning prints a line for each process it starts and imports matplotlib (by torchmetrics), which
# warns of a home it cannot write to. Set here, before the import, for all processes of a run.
for package in ("lightning.fabric.utilities", "lightning.pytorch.utilities"):
    logging.getLogger(package).setLevel(logging.WARNING)
logging.getLogger("matplotlib").setLevel(logging.ERROR)


class Backend(ABC):
    """Trains clients on one rank's replica. One object serves all rounds."""

    name: ClassVar[str]  # the executor's

    def __init__(self, replica: ModelReplica) -> None:
        self.replica = replica

    def __str__(self) -> str:
        """The choice that the first line of a run shows."""
        return self.name

    def groups(self, costs: Sequence[int], malicious: Sequence[bool]) -> list[list[int]]:
        """Which of a round's clients are trained together, by position; default: each alone.

        Groups must not depend on the number of ranks: results would depend on it, too.
        """
        return [[i] for i in range(len(costs))]

    @abstractmethod
    def fit(
        self, start: FlatModel, trainings: Sequence[LocalTraining], out: Sequence[FlatModel]
    ) -> None:
        """Train the clients of a group from `start`, each into its entry of `out`."""


@dataclass(frozen=True)
class Executor(ABC):
    """Settings of an executor. Lightning Fabric owns devices, precision and processes."""

    # Processes or GPUs that share the clients; None: all free ones if the run is long enough
    devices: int | None = None
    accelerator: str = "auto"  # cpu or cuda; auto: cuda if there is a GPU; gpu means cuda
    precision: str = "32-true"  # or bf16-mixed
    threads: int = 1  # per process; other values may change the last bits of results

    def __post_init__(self) -> None:
        valid = self.devices is None or 1 <= self.devices <= MOST_CORES
        require(self, "devices", valid, f"from 1 to {MOST_CORES}, or null")
        require(self, "threads", 1 <= self.threads <= MOST_CORES, f"from 1 to {MOST_CORES}")
        if self.accelerator not in ACCELERATORS:
            reason = ", which has no float64" if self.accelerator == "mps" else ""
            options = ", ".join(ACCELERATORS)
            raise ValueError(
                f"accelerator must be one of {options}, got {self.accelerator}{reason}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        # Resolved once: the run id and the records must not depend on who asks later.
        object.__setattr__(self, "accelerator", resources.resolved(self.accelerator))

    @abstractmethod
    def backend(self, replica: ModelReplica, config: RunConfig) -> Backend:
        """Return what trains clients on this rank; UserError if it cannot train this network."""


EXECUTORS: Registry[Executor] = Registry("executor", "fedbench.engine.executors")


@dataclass(frozen=True)
class FastLoop(Executor):
    """Executors with a training loop of their own, for modules that do not need the Trainer."""

    capture: bool = True  # replay captured steps for plain networks on the CPU; same bits

    def captures(self, replica: ModelReplica) -> bool:
        """Whether to capture steps: measured on CPUs only, and not under autocast."""
        on_cpu = replica.fabric.device.type == "cpu"
        return self.capture and on_cpu and self.precision == "32-true"

    def check(self, name: str, replica: ModelReplica, config: RunConfig) -> None:
        """Raise a UserError if the module needs Lightning's Trainer."""
        from fedbench.engine.trainer_needs import why_trainer

        if (reason := why_trainer(replica.module)) is not None:
            model = config.model["name"]
            raise UserError(
                f"executor={name}: cannot train model {model}, {reason}; use trainer or auto"
            )


@EXECUTORS.register("sequential")
@dataclass(frozen=True)
class Sequential(FastLoop):
    """One client after another."""

    def backend(self, replica: ModelReplica, config: RunConfig) -> Backend:
        from fedbench.engine.sequential import SequentialBackend

        self.check("sequential", replica, config)
        return SequentialBackend(replica, self.captures(replica))


@EXECUTORS.register("trainer")
@dataclass(frozen=True)
class LightningTrainer(Executor):
    """One client after another, by Lightning's own Trainer: for modules that need its hooks."""

    def backend(self, replica: ModelReplica, config: RunConfig) -> Backend:
        from fedbench.engine.trainer import TrainerBackend
        from fedbench.engine.trainer_needs import why_trainer

        return TrainerBackend(replica, why_trainer(replica.module))


@EXECUTORS.register("vectorized")
@dataclass(frozen=True)
class Vectorized(FastLoop):
    """Several clients at once: the numbers of `sequential` up to rounding."""

    stack: int = 16  # most clients trained together

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "stack", self.stack >= 1, "at least 1")

    def backend(self, replica: ModelReplica, config: RunConfig) -> Backend:
        from fedbench.engine.vectorized import VectorizedBackend, cannot_stack

        self.check("vectorized", replica, config)
        if (reason := cannot_stack(replica.module)) is not None:
            name = config.model["name"]
            raise UserError(
                f"executor=vectorized: cannot train model {name}, {reason}; use sequential"
            )
        captures = self.captures(replica)
        return VectorizedBackend(replica, self.stack, config.most_clients, captures)


@EXECUTORS.register("auto")
@dataclass(frozen=True)
class Auto(Vectorized):
    """`trainer` for modules that need it, `vectorized` for small networks and batches on a CPU.

    `sequential` for all others. The limits of `vectorized` are measurements on CPUs. On a GPU,
    choose it yourself and compare.
    """

    def backend(self, replica: ModelReplica, config: RunConfig) -> Backend:
        from fedbench.engine.captured_step import can_capture
        from fedbench.engine.sequential import SequentialBackend
        from fedbench.engine.trainer import TrainerBackend
        from fedbench.engine.trainer_needs import why_trainer

        if (reason := why_trainer(replica.module)) is not None:
            return TrainerBackend(replica, reason)
        small = (
            config.batch_size <= STACKED_BATCH
            and replica.layout.n_params * config.batch_size <= STACKED_WORK
        )
        if small and replica.fabric.device.type == "cpu" and can_capture(replica.module):
            return super().backend(replica, config)
        return SequentialBackend(replica, self.captures(replica))
