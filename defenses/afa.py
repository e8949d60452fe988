"""AFA: Munoz-Gonzalez et al., Byzantine-Robust Federated ML through Adaptive Model Averaging, 2019.

https://arxiv.org/abs/1909.05125

With p_k = a_k / (a_k + b_k) the reputation of client k before the round, starting at a = b = 3:

    repeat on the clients that are left, xi = 2, 2.5, 3, ...
        update = sum_k p_k u_k / sum_k p_k
        s_k    = cos(u_k, update)
        drop   s_k < median(s) - xi std(s)  if mean(s) < median(s), else s_k > median(s) + xi std(s)
    until nobody is dropped
    a_k += 1 for clients kept, b_k += 1 for clients dropped
    k is blocked for good when BetaCDF(1/2; a_k, b_k) > 0.95: a new client at its 6th drop in a row

The score is 1 - s_k against the final update. Memory is by client id. std has ddof 0; nobody is
dropped where it is below 1e-12, which is rounding. A client that is blocked takes no part.

Differences: the paper and public code compare local models; here updates are compared, since
models differ from the global one by little and have cosines near 1 whoever sends them. Clients
weigh the same whatever their number of samples, because a claimed number can lie. a and b are whole
numbers, so BetaCDF(1/2) is a sum of binomial coefficients and exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, weighted_mean
from fedbench.ops import gram, median

NO_SPREAD = 1e-12  # a standard deviation of equal similarities
Counts = dict[int, tuple[int, int]]  # client id -> (a, b)


@DEFENSES.register("afa")
@dataclass(frozen=True)
class AFA(Defense):
    """Drops clients of unusual direction, and blocks those it dropped too often."""

    alpha0: int = 3  # a and b of a new client
    beta0: int = 3
    xi: float = 2.0  # standard deviations from the median that are too far,
    xi_step: float = 0.5  # and how many more in each repetition
    block: float = 0.95  # chance that a client is more often bad than good, to block it

    def __post_init__(self) -> None:
        for name in ("alpha0", "beta0"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.xi < math.inf:
            raise ValueError(f"xi must be above 0 and finite, got {self.xi}")
        if not 0 <= self.xi_step < math.inf:
            raise ValueError(f"xi_step must be 0 or more and finite, got {self.xi_step}")
        if not 0 < self.block <= 1:
            raise ValueError(f"block must be above 0 and at most 1, got {self.block}")
        if self.blocks(self.alpha0, self.beta0):
            raise ValueError(f"block must not block new clients, got {self.block}")

    def init(self) -> Counts:
        return {}

    def aggregate(
        self, updates: Tensor, state: Counts, view: ServerView
    ) -> tuple[Aggregate, Counts]:
        ids = view.client_ids.tolist()
        counts = [state.get(i, (self.alpha0, self.beta0)) for i in ids]
        reputation = torch.tensor([a / (a + b) for a, b in counts], dtype=torch.float64)
        heard = torch.tensor([not self.blocks(a, b) for a, b in counts])
        reputation, heard = reputation.to(updates.device), heard.to(updates.device)
        kept, similarity = self._kept(gram(updates), reputation, heard)
        judged = zip(ids, counts, kept.tolist(), heard.tolist(), strict=True)
        after = {i: (a + good, b + (not good)) for i, (a, b), good, known in judged if known}
        shares = torch.where(kept, reputation, 0)
        return weighted_mean(updates, shares, 1 - similarity), state | after

    def _kept(self, products: Tensor, reputation: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
        """Who is left, and everyone's cosine to the aggregate of these: [N], [N].

        An aggregate is a sum of updates, so its products with them need no pass over P.
        """
        kept, xi = heard, self.xi
        while True:
            weights = torch.where(kept, reputation, 0)
            similarity = _cosines(products, weights)
            among = similarity[kept]
            if len(among) == 0 or among.std(correction=0) <= NO_SPREAD:
                return kept, similarity
            centre, reach = median(among), xi * among.std(correction=0)
            if among.mean() < centre:
                dropped = kept & (similarity < centre - reach)
            else:
                dropped = kept & (similarity > centre + reach)
            if not dropped.any():
                return kept, similarity
            kept, xi = kept & ~dropped, xi + self.xi_step

    def blocks(self, a: int, b: int) -> bool:
        return beta_cdf_at_half(a, b) > self.block


@lru_cache(maxsize=1 << 14)
def beta_cdf_at_half(a: int, b: int) -> float:
    """BetaCDF(1/2; a, b) = P(Binomial(a + b - 1, 1/2) >= a), from whole numbers."""
    n = a + b - 1
    total = ways = 1  # to choose n of n
    for k in range(n, a, -1):
        ways = ways * k // (n - k + 1)
        total += ways
    return total / 2**n


def _cosines(products: Tensor, weights: Tensor) -> Tensor:
    """cos(u_k, sum_j w_j u_j) from the products of the u: [N]; 0 where one has no length."""
    lengths = products.diagonal().sqrt()
    along = products @ weights
    squared = weights @ along
    if squared <= 1e-14 * (weights @ lengths) ** 2:  # what rounding leaves of zero
        return torch.zeros_like(along)
    cosines = along / (lengths * squared.sqrt())
    return cosines.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-1, 1)
