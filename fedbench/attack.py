"""Attack: what malicious clients do. The contract of `attacks/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.backdoor import Backdoor, PreparedBackdoor
from fedbench.config import rounded_count
from fedbench.data import Spec
from fedbench.registry import Registry


@dataclass(frozen=True)
class AttackView:
    """What the attacker knows in a round: the global model and the federation's public settings."""

    index: int  # round
    global_params: Tensor  # [P]
    layers: Mapping[str, slice]  # parameter name -> its place in P
    n_clients: int  # N, taking part in this round
    n_malicious: int  # M of them
    server_lr: float
    rng: torch.Generator
    clean_update: Tensor | None = None  # [P] of this client, were it honest; if asked for
    benign: Tensor | None = None  # [N - M, P] what honest clients send; of the omniscient alone


@dataclass(frozen=True)
class Poisoning:
    """One malicious client's poisoning for a round."""

    slot: int  # its place among all malicious clients: 0, 1, ...; stable across rounds
    backdoors: Sequence[PreparedBackdoor]
    pdr: float  # of this round
    n_classes: int
    rng: torch.Generator

    def choose(self, n: int) -> Tensor:
        """The exact share `pdr` of n samples, as indices; a half is rounded up."""
        return torch.randperm(n, generator=self.rng)[: rounded_count(self.pdr, n)]


@dataclass(frozen=True)
class TrainingOverrides:
    """How a malicious client's training differs from an honest one's."""

    epochs: int | None = None  # local epochs; None: as honest clients
    lr: float | None = None  # learning rate; None: as honest clients
    lr_decay: float = 1.0  # what the learning rate is multiplied by
    lr_decay_at: list[float] = field(default_factory=list)  # after these shares of the epochs

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 < self.lr_decay < math.inf:
            raise ValueError(f"lr_decay must be above 0, got {self.lr_decay}")
        if not all(0 <= at <= 1 for at in self.lr_decay_at):
            raise ValueError(f"lr_decay_at must be shares between 0 and 1, got {self.lr_decay_at}")

    @property
    def has_own_lr(self) -> bool:
        return self.lr is not None or (self.lr_decay != 1 and len(self.lr_decay_at) > 0)

    def lr_in(self, epoch: int, epochs: int, usual: float) -> float:
        """The learning rate in an epoch, counted from 0; `usual` is an honest client's."""
        # 0.55 of 100 epochs is a little more than 55 in floating point
        n_decays = sum(epoch >= at * epochs - 1e-9 for at in self.lr_decay_at)
        return (usual if self.lr is None else self.lr) * self.lr_decay**n_decays


