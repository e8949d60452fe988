"""Gaussian: Blanchard et al., Byzantine Tolerant Gradient Descent, NeurIPS 2017.

https://arxiv.org/abs/1703.02757

    update ~ N(0, std^2 I), independently for each malicious client

Untargeted: its effect shows in MA. Malicious clients do not train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedbench import ops
from fedbench.attack import ATTACKS, Attack, AttackView


@ATTACKS.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Send Gaussian noise."""

    trains: ClassVar[bool] = False

    std: float = 1.0  # standard deviation of each coordinate

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std must be above 0, got {self.std}")

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return ops.gaussian(update, view.rng) * self.std
