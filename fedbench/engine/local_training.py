"""Local training of one client: a LightningModule, honest or malicious."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

from fedbench.engine.isolation import isolated, without_trainer
from fedbench.errors import UserError, first_line
from fedbench.rng import seeded

if TYPE_CHECKING:
    from fedbench.attack import TrainingOverrides

Batch = tuple[Tensor, Tensor]  # samples [B, ...] and labels


def identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class AttackHooks:
    """Where an attack changes a malicious client's training.

    `objective` and `project` receive the parameters in the order of P.
    """

    training: TrainingOverrides
    objective: Callable[[Tensor, Sequence[Tensor]], Tensor]  # (task loss, params) -> loss
    project: Callable[[Sequence[Tensor]], None]  # in place, after each step


@dataclass(frozen=True)
class LocalTraining:
    """One client's local training: its samples, epochs, batches and random order."""

    samples: Callable[[int], Batch]  # epoch -> raw samples [n, ...] and labels
    epochs: int
    batch_size: int
    rng: torch.Generator  # shuffles the samples
    decode: Callable[[Tensor], Tensor] = identity  # raw samples -> network input
    seed: int = 0  # of random layers such as dropout
    hooks: AttackHooks | None = None  # None: honest

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Shuffle an epoch once; batches are views of it."""
        x, y = self.samples(epoch)
        order = torch.randperm(len(y), generator=self.rng).to(y.device)
        # index_select copies whole rows; x[order] would copy element by element.
        shuffled = x.index_select(0, order), y.index_select(0, order)
        sizes = batch_sizes(len(y), self.batch_size)
        return zip(*(part.split(sizes) for part in shuffled), strict=True)

    def lr_in(self, epoch: int, default: float) -> float:
        if self.hooks is None:
            return default
        return self.hooks.training.lr_in(epoch, self.epochs, default)

    def override_lr(self, optimizer: Optimizer, epoch: int) -> None:
        """Set the attack's learning rate, if it has one, for the next step."""
        if self.hooks is not None and self.hooks.training.overrides_lr:
            for group in optimizer.param_groups:
                # A scheduler has set lr; the rate that the user chose is then in initial_lr.
                default = group.setdefault("initial_lr", group["lr"])
                group["lr"] = self.lr_in(epoch, default)


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of an epoch's batches.

    A single left-over sample joins the batch before it: batch norm cannot train on one sample.
    """
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    if n % batch_size == 1 and 1 < batch_size < n:
        sizes[-2:] = [batch_size + 1]
    return sizes


class Classifier(LightningModule):
    """Trains a plain network by cross-entropy and SGD."""

    fused = True  # one kernel for all parameters; False rounds differently

    def __init__(
        self, network: nn.Module, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._sgd: SGD | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.network(x), y)

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of logits [B, C], or [B, T, C] for sequences."""
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten().long())

    def configure_optimizers(self) -> Optimizer:
        """Reset and reuse one SGD for all clients; zero momentum equals no previous step."""
        if self._sgd is None:
            trainable = [p for p in self.parameters() if p.requires_grad]
            self._sgd = SGD(
                trainable, self.lr, self.momentum, weight_decay=self.weight_decay, fused=self.fused
            )
        for group in self._sgd.param_groups:
            group["lr"] = self.lr
            group.pop("initial_lr", None)  # of an earlier round, see `override_lr`
        for state in self._sgd.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()
        return self._sgd


