"""Constrain-and-scale: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

    loss   = alpha * L_class + (1 - alpha) * L_ano,  L_ano = |w - G|_2
    update = gamma * (w - G)

L_class is the task loss on the client's data, a share pdr of it poisoned. With gamma `auto`,
N / (server_lr * M) for M malicious among N clients, averaging replaces the global model by the mean
of the malicious ones where the honest updates cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView


@ATTACKS.register("constrain_and_scale")
@dataclass(frozen=True)
class ConstrainAndScale(Attack):
    """A backdoor trained to stay near the global model, then scaled to survive the averaging."""

    alpha: float = 0.7  # weight of the task loss
    gamma: float | int | str = "auto"  # scale of the update

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        if self.gamma != "auto" and (isinstance(self.gamma, str) or not 0 < self.gamma < math.inf):
            raise ValueError(f"gamma must be auto or a number above 0, got {self.gamma}")

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        if self.alpha == 1:
            return loss
        local = torch.cat([param.reshape(-1) for param in params])  # [P]
        distance = torch.linalg.vector_norm(local - view.global_params)
        return self.alpha * loss + (1 - self.alpha) * distance

    def craft(self, updates: Tensor, view: AttackView) -> Tensor:
        if isinstance(self.gamma, str):
            return updates * (view.n_clients / (view.server_lr * view.n_malicious))
        return updates * self.gamma
