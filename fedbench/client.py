"""What a client trains: a LightningModule, honest or malicious."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fedbench.errors import UserError

if TYPE_CHECKING:
    from fedbench.attack import OwnTraining


@dataclass(frozen=True)
class Malice:
    """A malicious client's means: a training, a loss and a constraint of its own."""

    training: OwnTraining
    objective: Callable[[Tensor], Tensor]  # the loss to minimise, of the module's own
    project: Callable[[], None]  # after each step


class Classifier(LightningModule):
    """Cross-entropy and SGD around a plain network."""

    def __init__(
        self, network: nn.Module, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.network(x)  # [B, C], or [B, T, C] for sequences
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten().long())

    def configure_optimizers(self) -> Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(
            trainable, self.lr, self.momentum, weight_decay=self.weight_decay, fused=True
        )


def train(
    module: LightningModule,
    samples: Callable[[int], tuple[Tensor, Tensor]],
    fabric: Fabric,
    *,
    epochs: int,
    batch_size: int,
    rng: torch.Generator,
    clip_grad: float | None = None,
    malice: Malice | None = None,
) -> None:
    """Trains `module` in place on the samples x [n, ...] and labels y of each epoch.

    `samples` gives those of an epoch by its number, read to the network's input. Gradients of all
    parameters together are no longer than `clip_grad`. A malicious client that sets its own
    learning rate follows no schedule of the module's.
    """
    module.train()
    optimizer, end_of_step, end_of_epoch = _optimizer(module)
    own = None if malice is None else malice.training
    if own is not None and own.has_own_lr:
        end_of_step = end_of_epoch = _nothing
    # A scheduler has set lr to its first value already, which a warm-up starts near 0.
    usual = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    for epoch in range(epochs):
        if own is not None and own.has_own_lr:
            for group, lr in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = own.lr_in(epoch, epochs, lr)
        for index, batch in enumerate(_batches(*samples(epoch), batch_size, rng)):
            optimizer.zero_grad()
            with fabric.autocast():
                loss = _loss(module.training_step(batch, index))
            if malice is not None:
                loss = malice.objective(loss)
            fabric.backward(loss)
            if clip_grad is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip_grad)
            optimizer.step()
            if malice is not None:
                malice.project()
            end_of_step()
        end_of_epoch()


def _batches(
    x: Tensor, y: Tensor, batch_size: int, rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """A shuffled epoch, gathered once; the batches are views of it.

    A single left-over sample joins the batch before it: batch norm cannot train on one.
    """
    n = len(y)
    order = torch.randperm(n, generator=rng).to(y.device)
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    if n % batch_size == 1 and 1 < batch_size < n:
        sizes[-2:] = [batch_size + 1]
    return zip(x[order].split(sizes), y[order].split(sizes), strict=True)


def _loss(output: Any) -> Tensor:
    """Lightning lets `training_step` return the loss or a dict that holds it."""
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise UserError(f"training_step must return a loss, got {type(output).__name__}")
    return loss


def _optimizer(module: LightningModule) -> tuple[Optimizer, Callable[[], Any], Callable[[], Any]]:
    """A fresh optimizer, with its scheduler's step at the end of each step and each epoch."""
    configured: Any = module.configure_optimizers()
    scheduler: Any = None
    if isinstance(configured, dict):
        configured, scheduler = configured["optimizer"], configured.get("lr_scheduler")
    elif isinstance(configured, Sequence):
        first, *rest = configured if isinstance(configured[0], Sequence) else [configured]
        configured, scheduler = _only(first), _only(rest[0]) if rest else None
    if not isinstance(configured, Optimizer):
        raise UserError(
            f"configure_optimizers must return one optimizer, got {type(configured).__name__}"
        )
    if scheduler is None:
        return configured, _nothing, _nothing
    per_step = isinstance(scheduler, dict) and scheduler.get("interval", "epoch") == "step"
    step = (scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler).step
    return (configured, step, _nothing) if per_step else (configured, _nothing, step)


def _only(items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise UserError(f"configure_optimizers must return one optimizer, got {len(items)}")
    return items[0]


def _nothing() -> None:
    pass
