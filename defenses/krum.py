"""Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.

https://arxiv.org/abs/1703.02757

    score_i = sum of the squared L2 distances from u_i to its N - f - 2 nearest neighbors
    update  = mean of the m updates with the lowest scores; ties go to the lowest i
              (m = 1 is Krum, m > 1 the paper's Multi-Krum)

f is the number of malicious clients to tolerate. The server does not know the true number, so the
default is the largest f that satisfies the paper's condition N > 2f + 2. A larger f is allowed as
long as N - f - 2 >= 1, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.ops import pairwise_sq_dist


@DEFENSES.register("krum")
@dataclass(frozen=True)
class Krum(Defense):
    """Average the updates that are closest to their neighbors."""

    version: ClassVar[int] = 2
    exemptions: ClassVar[Mapping[str, str]] = {"tied_clients": "selects the first of equal scores"}

    f: int | None = None  # clients to tolerate; None: the most the paper allows, (N - 3) // 2
    m: int | str = 1  # number of updates to average; auto: N - f

    def __post_init__(self) -> None:
        if self.f is not None and self.f < 0:
            raise ValueError(f"f must be 0 or more, got {self.f}")
        if self.m != "auto" and (isinstance(self.m, str) or self.m < 1):
            raise ValueError(f"m must be auto or at least 1, got {self.m}")

    def check(self, n: int) -> None:
        f = self._tolerated(n)
        if n - f - 2 < 1:
            raise ValueError(f"krum needs N - f - 2 >= 1, got N={n}, f={f}")
        if self._n_chosen(n) > n:
            raise ValueError(f"krum needs m <= N, got N={n}, m={self.m}")

    def warning(self, n: int) -> str | None:
        f = self._tolerated(n)
        return None if n > 2 * f + 2 else f"krum is proven for N > 2f + 2 only, got N={n}, f={f}"

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        n = len(updates)
        self.check(n)
        distances = pairwise_sq_dist(updates).fill_diagonal_(torch.inf)  # [N, N]
        nearest = distances.sort(dim=1).values[:, : n - self._tolerated(n) - 2]
        scores = nearest.sum(dim=1)  # [N]
        best = scores.argsort(stable=True)[: self._n_chosen(n)]
        chosen = torch.zeros(n, dtype=torch.bool, device=scores.device).index_fill(0, best, True)
        return mean_of(updates, chosen, scores), state

    def _tolerated(self, n: int) -> int:
        return max((n - 3) // 2, 0) if self.f is None else self.f

    def _n_chosen(self, n: int) -> int:
        return n - self._tolerated(n) if isinstance(self.m, str) else self.m
