"""Min-Max: Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021.

https://www.ndss-symposium.org/ndss-paper/manipulating-the-byzantine-optimizing-model-poisoning-attacks-and-defenses-for-federated-learning/

    update = mean(u) + gamma * p, the same from all malicious clients
    gamma  = the largest with max_i |update - u_i| <= max_ij |u_i - u_j|

over the honest updates u. The direction p is one of the paper's three:

    std:   -std(u), coordinate by coordinate
    unit:  -mean(u) / |mean(u)|
    sign:  -sign(mean(u))

Untargeted: MA tells what it does. Omniscient by default; with omniscient=false the u are the
malicious clients' own honest updates.

Differs from the paper: gamma is the exact solution, the least over i of the larger roots of |mean +
gamma p - u_i|^2 = max_ij |u_i - u_j|^2, where the authors halve a step until it is small.
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
    """As far from the honest mean as any two honest updates are from each other."""

    perturbation: str = "std"  # std, unit or sign

    def __post_init__(self) -> None:
        if self.perturbation not in PERTURBATIONS:
            raise ValueError(f"perturbation must be std, unit or sign, got {self.perturbation}")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        known = self.known(updates, view)
        mean = known.mean(dim=0)  # [P]
        direction = self._direction(known, mean)
        gamma = _farthest(known, mean, direction)
        return (mean + gamma.to(mean.dtype) * direction).expand_as(updates)

    def _direction(self, known: Tensor, mean: Tensor) -> Tensor:
        if self.perturbation == "sign":
            return -mean.sign()
        if self.perturbation == "std":
            return -known.std(dim=0) if len(known) > 1 else torch.zeros_like(mean)
        length = torch.linalg.vector_norm(mean, dtype=torch.float64)  # float32's would overflow
        return -(mean / torch.where(length > 0, length, 1)).to(mean.dtype)


def _farthest(known: Tensor, mean: Tensor, direction: Tensor) -> Tensor:
    """The largest gamma; 0 without a direction. Products are summed in float64."""
    reach = pairwise_sq_dist(known).max()
    away, along = known.new_zeros(2, len(known), dtype=torch.float64)  # of mean - u_i
    square = known.new_zeros((), dtype=torch.float64)  # |p|^2
    for columns, rows in in_double(known):
        step = direction[columns].double()
        rows.sub_(mean[columns]).neg_()
        away += torch.linalg.vector_norm(rows, dim=1) ** 2
        along += rows @ step
        square += step @ step
    if square == 0:
        return square
    # gamma^2 |p|^2 + 2 gamma p.(mean - u_i) + |mean - u_i|^2 = reach
    roots = (-along + (along**2 + square * (reach - away).clamp_min(0)).sqrt()) / square
    return roots.min().clamp_min(0)
