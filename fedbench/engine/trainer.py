"""Trains one client after another with Lightning's own Trainer, for modules that need its hooks."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from fedbench.engine.executors import Backend
from fedbench.engine.flat_parameters import FlatModel, ParameterLayout
from fedbench.engine.isolation import isolated
from fedbench.engine.local_training import (
    Batch,
    LocalTraining,
    batch_sizes,
    check_loss,
    check_losses,
)
from fedbench.engine.model_replica import ModelReplica
from fedbench.errors import UserError
from fedbench.rng import seeded

# Lightning's warnings about a validation that clients do not have, and about its own internals
CHATTER = (
    "GPU available but not used",  # also printed if the rank uses the GPU
    "You defined a `validation_step` but have no `val_dataloader`",
    "`training_step` returned `None`",
    r"Found \d+ module\(s\) in eval mode at the start of training",
    "The number of training batches .* is smaller than the logging interval",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


class TrainerBackend(Backend):
    """A new Trainer and a new module for each client, so that clients share no state."""

    name = "trainer"

    def __init__(self, replica: ModelReplica, reason: str | None) -> None:
        super().__init__(replica)
        self.reason = reason  # why the module needs the Trainer; None: it does not
        module = replica.module
        if replica.clip_grad is not None and not module.automatic_optimization:
            raise UserError(
                f"clip_grad={replica.clip_grad}: must be null, because {type(module).__name__} "
                "optimizes manually; call self.clip_gradients in training_step instead"
            )
        for message in CHATTER:
            warnings.filterwarnings("ignore", message=message)

    def __str__(self) -> str:
        return self.name if self.reason is None else f"{self.name} ({self.reason})"

    def fit(
        self, start: FlatModel, trainings: Sequence[LocalTraining], out: Sequence[FlatModel]
    ) -> None:
        for training, row in zip(trainings, out, strict=True):
            client, layout = self.replica.new_client()
            layout.write(*start)
            self._train(client, training)
            self._read(client, row)

    def _train(self, client: LightningModule, training: LocalTraining) -> None:
        fabric, strategy = self.replica.fabric, ClientStrategy(self.replica, training)
        with seeded(training.seed), isolated(), _usual_signals():
            trainer = Trainer(
                accelerator=RankAccelerator(),
                strategy=strategy,
                devices=1,
                plugins=[RankPrecision(fabric), LightningEnvironment()],  # ignore any cluster
                max_epochs=training.epochs,
                gradient_clip_val=self.replica.clip_grad,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                logger=DummyLogger(),  # `self.logger` works, and nothing is written
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            trainer.fit(client, ClientBatches(training, trainer))
        check_losses(client, strategy.n_losses, strategy.n_batches)
        # Break reference cycles, or many trained clients would wait for the garbage collector.
        vars(trainer).clear()
        vars(strategy).clear()

    def _read(self, client: LightningModule, row: FlatModel) -> None:
        """Copy the trained client to `row`, by name: hooks may freeze or replace parameters."""
        layers, found = self.replica.layout.layers, dict(client.named_parameters())
        sizes = {name: place.stop - place.start for name, place in layers.items()}
        kept = {name: p.numel() for name, p in found.items() if p.requires_grad or name in sizes}
        buffers = ParameterLayout(client).read_buffers()
        if kept != sizes or buffers.shape != row.buffers.shape:
            changed = sorted({name for name, _ in kept.items() ^ sizes.items()}) or ["its buffers"]
            raise UserError(
                f"{type(client).__name__}: training changed which parameters are trained "
                f"({', '.join(changed)}); create and unfreeze all of them in __init__ or "
                "configure_model"
            )
        with torch.no_grad():
            torch.cat([found[name].reshape(-1) for name in layers], out=row.params)
        row.buffers.copy_(buffers)


class ClientStrategy(SingleDeviceStrategy):
    """One client on this rank's device; if it is malicious, with the attack's changes."""

    def __init__(self, replica: ModelReplica, training: LocalTraining) -> None:
        super().__init__(replica.fabric.device, checkpoint_io=NoCheckpoints())
        self.layers = tuple(replica.layout.layers)
        self.training = training
        self.params: list[Tensor] = []  # in the order of P
        self.n_batches = self.n_losses = self.n_backward = 0
        self._step_depth = 0  # an optimizer's step may call that of its base class

    def setup(self, trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
                callback.save_last = True  # no link to a file that is not written
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        module, hooks = self.module, self.training.hooks
        if hooks is None:
            return
        named = dict(module.named_parameters())
        self.params = [named[name] for name in self.layers if name in named]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None  # set by the Trainer
        return self.lightning_module

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self.n_batches += 1
        self.n_losses += output is not None or not self.module.automatic_optimization
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backpropagate the attack's objective, for automatic optimization and manual_backward."""
        self.n_backward += 1
        check_loss(closure_loss)
        if self.training.hooks is not None:
            # Lightning divides the loss by the number of batches that share a step.
            n = self.module.trainer.accumulate_grad_batches
            # manual_backward runs inside the autocast region of training_step
            with torch.autocast(self.root_device.type, enabled=False):
                closure_loss = self.training.hooks.objective(closure_loss * n, self.params) / n
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Set the attack's learning rate, which overrides that of the module's schedulers."""
        self._step_depth += 1
        self.training.override_lr(optimizer, self.module.current_epoch)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step_depth -= 1
        if self._step_depth or self.training.hooks is None:
            return
        if not self.n_backward and not self.module.automatic_optimization:
            raise UserError(
                f"{type(self.module).__name__}.training_step must call self.manual_backward(loss) "
                "instead of loss.backward(), so that an attack can change the loss"
            )
        self.training.hooks.project(self.params)

    def teardown(self) -> None:
        """Leave the module on its device, where the result is read."""


class RankPrecision(Precision):
    """Fabric's autocast, as in the fast loop. Lightning's own refuses to clip with fused SGD."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.precision = fabric.strategy.precision.precision

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.fabric.autocast()


class RankAccelerator(Accelerator):
    """The rank's device, which Fabric has already set up."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device("cpu")]  # only their number counts

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "rank"


class NoCheckpoints(CheckpointIO):
    """Writes nothing: a user's ModelCheckpoint would save every client of every round."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        pass

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"{path}: clients keep no checkpoints, so none can be loaded in training")

    def remove_checkpoint(self, path: Any) -> None:
        pass


class ClientBatches:
    """The batches of `LocalTraining`, decoded, as the Trainer's data loader."""

    def __init__(self, training: LocalTraining, trainer: Trainer) -> None:
        self.training, self.trainer = training, trainer
        n = len(training.samples(0)[1])  # the same in every epoch
        self.n_batches = len(batch_sizes(n, training.batch_size))

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Batch]:
        for x, y in self.training.batches(self.trainer.current_epoch):
            yield self.training.decode(x), y


@contextmanager
def _usual_signals() -> Iterator[None]:
    """Undo the Trainer's handling of SIGINT and SIGTERM: both end with an ordinary exit."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SIGTERMException:
        signal.raise_signal(signal.SIGTERM)
        raise
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, before)
        raise error.__context__ from None