@dataclass(frozen=True)
class Attack:
    """Five moments, each optional: three of a client's training, two of what it sends.

    `poison` its data, change the `objective`, `project` the model after each step; `craft` its own
    update, `collude` with the other malicious clients of the round. Subclasses are frozen
    dataclasses whose fields are hyper-parameters. An attack is stateless; it sees the global model
    and its own clients, and what honest clients send only if it is `Omniscient`.
    """

    version: ClassVar[int] = 1  # raise it when the same input gives another output
    active: ClassVar[bool] = True  # False: malicious clients behave honestly
    trains: ClassVar[bool] = True  # False: its clients send what they do without training

    @property
    def training(self) -> TrainingOverrides:
        return TrainingOverrides()

    @property
    def needs_clean_update(self) -> bool:
        """Whether its clients train honestly first, to know what they would send."""
        return False

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        """The backdoors, given the data set's usual ones; none: BA is not measured."""
        return []

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        """Raises ValueError, with the values, if the attack cannot work with these backdoors."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        """A malicious client's raw samples x [n, ...] and labels y, poisoned; inputs are kept."""
        return x, y

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        """What a malicious client minimises: a differentiable function of its loss and parameters.

        `params` are the trainable parameters in the order of P.
        """
        return loss

    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        """Changes the parameters in place after each step of training."""

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        """What a malicious client makes of its update [P] by itself; input is kept."""
        return update

    def collude(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        """What the malicious clients send together instead of updates [M, P]; input is kept."""
        return updates


ATTACKS: Registry[Attack] = Registry("attack", "fedbench.attacks")


@dataclass(frozen=True)
class BackdoorAttack(TrainingOverrides, Attack):
    """Plants backdoors: a share `pdr` of the data is poisoned, the update scaled by gamma."""

    backdoors: list[Any] | None = None  # None: the data set's own
    gamma: float | int | str = 1.0  # a number, auto or bounded: see `scale`

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.gamma in ("auto", "bounded")
        if not named and (isinstance(self.gamma, str) or not 0 < float(self.gamma) < math.inf):
            raise ValueError(f"gamma must be auto, bounded or a number above 0, got {self.gamma}")

    @property
    def training(self) -> TrainingOverrides:
        return self

    @property
    def needs_clean_update(self) -> bool:
        return self.gamma == "bounded"

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return default if self.backdoors is None else self.backdoors

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        if not backdoors:
            raise ValueError("backdoors must be one or more, got none")

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        """An exact share `pdr` of the samples gets one backdoor.

        With several backdoors the clients take them in turn.
        """
        return plant(
            x, y, poisoning, [poisoning.backdoors[poisoning.slot % len(poisoning.backdoors)]]
        )

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return update * self.scale(update, view)

    def scale(self, update: Tensor, view: AttackView) -> float | Tensor:
        """gamma as a number.

        auto:    N / (server_lr * M), which replaces the global model by the malicious one
        bounded: the same, but no longer than the update that the client would send honestly, which
                 is as much as it can know of the length of honest updates
        """
        if not isinstance(self.gamma, str):
            return self.gamma
        replacing = view.n_clients / (view.server_lr * view.n_malicious)
        if self.gamma == "auto":
            return replacing
        assert view.clean_update is not None
        length = torch.linalg.vector_norm(update, dtype=torch.float64)
        bound = torch.linalg.vector_norm(view.clean_update, dtype=torch.float64)
        return torch.where(length * replacing > bound, bound / length, replacing).to(update.dtype)


def plant(
    x: Tensor, y: Tensor, poisoning: Poisoning, backdoors: Sequence[PreparedBackdoor]
) -> tuple[Tensor, Tensor]:
    """x [n, ...] and y [n] with the exact share `pdr` poisoned, in equal parts by the backdoors."""
    x, y = x.clone(), y.clone()
    for chosen, backdoor in zip(
        poisoning.choose(len(y)).to(y.device).tensor_split(len(backdoors)), backdoors, strict=True
    ):
        x[chosen], y[chosen] = backdoor.poison(x[chosen], y[chosen], poisoning.rng)
    return x, y


@dataclass(frozen=True)
class Omniscient(Attack):
    """Knows what honest clients send in the round, beyond the threat model of the others."""

    omniscient: bool = True  # false: the malicious clients' own honest updates stand for them

    def known(self, updates: Tensor, view: AttackView) -> Tensor:
        """The updates [k, P] that the attack takes for those of honest clients, all finite.

        The malicious clients' own, trained honestly, also in a round that has no honest client. A
        client whose training diverged tells nothing.
        """
        for rows in (view.benign, updates):
            if rows is not None and (finite := rows.isfinite().all(dim=1)).any():
                return rows if finite.all() else rows[finite]
        return updates


def flat(params: Sequence[Tensor]) -> Tensor:
    """Parameters in the order of P as one differentiable vector [P]."""
    return torch.cat([param.reshape(-1) for param in params])


class _Length(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(vector)
        ctx.save_for_backward(vector, found)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        vector, found = ctx.saved_tensors
        return torch.zeros_like(vector) if found == 0 else (vector / found).mul_(slope)


def length(vector: Tensor) -> Tensor:
    """The L2 norm, for objectives: its gradient, 0 at 0, takes less than half the time of torch's,
    which looks for a 0 at every number; the bits are the same."""
    found: Tensor = _Length.apply(vector)  # type: ignore[no-untyped-call]
    return found