def train(
    module: LightningModule, training: LocalTraining, fabric: Fabric, clip_grad: float | None = None
) -> None:
    """Train `module` in place; `clip_grad` bounds the norm of all gradients together.

    An attack that sets its own learning rate overrides that of the module's scheduler.
    """
    with seeded(training.seed), isolated(), without_trainer(module):
        optimizer, end_step, end_epoch = _optimizer(module)
        hooks, decode, step = training.hooks, training.decode, _training_step(module)
        params = [p for p in module.parameters() if p.requires_grad]
        n_batches = n_losses = 0
        for epoch in range(training.epochs):
            for index, (x, y) in enumerate(training.batches(epoch)):
                training.override_lr(optimizer, epoch)
                with fabric.autocast():
                    loss = _loss(step((decode(x), y), index))
                for param in params:  # Optimizer.zero_grad costs as much as a small layer
                    param.grad = None
                n_batches += 1
                if loss is not None:  # otherwise there are no gradients, and a step does nothing
                    n_losses += 1
                    fabric.backward(loss if hooks is None else hooks.objective(loss, params))
                    _clip(optimizer, clip_grad)
                optimizer.step()
                if hooks is not None:
                    hooks.project(params)
                end_step()
            end_epoch()
    check_losses(module, n_losses, n_batches)


@torch.no_grad()
def sgd_step(
    module: Classifier,
    params: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    lr: float,
) -> None:
    """One step of a `Classifier`'s SGD without an optimizer object; momenta start at zero."""
    sgd(
        params,
        gradients,
        momenta,  # type: ignore[arg-type]  # may hold None, and ours never do
        fused=module.fused,
        weight_decay=module.weight_decay,
        momentum=module.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], max_norm: float) -> None:
    """Clip gradients in place as `torch.nn.utils.clip_grad_norm_` does."""
    scale = (max_norm / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(scale)


def check_loss(loss: Tensor) -> None:
    """Raise a UserError unless gradients of the loss can be computed."""
    if loss.numel() != 1:
        raise UserError(f"training_step must return one number, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise UserError("training_step must return a loss that depends on the parameters")


def check_losses(module: LightningModule, n_losses: int, n_batches: int) -> None:
    """Raise a UserError if `training_step` skipped all batches: perhaps it lacks its `return`."""
    if n_batches and not n_losses:
        raise UserError(
            f"{type(module).__name__}.training_step must return a loss, "
            f"got None for all {n_batches} batches"
        )


def configured_optimizers(
    module: LightningModule,
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """The optimizers and schedulers of `configure_optimizers`, in any form Lightning accepts."""
    where = f"{type(module).__name__}.configure_optimizers"
    configured: Any = module.configure_optimizers()
    if configured is None:
        raise UserError(f"{where} must return one optimizer, got None")
    try:
        optimizers, schedulers, monitor = _configure_optimizers(configured)
        schedulers = [scheduler for scheduler in schedulers if scheduler is not None]
        return optimizers, _configure_schedulers_automatic_opt(schedulers, monitor)
    except MisconfigurationException as error:
        raise UserError(f"{where}: {first_line(error)}") from error


def _optimizer(module: LightningModule) -> tuple[Optimizer, Callable[[], Any], Callable[[], Any]]:
    """A fresh optimizer, and what its scheduler does after each step and each epoch."""
    optimizers, schedulers = configured_optimizers(module)
    if len(optimizers) != 1:
        raise UserError(
            f"{type(module).__name__}.configure_optimizers must return one optimizer, "
            f"got {len(optimizers)}"
        )
    if not schedulers:
        return optimizers[0], _nothing, _nothing
    per_step = schedulers[0].interval == "step"
    step: Callable[..., Any] = schedulers[0].scheduler.step
    return (optimizers[0], step, _nothing) if per_step else (optimizers[0], _nothing, step)


def _training_step(module: LightningModule) -> Callable[[Batch, int], Any]:
    """The module's `training_step`, which may or may not take the index of the batch."""
    step: Callable[..., Any] = module.training_step
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return step if takes_index else lambda batch, index: step(batch)


def _loss(output: Any) -> Tensor | None:
    """`training_step` may return the loss, a dict that holds it, or None to skip the batch."""
    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
    if loss is not None and not isinstance(loss, Tensor):
        raise UserError(f"training_step must return a loss, got {type(output).__name__}")
    if loss is not None:
        check_loss(loss)
    return loss


def _clip(optimizer: Optimizer, clip_grad: float | None) -> None:
    if clip_grad is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        nn.utils.clip_grad_norm_(params, clip_grad)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
