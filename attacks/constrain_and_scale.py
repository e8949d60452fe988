"""Constrain-and-scale: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

    loss   = alpha * L_class + (1 - alpha) * L_ano
    update = gamma * (w - G)

L_class is the task loss on the client's data, a share pdr of it poisoned. L_ano keeps the model
inconspicuous:

    l2:      |w - G|_2
    cosine:  1000 * (1 - cos(w, G))

With gamma `auto`, N / (server_lr * M) for M malicious among N clients, averaging replaces the
global model by the mean of the malicious ones where the honest updates cancel out; `bounded` scales
no further than to the length of the update that the client would have sent honestly.

Differs from the paper: epochs and learning rate are those of honest clients unless set. The authors
train 15 epochs on CIFAR-10 at 0.05, a tenth of it after 20 and 80 % of the epochs: epochs=15
lr=0.05 lr_decay=0.1 lr_decay_at=[0.2,0.8]. The factor 1000 of the cosine, which is tiny between
neighbouring models, is that of the authors' code, where the cosine is of the scaled model: there
the term is steeper by gamma^2, too steep for the usual learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, flat, length

CONSTRAINTS = ("l2", "cosine")
COSINE_WEIGHT = 1000.0


@ATTACKS.register("constrain_and_scale")
@dataclass(frozen=True)
class ConstrainAndScale(BackdoorAttack):
    """A backdoor trained to stay near the global model, then scaled to survive the averaging."""

    alpha: float = 0.7  # weight of the task loss
    constraint: str = "l2"  # l2 or cosine
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
        """L_ano of a model G + update."""
        if self.constraint == "l2":
            return length(update)
        local = view.global_params + update
        return COSINE_WEIGHT * (1 - torch.cosine_similarity(local, view.global_params, dim=0))
