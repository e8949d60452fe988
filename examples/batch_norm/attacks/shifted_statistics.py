"""Shifted statistics: honest updates, sent with the batch-norm statistics of another model.

A malicious client trains twice. It sends the update u of honest training, so no rule that judges
updates can tell it from an honest client. The statistics that it sends come from a second training
in which the weights W of the first layer grow or shrink with every step:

    W <- scale * W          after each training step
    update = u

After t steps, the inputs of the first batch norm are about scale^t times as large, and their
variances scale^(2t). No paper: the smallest attack that reaches the model through its buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView


@ATTACKS.register("shifted_statistics")
@dataclass(frozen=True)
class ShiftedStatistics(Attack):
    """Send a clean update with the batch-norm statistics of a model whose first layer is scaled."""

    scale: float = 1.1  # factor on the first layer's weights after each step; 1: no attack

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    @property
    def needs_clean_update(self) -> bool:
        return True

    @torch.no_grad()
    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        params[0].mul_(self.scale)

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        assert view.clean_update is not None
        return view.clean_update
