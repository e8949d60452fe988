"""IPM: Xie et al., Fall of Empires: Breaking Byzantine-tolerant SGD, UAI 2020.

https://arxiv.org/abs/1903.03936

    update = -epsilon * mean(u), the same from all malicious clients

over the honest updates u. The mean over all N clients has a negative product with the honest one if
epsilon > (N - M) / M, at pmr 0.2 above 4; robust rules are fooled by small epsilons, which stay
near. Untargeted: MA tells what it does. Omniscient by default; with omniscient=false the mean is
that of the malicious clients' own honest updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, Omniscient


@ATTACKS.register("ipm")
@dataclass(frozen=True)
class IPM(Omniscient):
    """Sends the opposite of the honest mean."""

    epsilon: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        return (self.known(updates, view).mean(dim=0) * -self.epsilon).expand_as(updates)
