"""ALIE: Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning, 2019.

https://arxiv.org/abs/1902.06156

    update = mean(u) - z * std(u), coordinate by coordinate, the same from all malicious clients

over the honest updates u. z is the largest for which enough honest clients stand further from the
mean, so that a majority supports the malicious value: with s = floor(N / 2) + 1 - M supporters
needed,

    z = Phi^-1((N - M - s) / (N - M))

Untargeted: MA tells what it does. Omniscient by default; the paper's attacker takes mean and std
from its own clients' honest updates: omniscient=false, where a single client then sends its own.
std is that of the sample (ddof 1), as torch's; 0 for a single update. s is at least 1: M clients
that are a majority by themselves need no supporters, and no z would be the largest. Few attackers
have little room: z is 0.21 for 6 of 30, 0 for 2 of 10 and below 0 for 1 of 10; 0 if no honest
client is left over.
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
    """Stays within the spread of honest updates, always on the same side."""

    z: float | int | str = "auto"  # standard deviations from the mean

    def __post_init__(self) -> None:
        if self.z != "auto" and (isinstance(self.z, str) or not math.isfinite(float(self.z))):
            raise ValueError(f"z must be auto or a number, got {self.z}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        known = self.known(updates, view)
        mean = known.mean(dim=0)  # [P]
        std = known.std(dim=0) if len(known) > 1 else torch.zeros_like(mean)
        return (mean - self._deviations(view) * std).expand_as(updates)

    def _deviations(self, view: AttackView) -> float:
        if not isinstance(self.z, str):
            return self.z
        n, m = view.n_clients, view.n_malicious
        n_supporters = max(n // 2 + 1 - m, 1)
        share = (n - m - n_supporters) / max(n - m, 1)
        return NormalDist().inv_cdf(share) if share > 0 else 0.0
