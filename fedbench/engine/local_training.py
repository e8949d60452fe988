"""What a client trains: a LightningModule, honest or malicious."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedbench.errors import UserError

if TYPE_CHECKING:
    from fedbench.attack import TrainingOverrides

Batch = tuple[Tensor, Tensor]  # samples [B, ...] and labels


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class AttackHooks:
    """A malicious client's means: a training, a loss and a constraint of its own.

    `objective` and `project` get the parameters in the order of P.
    """

    training: TrainingOverrides
    objective: Callable[[Tensor, Sequence[Tensor]], Tensor]  # what to minimise, of the usual loss
    project: Callable[[Sequence[Tensor]], None]  # after each step, in place


@dataclass(frozen=True)
class Training:
    """One client's local training: what on, how long, in which order."""

    samples: Callable[[int], Batch]  # raw samples [n, ...] and labels of an epoch
    epochs: int
    batch_size: int
    rng: torch.Generator  # of the order of samples
    decode: Callable[[Tensor], Tensor] = as_it_is  # what the network reads of raw samples
    seed: int = 0  # of draws that layers make, such as dropout's
    malice: AttackHooks | None = None

    def batches(self, epoch: int) -> Iterator[Batch]:
        """A shuffled epoch: raw samples gathered once, of which the batches are views."""
        x, y = self.samples(epoch)
        order = torch.randperm(len(y), generator=self.rng).to(y.device)
        # Not x[order]: that copies element by element, this by rows.
        shuffled = x.index_select(0, order), y.index_select(0, order)
        sizes = batch_sizes(len(y), self.batch_size)
        return zip(*(part.split(sizes) for part in shuffled), strict=True)

    def lr_in(self, epoch: int, usual: float) -> float:
        own = None if self.malice is None else self.malice.training
        return usual if own is None else own.lr_in(epoch, self.epochs, usual)


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """A single left-over sample joins the batch before it: batch norm cannot train on one."""
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    if n % batch_size == 1 and 1 < batch_size < n:
        sizes[-2:] = [batch_size + 1]
    return sizes


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
        self._sgd: SGD | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.network(x), y)

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        """Of logits [B, C], or [B, T, C] for sequences."""
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten().long())

    def configure_optimizers(self) -> Optimizer:
        """As new, but one object and its memory serve every client that the module is trained as.

        A momentum of 0 is that of no step before.
        """
        if self._sgd is None:
            trainable = [p for p in self.parameters() if p.requires_grad]
            self._sgd = SGD(
                trainable, self.lr, self.momentum, weight_decay=self.weight_decay, fused=True
            )
        for group in self._sgd.param_groups:
            group["lr"] = self.lr
        for state in self._sgd.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()
        return self._sgd


def train(
    module: LightningModule, training: Training, fabric: Fabric, clip_grad: float | None = None
) -> None:
    """Trains `module` in place.

    Gradients of all parameters together are no longer than `clip_grad`. A malicious client that
    sets its own learning rate follows no schedule of the module's.
    """
    module.train()
    torch.manual_seed(training.seed)
    optimizer, end_of_step, end_of_epoch = _optimizer(module)
    malice, decode = training.malice, training.decode
    has_own_lr = malice is not None and malice.training.has_own_lr
    if has_own_lr:
        end_of_step = end_of_epoch = _nothing
    # A scheduler has set lr to its first value already, which a warm-up starts near 0.
    usual = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    params = [p for p in module.parameters() if p.requires_grad]
    for epoch in range(training.epochs):
        if has_own_lr:
            for group, lr in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = training.lr_in(epoch, lr)
        for index, (x, y) in enumerate(training.batches(epoch)):
            for param in params:  # as `zero_grad`, which takes as long as a small layer
                param.grad = None
            with fabric.autocast():
                loss = _loss(module.training_step((decode(x), y), index))
            if malice is not None:
                loss = malice.objective(loss, params)
            fabric.backward(loss)
            if clip_grad is not None:
                nn.utils.clip_grad_norm_(params, clip_grad)
            optimizer.step()
            if malice is not None:
                malice.project(params)
            end_of_step()
        end_of_epoch()


@torch.no_grad()
def sgd_step(
    module: Classifier,
    params: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    lr: float,
) -> None:
    """The step of a `Classifier`'s optimizer, without the optimizer; momenta start as 0."""
    torch._fused_sgd_(
        params,
        gradients,
        momenta if module.momentum else [],
        weight_decay=module.weight_decay,
        momentum=module.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


@torch.no_grad()
def clip(gradients: Sequence[Tensor], length: float) -> None:
    """In place, all together, as torch's `clip_grad_norm_`."""
    total = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((length / (total + 1e-6)).clamp(max=1))


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
