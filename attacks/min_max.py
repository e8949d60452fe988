"""Min-Max: Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021.

https://www.ndss-symposium.org/ndss-paper/manipulating-the-byzantine-optimizing-model-poisoning-attacks-and-defenses-for-federated-learning/

    update = mean(u) + gamma * p, the same from all malicious clients
    gamma  = the largest with max_i |update - u_i| <= max_ij |u_i - u_j|

u are the honest updates. The direction p is one of the paper's three:

    std:   -std(u), per coordinate
    unit:  -mean(u) / |mean(u)|
    sign:  -sign(mean(u))

Untargeted: its effect shows in MA. Omniscient by default; with omniscient=false, u are the honest
updates of the malicious clients themselves.

Differs from the paper: gamma is exact, the minimum over i of the larger root of
|mean + gamma p - u_i|^2 = max_ij |u_i - u_j|^2. The authors search for it by halving a step until
it is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, Omniscient
from fedbench.ops import in_double, pairwise_sq_dist

PERTURBATIONS = ("std", "unit", "sign")


@ATTACKS.register("min_max")
@dataclass(frozen=True)
class MinMax(Omniscient):
    """Move as far from the honest updates as any two of them are from each other."""

    perturbation: str = "std"  # direction p: std, unit or sign

    def __post_init__(self) -> None:
        if self.perturbation not in PERTURBATIONS:
            raise ValueError(f"perturbation must be std, unit or sign, got {self.perturbation}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        honest = self.honest_updates(updates, view)  # [k, P]
        mean = honest.mean(dim=0)  # [P]
        direction = self._direction(honest, mean)
        gamma = _largest_gamma(honest, mean, direction)
        return (mean + gamma.to(mean.dtype) * direction).expand_as(updates)

    def _direction(self, honest: Tensor, mean: Tensor) -> Tensor:
        if self.perturbation == "sign":
            return -mean.sign()
        if self.perturbation == "std":
            return -honest.std(dim=0) if len(honest) > 1 else torch.zeros_like(mean)
        norm = torch.linalg.vector_norm(mean, dtype=torch.float64)  # float32 could overflow
        return -(mean / torch.where(norm > 0, norm, 1)).to(mean.dtype)


def _largest_gamma(honest: Tensor, mean: Tensor, direction: Tensor) -> Tensor:
    """Return the largest gamma allowed, 0 if p is 0. Sums are in float64."""
    max_sq_dist = pairwise_sq_dist(honest).max()
    # |mean - u_i|^2 and p.(mean - u_i), [k] each
    sq_dist, product = honest.new_zeros(2, len(honest), dtype=torch.float64)
    p_sq = honest.new_zeros((), dtype=torch.float64)  # |p|^2
    for columns, rows in in_double(honest):
        p = direction[columns].double()
        rows.sub_(mean[columns]).neg_()
        sq_dist += torch.linalg.vector_norm(rows, dim=1) ** 2
        product += rows @ p
        p_sq += p @ p
    if p_sq == 0:
        return p_sq
    # gamma^2 |p|^2 + 2 gamma p.(mean - u_i) + |mean - u_i|^2 = max_sq_dist
    discriminant = product**2 + p_sq * (max_sq_dist - sq_dist).clamp_min(0)
    roots: Tensor = (-product + discriminant.sqrt()) / p_sq
    return roots.min().clamp_min(0)
