"""FoolsGold: Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020.

https://arxiv.org/abs/1808.04866

With h_i the sum of all updates of client i so far, this round's included, restricted to the output
layer (the paper's indicative features), and i, j clients of this round:

    cs_ij  = cos(h_i, h_j), 0 for i = j or where h is zero
    v_i    = max_j cs_ij
    cs_ij *= v_i / v_j  where v_i < v_j                        (pardoning)
    w_i    = 1 - max_j cs_ij, in [0, 1], divided by max_i w_i; 1 becomes 0.99
    w_i    = kappa (ln(w_i / (1 - w_i)) + 1/2), in [0, 1]
    update = sum_i w_i u_i / sum_i w_i

Accepted are clients with w_i > 0; the score is 1 - w_i. Memory is by client id.

Differences from the authors' code: theirs adds 1e-5 to the odds w / (1 - w) and to v, and scales
updates of norm above 1 down to 1, which their paper does not mention; public copies divide the sum
by N or by nothing, which the choice of learning rate hides there. Here the weights add up to 1,
since every rule meets the same server_lr. The paper can also weigh features by their importance to
the model; here all of the output layer count alike. Where max_i w_i <= 1e-12, all clients are
alike: all are taken for sybils, and the global model stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.defense import (
    DEFENSES,
    Aggregate,
    Defense,
    ServerView,
    check_features,
    features,
    weighted_mean,
)
from fedbench.ops import gram

ALIKE = 1e-12  # weights below this are rounding errors


@DEFENSES.register("foolsgold")
@dataclass(frozen=True)
class FoolsGold(Defense):
    """Trusts clients the less, the more their histories resemble another's."""

    layers: str = "output"  # where to look for likeness: output or all
    kappa: float = 1.0  # confidence: above 1 it divides more sharply

    def __post_init__(self) -> None:
        check_features(self.layers)
        if not 0 < self.kappa < math.inf:
            raise ValueError(f"kappa must be above 0 and finite, got {self.kappa}")

    def init(self) -> dict[int, Tensor]:
        return {}

    def aggregate(
        self, updates: Tensor, state: dict[int, Tensor], view: ServerView
    ) -> tuple[Aggregate, dict[int, Tensor]]:
        seen = updates[:, features(self.layers, view.layers)]
        ids = view.client_ids.tolist()
        sums = {i: row.double() + state.get(i, 0) for i, row in zip(ids, seen, strict=True)}
        trust = self._trust(torch.stack([sums[i] for i in ids]))  # [N]
        return weighted_mean(updates, trust, 1 - trust), state | sums

    def _trust(self, histories: Tensor) -> Tensor:
        """[N, F] -> w [N] in 0..1."""
        products = gram(histories)
        lengths = products.diagonal().sqrt()
        cosines = products / (lengths[:, None] * lengths[None, :])
        cosines = cosines.nan_to_num(0, 0, 0).clamp(-1, 1).fill_diagonal_(0)  # [N, N]
        likeness = cosines.max(dim=1).values  # [N], 0 or more for the diagonal's sake
        pardon = (likeness[:, None] / likeness[None, :]).nan_to_num(nan=1.0).clamp_max(1)
        trust = (1 - (cosines * pardon).max(dim=1).values).clamp(0, 1)
        if trust.max() <= ALIKE:
            return torch.zeros_like(trust)
        trust = trust / trust.max()
        trust = torch.where(trust == 1, 0.99, trust)
        return (self.kappa * (trust.logit() + 0.5)).clamp(0, 1)
