"""IPM: Xie et al., Fall of Empires: Breaking Byzantine-tolerant SGD, UAI 2020.

https://arxiv.org/abs/1903.03936

    update = -epsilon * mean(u), the same from all malicious clients

u are the honest updates. The mean over all N clients has a negative inner product with the honest
mean if epsilon > (N - M) / M, which is 4 at pmr 0.2. Against robust rules a small epsilon works,
because the updates stay near the honest ones. Untargeted: its effect shows in MA. Omniscient by
default; with omniscient=false, u are the honest updates of the malicious clients themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, Omniscient


@ATTACKS.register("ipm")
@dataclass(frozen=True)
class IPM(Omniscient):
    """Send the negated mean of the honest updates."""

    epsilon: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        return (self.honest_updates(updates, view).mean(dim=0) * -self.epsilon).expand_as(updates)
