"""Attack: what malicious clients do. The contract for plugins in `attacks/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.backdoor import Backdoor, PreparedBackdoor
from fedbench.config import WHOLE, rounded_count
from fedbench.data import Spec
from fedbench.digests import Plugin
from fedbench.registry import Registry, require


@dataclass(frozen=True)
class AttackView:
    """What the attacker knows in a round: the global model and the federation's public settings."""

    index: int  # round
    global_params: Tensor  # [P]
    layers: Mapping[str, slice]  # parameter name -> its slice of P
    n_clients: int  # N, clients in this round
    n_malicious: int  # M, malicious clients in this round
    server_lr: float
    rng: torch.Generator
    clean_update: Tensor | None = None  # [P] this client's honest update; see needs_clean_update
    benign: Tensor | None = None  # [N - M, P] honest updates; for Omniscient attacks only


@dataclass(frozen=True)
class Poisoning:
    """How one malicious client poisons its data in one round."""

    slot: int  # index of the client among all malicious clients: 0, 1, ...; stable across rounds
    backdoors: Sequence[PreparedBackdoor]
    pdr: float  # share of samples to poison in this round
    n_classes: int
    rng: torch.Generator

    def choose(self, n: int) -> Tensor:
        """Draw the indices of exactly pdr * n of n samples; a half rounds up."""
        return torch.randperm(n, generator=self.rng)[: rounded_count(self.pdr, n)]


MOST_EPOCHS = WHOLE["local_epochs"][1]


@dataclass(frozen=True)
class TrainingOverrides:
    """Local training settings of a malicious client that differ from those of honest clients."""

    epochs: int | None = None  # local epochs; None: same as honest clients
    lr: float | None = None  # learning rate; None: same as honest clients
    lr_decay: float = 1.0  # factor applied to the learning rate at each point of lr_decay_at
    lr_decay_at: list[float] = field(default_factory=list)  # as shares of the epochs, 0..1

    def __post_init__(self) -> None:
        valid = self.epochs is None or 1 <= self.epochs <= MOST_EPOCHS
        require(self, "epochs", valid, f"from 1 to {MOST_EPOCHS}, or null")
        require(self, "lr", self.lr is None or 0 < self.lr < math.inf, "above 0")
        require(self, "lr_decay", 0 < self.lr_decay < math.inf, "above 0")
        shares = all(0 <= at <= 1 for at in self.lr_decay_at)
        require(self, "lr_decay_at", shares, "shares between 0 and 1")

    @property
    def overrides_lr(self) -> bool:
        return self.lr is not None or (self.lr_decay != 1 and len(self.lr_decay_at) > 0)

    def lr_in(self, epoch: int, epochs: int, default: float) -> float:
        """Learning rate in an epoch, counted from 0; `default` is the rate of honest clients."""
        # In floating point, 0.55 of 100 epochs is slightly more than 55.
        n_decays = sum(epoch >= at * epochs - 1e-9 for at in self.lr_decay_at)
        return (default if self.lr is None else self.lr) * self.lr_decay**n_decays


@dataclass(frozen=True)
class Attack(Plugin):
    """Base class of attacks. Override any of five methods, called in this order:

        poison     a client's training data, before it trains
        objective  the client's loss, in every training step
        project    the client's parameters, after every training step
        craft      the client's update, after training
        collude    the updates of all malicious clients in the round

    Subclasses are frozen dataclasses whose fields are the hyper-parameters. An attack keeps no
    state. It sees the global model and its own clients; `Omniscient` attacks also see the updates
    of honest clients.
    """

    version: ClassVar[int] = 1  # increase it when the same input gives a different output
    active: ClassVar[bool] = True  # False: malicious clients behave honestly
    trains: ClassVar[bool] = True  # False: clients skip training; `craft` receives a zero update
    adaptive_to: ClassVar[tuple[str, ...]] = ()  # defenses that the attack was designed to evade

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = cls.adaptive_to
        if not isinstance(declared, tuple) or not all(isinstance(d, str) for d in declared):
            raise TypeError(f"adaptive_to must be a tuple of names of defenses, got {declared!r}")

    @property
    def exemptions(self) -> Mapping[str, str]:
        """Checks of `fedbench.testing` that the attack fails by definition, each with the reason.

        A class attribute can replace this property, unless the exemptions depend on settings.
        """
        return {}

    @property
    def training(self) -> TrainingOverrides:
        """How the local training of malicious clients differs from that of honest ones."""
        return TrainingOverrides()

    @property
    def needs_clean_update(self) -> bool:
        """Whether each malicious client first trains honestly, to fill `view.clean_update`."""
        return False

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        """Settings of the run's backdoors; `default` holds the dataset's.

        With an empty list, BA is not measured.
        """
        return []

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        """Raise ValueError, naming the values, if the attack cannot use these backdoors."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        """Return a malicious client's raw samples [n, ...] and labels, poisoned.

        Do not modify x and y.
        """
        return x, y

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        """Return what a malicious client minimizes, differentiable in its loss and parameters.

        `params` are the trainable parameters in the order of P.
        """
        return loss

    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        """Modify the parameters in place after each training step."""

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        """Return what a malicious client sends instead of its update [P].

        Do not modify `update`.
        """
        return update

    def collude(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        """Return what the malicious clients send instead of their crafted updates [M, P].

        Do not modify `updates`.
        """
        return updates


ATTACKS: Registry[Attack] = Registry("attack", "fedbench.attacks")


@dataclass(frozen=True)
class BackdoorAttack(TrainingOverrides, Attack):
    """Base class of targeted attacks: poison a share `pdr` of the data with backdoors."""

    backdoors: list[Any] | None = None  # None: the dataset's default backdoors

    @property
    def training(self) -> TrainingOverrides:
        return self

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return default if self.backdoors is None else self.backdoors

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        if not backdoors:
            raise ValueError("backdoors must be one or more, got none")

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        """Apply one backdoor to exactly a share `pdr` of the samples.

        With k backdoors, the client in slot i uses backdoor i mod k.
        """
        backdoor = poisoning.backdoors[poisoning.slot % len(poisoning.backdoors)]
        chosen = poisoning.choose(len(y)).to(y.device)
        x, y = x.clone(), y.clone()
        x[chosen], y[chosen] = backdoor.poison(x[chosen], y[chosen], poisoning.rng)
        return x, y


@dataclass(frozen=True)
class Omniscient(Attack):
    """Base class of attacks that see honest updates, which the usual threat model rules out."""

    omniscient: bool = True  # False: use the malicious clients' own honest updates instead

    def honest_updates(self, updates: Tensor, view: AttackView) -> Tensor:
        """Return the honest updates [k, P] that the attack builds on.

        These are the updates of the round's honest clients. If the attack does not see them, or
        none is finite, the malicious clients' own `updates`, trained honestly, replace them.
        Rows that are not finite, from diverged training, are dropped.
        """
        for rows in (view.benign, updates):
            if rows is not None and (finite := rows.isfinite().all(dim=1)).any():
                return rows if finite.all() else rows[finite]
        return updates


def flat(params: Sequence[Tensor]) -> Tensor:
    """Concatenate parameters, in the order of P, into one differentiable vector [P]."""
    return torch.cat([param.reshape(-1) for param in params])
