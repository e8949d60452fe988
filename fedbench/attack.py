"""Attack: what malicious clients do. The contract of `attacks/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.backdoors import Backdoor
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


@dataclass(frozen=True)
class Poisoning:
    """One malicious client's orders for a round."""

    slot: int  # its place among all malicious clients: 0, 1, ...; stable across rounds
    backdoors: Sequence[Backdoor]
    pdr: float
    rng: torch.Generator


@dataclass(frozen=True)
class Attack:
    """Three moments, each optional: poison the data, change the objective, craft the updates.

    Subclasses are frozen dataclasses whose fields are hyper-parameters. An attack is stateless and
    sees its own clients only.
    """

    version: ClassVar[int] = 1  # raise it when the same input gives another output
    active: ClassVar[bool] = True  # False: malicious clients behave honestly

    backdoors: list[dict[str, Any]] | None = None  # None: the data set's own
    epochs: int | None = None  # the attacker's local epochs; None: as honest clients
    lr: float | None = None  # the attacker's learning rate; None: as honest clients

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def poison(self, x: Tensor, y: Tensor, orders: Poisoning) -> tuple[Tensor, Tensor]:
        """A malicious client's raw samples x [n, ...] and labels y [n], poisoned; inputs are kept.

        By default an exact share `pdr` of the samples gets the trigger and the target label of one
        backdoor: the client's own in turn, when there are several.
        """
        backdoor = orders.backdoors[orders.slot % len(orders.backdoors)]
        n_poisoned = int(orders.pdr * len(y) + 0.5)
        chosen = torch.randperm(len(y), generator=orders.rng)[:n_poisoned]
        x, y = x.clone(), y.clone()
        x[chosen] = backdoor.stamp(x[chosen])
        y[chosen] = backdoor.target
        return x, y

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        """What a malicious client minimises: a differentiable function of its loss and parameters.

        `params` are the trainable parameters in the order of P.
        """
        return loss

    def craft(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        """What the malicious clients send instead of their updates [M, P]; input is kept."""
        return updates


ATTACKS: Registry[Attack] = Registry("attack", home="fedbench.attacks")
