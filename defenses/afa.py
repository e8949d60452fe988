"""AFA: Munoz-Gonzalez et al., Byzantine-Robust Federated ML through Adaptive Model Averaging, 2019.

https://arxiv.org/abs/1909.05125

With p_k = a_k / (a_k + b_k) the reputation of client k before the round, starting at a = b = 3:

    repeat over the remaining clients, with xi = 2, 2.5, 3, ...
        update = sum_k p_k u_k / sum_k p_k
        s_k    = cos(u_k, update)
        drop   s_k < median(s) - xi std(s)  if mean(s) < median(s), else s_k > median(s) + xi std(s)
    until no client is dropped
    a_k += 1 for clients kept, b_k += 1 for clients dropped
    block k permanently once BetaCDF(1/2; a_k, b_k) > 0.95: a new client at its 6th drop in a row

The score is 1 - s_k against the final update. Reputations are stored by client id. std has ddof 0;
below 1e-12 it is rounding error and no client is dropped. Blocked clients are ignored: they do not
enter the update and their reputation does not change.

Where updates nearly cancel in the sum (shorter than 1e-5 of their added lengths), clients of equal
reputation are added up first, with twice the digits of float64: two opposite clients cannot hide
the direction of the others, however long their updates are. If the sums of different reputations
then cancel to 1e-14 of their lengths, the rest is rounding error: all cosines are 0.

Differs from the paper:
- It compares updates. The paper and public code compare local models, which are all close to the
  global model, so their cosines are near 1 for every client.
- All clients have the same weight, whatever their number of samples, because a client can lie about
  that number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, weighted_mean
from fedbench.ops import gram, in_double, median

NO_SPREAD = 1e-12  # largest std that rounding gives to equal similarities
CANCELED = 1e-10  # relative squared length of a sum, below which a Gram matrix blurs it
WEIGHT_ROUNDING = 1e-14  # length of a sum, relative to its parts, that rounded weights can give
MOST_COUNTS = 10_000  # for alpha0 and beta0; more would outweigh any number of rounds
CDF_ROUNDING = 1e-12  # above the rounding error of the Beta CDF, 3e-14 for a, b <= 300
Counts = dict[int, tuple[int, int]]  # client id -> (a, b)


@DEFENSES.register("afa")
@dataclass(frozen=True)
class AFA(Defense):
    """Drop clients with outlying directions; block clients that were dropped too often."""

    version: ClassVar[int] = 2

    alpha0: int = 3  # a and b of a new client
    beta0: int = 3
    xi: float = 2.0  # distance from the median, in standard deviations, beyond which to drop
    xi_step: float = 0.5  # increase of xi per repetition
    block: float = 0.95  # block if P(client is good less than half of the time) is above this

    def __post_init__(self) -> None:
        for name in ("alpha0", "beta0"):
            if not 1 <= getattr(self, name) <= MOST_COUNTS:
                value = getattr(self, name)
                raise ValueError(f"{name} must be between 1 and {MOST_COUNTS}, got {value}")
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
        active = torch.tensor([not self.blocks(a, b) for a, b in counts])
        reputation, active = reputation.to(updates.device), active.to(updates.device)
        kept, similarity = self._kept(updates, reputation, active)
        judged = zip(ids, counts, kept.tolist(), active.tolist(), strict=True)
        after = {
            i: (a + good, b + (not good)) for i, (a, b), good, is_active in judged if is_active
        }
        shares = torch.where(kept, reputation, 0)
        return weighted_mean(updates, shares, 1 - similarity), state | after

    def _kept(self, updates: Tensor, reputation: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Remaining clients, and the cosine of every client to their aggregate: [N], [N]."""
        products, kept, xi = gram(updates), active, self.xi
        while True:
            weights = torch.where(kept, reputation, 0)
            similarity = _cosines(updates, products, weights)
            among = similarity[kept]
            if len(among) == 0 or among.std(correction=0) <= NO_SPREAD:
                return kept, similarity
            center, reach = median(among), xi * among.std(correction=0)
            if among.mean() < center:
                dropped = kept & (similarity < center - reach)
            else:
                dropped = kept & (similarity > center + reach)
            if not dropped.any():
                return kept, similarity
            kept, xi = kept & ~dropped, xi + self.xi_step

    def blocks(self, a: int, b: int) -> bool:
        """Return whether BetaCDF(1/2; a, b) > block, strictly: rounding error must not block."""
        from scipy.special import betainc  # type: ignore[import-untyped]

        return bool(betainc(a, b, 0.5) > self.block + CDF_ROUNDING)


def _cosines(updates: Tensor, products: Tensor, weights: Tensor) -> Tensor:
    """cos(u_k, sum_j w_j u_j) from the Gram matrix of the u: [N]; 0 if either has length 0.

    The Gram matrix gives all cosines without another pass over P, unless the u cancel in the sum.
    """
    lengths = products.diagonal().sqrt()
    along = products @ weights
    squared = weights @ along
    if squared < CANCELED * (weights @ lengths) ** 2:
        along, squared = _products_with_sum(updates, weights, lengths)
    cosines = along / (lengths * squared.sqrt())
    return cosines.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-1, 1)


def _products_with_sum(updates: Tensor, weights: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """u_k.s [N] and s.s of the sum s = sum_j w_j u_j; both 0 if s is rounding error of the weights.

    Rows of equal weight are added up first, so that rounding of their weight cannot show.
    """
    order = lengths.argsort(descending=True)
    shares = weights[weights > 0].unique()  # [G]
    groups = [order[weights[order] == share].tolist() for share in shares]
    along, squared, parts = map(torch.zeros_like, (weights, weights[0], shares))
    for _, rows in in_double(updates):
        sums = torch.stack([_compensated_sum(rows, group) for group in groups])  # [G, columns]
        total = shares @ sums
        along += rows @ total
        squared += total @ total
        parts += torch.linalg.vector_norm(sums, dim=1) ** 2
    has_direction = squared.sqrt() > WEIGHT_ROUNDING * (shares @ parts.sqrt())
    return along * has_direction, squared * has_direction


def _compensated_sum(rows: Tensor, order: list[int]) -> Tensor:
    """Sum of these rows in this order, with what rounding cuts off (Neumaier): [columns]."""
    total, cut_off = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    for i in order:
        after = total + rows[i]
        without = after - total
        cut_off += (total - (after - without)) + (rows[i] - without)
        total = after
    return total + cut_off
