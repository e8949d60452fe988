"""Sign flipping: Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods, AAAI 2019.

https://arxiv.org/abs/1811.03761

    update = -scale * u

u is the honestly trained update of the malicious client. Untargeted: its effect shows in MA. With M
malicious of N clients, the mean update changes sign if scale > (N - M) / M, which is 4 at pmr 0.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView


@ATTACKS.register("sign_flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Send the negated, scaled update."""

    scale: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return update * -self.scale
