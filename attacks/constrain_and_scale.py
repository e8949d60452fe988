"""Constrain-and-scale: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

A malicious client poisons a share pdr of its samples with the backdoor (trigger and target label)
and trains from the global model G to a model w. With several backdoors, clients take turns.

    loss   = alpha * L_class + (1 - alpha) * L_ano
    update = gamma * (w - G)

L_class is the task loss on the clean and the poisoned samples. L_ano keeps w near G, to evade
anomaly detection:

    l2:      |w - G|_2
    cosine:  1000 * (1 - cos(w, G))

gamma makes the backdoor survive averaging. With M malicious among N clients it is a number or

    auto:     N / (server_lr * M)
    bounded:  min(auto, |u| / |w - G|_2)

With `auto`, if the honest updates cancel out, averaging replaces G with the mean of the malicious
models. With `bounded`, the client first trains honestly and never sends a longer update than u, the
result: u is its best estimate of how long honest updates are.

Differs from the paper: epochs and learning rate default to those of honest clients. On CIFAR-10 the
authors train 15 epochs at 0.05 and divide the rate by 10 after 20 % and 80 % of the epochs:
epochs=15 lr=0.05 lr_decay=0.1 lr_decay_at=[0.2,0.8]. The cosine between neighboring models differs
little from 1, hence the factor 1000, taken from the authors' code. Their cosine is that of the
scaled model, which makes the term steeper by gamma^2, too steep for the usual learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, flat

CONSTRAINTS = ("l2", "cosine")
COSINE_WEIGHT = 1000.0


@dataclass(frozen=True)
class ScaledBackdoorAttack(BackdoorAttack):
    """A backdoor attack that multiplies each malicious update by gamma. Base of other attacks."""

    gamma: float | int | str = 1.0  # a number, auto or bounded

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.gamma in ("auto", "bounded")
        if not named and (isinstance(self.gamma, str) or not 0 < float(self.gamma) < math.inf):
            raise ValueError(f"gamma must be auto, bounded or a number above 0, got {self.gamma}")

    @property
    def needs_clean_update(self) -> bool:
        return self.gamma == "bounded"

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return update * self.scale(update, view)

    def scale(self, update: Tensor, view: AttackView) -> float | Tensor:
        """gamma as a number, for an update w - G [P]."""
        if not isinstance(self.gamma, str):
            return self.gamma
        replacement = view.n_clients / (view.server_lr * view.n_malicious)
        if self.gamma == "auto":
            return replacement
        assert view.clean_update is not None
        norm = torch.linalg.vector_norm(update, dtype=torch.float64)
        bound = torch.linalg.vector_norm(view.clean_update, dtype=torch.float64)
        return torch.where(norm * replacement > bound, bound / norm, replacement).to(update.dtype)


@ATTACKS.register("constrain_and_scale")
@dataclass(frozen=True)
class ConstrainAndScale(ScaledBackdoorAttack):
    """Train a backdoor near the global model, then scale the update to survive averaging."""

    alpha: float = 0.7  # weight of the task loss
    constraint: str = "l2"  # form of L_ano: l2 or cosine
    gamma: float | int | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        if self.constraint not in CONSTRAINTS:
            raise ValueError(f"constraint must be l2 or cosine, got {self.constraint}")

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        if self.alpha == 1:
            return loss
        update = flat(params) - view.global_params  # [P]
        return self.alpha * loss + (1 - self.alpha) * self.anomaly(update, view)

    def anomaly(self, update: Tensor, view: AttackView) -> Tensor:
        """L_ano of the model w = G + update."""
        if self.constraint == "l2":
            norm: Tensor = torch.linalg.vector_norm(update)
            return norm
        local = view.global_params + update
        return COSINE_WEIGHT * (1 - torch.cosine_similarity(local, view.global_params, dim=0))
