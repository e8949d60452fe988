"""FLAME: Nguyen et al., FLAME: Taming Backdoors in Federated Learning, USENIX Security 2022.

https://arxiv.org/abs/2101.02281

With the global model G, the updates u_i and N clients:

    kept   = the largest cluster of HDBSCAN on the cosine distances of the local models G + u_i,
             with min_cluster_size = N // 2 + 1, min_samples = 1, allow_single_cluster
    S      = median of all N norms |u_i|
    update = mean over the kept of u_i * min(1, S / |u_i|), plus N(0, (lambda S)^2 I)
    score  = the distance at which a client joins the majority

With these settings HDBSCAN reduces to single linkage: link pairs of clients in order of distance
and keep the first component of more than half of the clients. This module computes that component
directly from the single-linkage tree; the tests compare it with scikit-learn's HDBSCAN. Clients at
exactly the same linking distance join together. For N = 1, where HDBSCAN does not run, the client
is kept.

Distances are computed from differences to the model of median length. Near it, they keep all digits
however small they are; between other models, those below 1e-15 are rounding error, or 0.

lambda is 0.001 for images and words; the paper uses 0.01 for network traffic. By definition FLAME
keeps little more than half of the clients if they are diverse, attack or not: it rejects honest
clients with unusual data in every round. Batch-norm statistics are neither clipped nor noised; the
server combines those of the kept clients, see `fedbench.buffer_aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.ops import clipped_sum, gaussian, median, pairwise_cosine_dist


@DEFENSES.register("flame")
@dataclass(frozen=True)
class Flame(Defense):
    """Keep the majority of models with similar directions, clip to the median norm, add noise."""

    exemptions: ClassVar[Mapping[str, str]] = {
        "unanimity": "adds noise",
        "update_precision": "float32 and float64 noise of the same seed differ",
    }

    noise: float = 0.001  # lambda: standard deviation of the noise, relative to S

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be 0 or more and finite, got {self.noise}")

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        distances, norms = pairwise_cosine_dist(updates, view.global_params)  # [N, N], [N]
        scores = _majority_heights(distances)  # [N]
        kept = scores == scores.min()
        weights = kept.to(updates.dtype) / kept.sum()
        bound = median(norms)  # S
        update = clipped_sum(updates, weights, norms, bound)
        update += (self.noise * bound).to(updates.dtype) * gaussian(update, view.rng)
        return Aggregate(update, weights, kept, scores, float(scores.min())), state


def _majority_heights(distances: Tensor) -> Tensor:
    """Distance at which each client joins a component of more than half of the clients: [N].

    The cophenetic distance of two clients is the height at which single linkage connects them, and
    0 for a client and itself. A client is therefore in a component of k clients from its k-th
    smallest cophenetic distance on. Heights are entries of `distances`, unrounded, so ties stay
    exact.
    """
    from scipy.cluster.hierarchy import cophenet, linkage  # type: ignore[import-untyped]
    from scipy.spatial.distance import squareform  # type: ignore[import-untyped]

    n = len(distances)
    if n == 1:
        return torch.zeros_like(distances[0])
    tree = linkage(squareform(distances.cpu().numpy()), method="single")
    heights = torch.from_numpy(squareform(cophenet(tree)))  # [N, N]
    return heights.kthvalue(n // 2 + 1, dim=1).values.to(distances.device)
