"""ALIE: Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning, 2019.

https://arxiv.org/abs/1902.06156

    update = mean(u) - z * std(u), per coordinate, the same from all malicious clients

u are the honest updates. z is the largest value for which enough honest clients lie further from
the mean to form a majority with the malicious ones. With s = floor(N / 2) + 1 - M such supporters
needed,

    z = Phi^-1((N - M - s) / (N - M))

Untargeted: its effect shows in MA. Omniscient by default. The paper's attacker estimates mean and
std from the honest updates of its own clients: omniscient=false. A single malicious client then
sends its own honest update.

std is the sample standard deviation (ddof 1), as in torch, and 0 for a single update. s is at least
1: M clients that are a majority by themselves need no supporters, which would leave z unbounded.
Few attackers have little room: z is 0.21 for 6 of 30 clients, 0 for 2 of 10 and negative for 1 of
10. It is 0 if s leaves no other honest client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, Omniscient


@ATTACKS.register("alie")
@dataclass(frozen=True)
class ALIE(Omniscient):
    """Send updates within the spread of honest ones, always on the same side of the mean."""

    z: float | int | str = "auto"  # standard deviations from the mean

    def __post_init__(self) -> None:
        if self.z != "auto" and (isinstance(self.z, str) or not math.isfinite(float(self.z))):
            raise ValueError(f"z must be auto or a number, got {self.z}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        honest = self.honest_updates(updates, view)  # [k, P]
        mean = honest.mean(dim=0)  # [P]
        std = honest.std(dim=0) if len(honest) > 1 else torch.zeros_like(mean)
        return (mean - self._deviations(view) * std).expand_as(updates)

    def _deviations(self, view: AttackView) -> float:
        if not isinstance(self.z, str):
            return self.z
        n, m = view.n_clients, view.n_malicious
        n_supporters = max(n // 2 + 1 - m, 1)
        share = (n - m - n_supporters) / max(n - m, 1)
        return NormalDist().inv_cdf(share) if share > 0 else 0.0
