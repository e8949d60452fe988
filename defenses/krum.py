"""Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.

https://arxiv.org/abs/1703.02757

    score_i = sum of the squared L2 distances from u_i to its N - f - 2 nearest others
    update  = u_k with k = argmin_i score_i; on ties the lowest k

f is the number of malicious clients to prepare for. The server does not know the true number, so
the default is the largest f for which the paper's condition N > 2f + 2 holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.ops import pairwise_sq_dist


@DEFENSES.register("krum")
@dataclass(frozen=True)
class Krum(Defense):
    """Takes over the one update that is closest to its neighbours."""

    f: int | None = None  # None: the most Krum allows, (N - 3) // 2

    def __post_init__(self) -> None:
        if self.f is not None and self.f < 0:
            raise ValueError(f"f must be 0 or more, got {self.f}")

    def check(self, n: int) -> None:
        f = self._prepared_for(n)
        if n - f - 2 < 1:
            raise ValueError(f"krum needs N - f - 2 >= 1, got N={n}, f={f}")

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        n = len(updates)
        self.check(n)
        distances = pairwise_sq_dist(updates).fill_diagonal_(torch.inf)  # [N, N]
        nearest = distances.sort(dim=1).values[:, : n - self._prepared_for(n) - 2]
        scores = nearest.sum(dim=1)  # [N]
        chosen = torch.arange(n, device=scores.device) == scores.argmin()
        return mean_of(updates, chosen, scores), state

    def _prepared_for(self, n: int) -> int:
        return max((n - 3) // 2, 0) if self.f is None else self.f
