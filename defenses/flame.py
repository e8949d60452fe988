"""FLAME: Nguyen et al., FLAME: Taming Backdoors in Federated Learning, USENIX Security 2022.

https://arxiv.org/abs/2101.02281

    kept   = the largest cluster of HDBSCAN on the cosine distances of the local models G + u_i,
             with min_cluster_size = N // 2 + 1, min_samples = 1, allow_single_cluster
    S      = median of all N norms |u_i|
    update = mean over the kept of u_i * min(1, S / |u_i|), plus N(0, (lambda S)^2 I)
    score  = the distance at which a client joins the majority

With these settings HDBSCAN finds the first component of more than half of the clients when links
are made in order of distance (single linkage): all whom links of length up to h connect, for the
smallest h that connects a majority. That is what is computed here; tests compare it with
scikit-learn's HDBSCAN. N = 1 is kept, where HDBSCAN would not run.

lambda is 0.001 for images and words; for traffic the paper takes 0.01. By its definition it keeps
little more than half of the clients whenever these are diverse, attack or not: honest clients of
unusual data are rejected in every round. Batch-norm statistics are averaged over the kept clients
as they are, neither clipped nor noised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.ops import clipped_sum, gaussian, middle, pairwise_cosine_dist


@DEFENSES.register("flame")
@dataclass(frozen=True)
class Flame(Defense):
    """Keeps the models that point the same way, clips them to the median norm, adds noise."""

    noise: float = 0.001  # lambda: standard deviation of the noise, as a share of S

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be 0 or more and finite, got {self.noise}")

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        distances, norms = pairwise_cosine_dist(updates, view.global_params)  # [N, N], [N]
        scores = _joins_majority_at(distances)  # [N]
        kept = scores == scores.min()
        weights = kept.to(updates.dtype) / kept.sum()
        bound = middle(norms)  # S
        update = clipped_sum(updates, weights, norms, bound)
        update += (self.noise * bound).to(updates.dtype) * gaussian(update, view.rng)
        return Aggregate(update, weights, kept, scores), state


def _joins_majority_at(distances: Tensor) -> Tensor:
    """The shortest link length at which each client is in a component of more than half: [N]."""
    n = len(distances)
    majority = n // 2 + 1
    heights = torch.full((n,), 0.0 if n < 2 else torch.inf, dtype=torch.float64)
    component = torch.arange(n)
    for height, a, b in sorted(_spanning_tree(distances.cpu())):
        component[component == component[a]] = int(component[b])
        merged = component == component[b]
        if int(merged.sum()) >= majority:
            heights[merged] = heights[merged].clamp_max(height)
    return heights.to(distances.device)


def _spanning_tree(distances: Tensor) -> list[tuple[float, int, int]]:
    """The N - 1 links (length, a, b) of a minimum spanning tree, by Prim's algorithm."""
    nearest, link = distances[0].clone(), torch.zeros(len(distances), dtype=torch.long)
    nearest[0] = torch.inf  # in the tree
    links = []
    for _ in range(len(distances) - 1):
        new = int(nearest.argmin())
        links.append((float(nearest[new]), int(link[new]), new))
        in_tree = nearest == torch.inf
        closer = (distances[new] < nearest) & ~in_tree
        link[closer] = new
        nearest = torch.where(closer, distances[new], nearest)
        nearest[new] = torch.inf
    return links
