"""FoolsGold: Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020.

https://arxiv.org/abs/1808.04866

h_i is the sum of all updates of client i so far, including this round's, restricted to the output
layer (the paper's indicative features). For clients i, j of this round:

    cs_ij  = cos(h_i, h_j), 0 for i = j or where h is zero
    v_i    = max_j cs_ij
    cs_ij *= v_i / v_j  where v_i < v_j                        (pardoning)
    w_i    = 1 - max_j cs_ij, in [0, 1], divided by max_i w_i; 1 becomes 0.99
    w_i    = kappa (ln(w_i / (1 - w_i)) + 1/2), in [0, 1]
    update = sum_i w_i u_i / sum_i w_i

Clients with w_i > 0 are accepted; the score is 1 - w_i. Histories h are stored by client id. They
take 8 bytes per client and coordinate; a run that could take more than `memory_gb` does not start.

Differs from the authors' code, which adds 1e-5 to the odds w / (1 - w) and to v and scales updates
of norm above 1 down to 1; the paper mentions neither. Public copies divide the sum by N or not
at all, which their choice of learning rate hides. Here the weights sum to 1, because all defenses
use the same server_lr.

Differs from the paper: the paper can weight features by their importance to the model. Here all
parameters of the output layer count equally. If max_i w_i <= 1e-12, the history of every client
has the direction of another one: all count as sybils, and the global model does not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
from fedbench.errors import UserError
from fedbench.ops import gram

LEAST_WEIGHT = 1e-12  # smaller weights are rounding error


@DEFENSES.register("foolsgold")
@dataclass(frozen=True)
class FoolsGold(Defense):
    """Trust a client less, the more its history resembles that of another client."""

    exemptions: ClassVar[Mapping[str, str]] = {"unanimity": "treats identical clients as sybils"}

    layers: str = "output"  # layers to compare: output or all
    kappa: float = 1.0  # confidence: values above 1 separate clients more sharply
    memory_gb: float = 4.0  # most memory for the histories; a checkpoint contains them

    def __post_init__(self) -> None:
        check_features(self.layers)
        if not 0 < self.kappa < math.inf:
            raise ValueError(f"kappa must be above 0 and finite, got {self.kappa}")
        if not 0 < self.memory_gb < math.inf:
            raise ValueError(f"memory_gb must be above 0 and finite, got {self.memory_gb}")

    def check_memory(self, n_clients: int, layers: Mapping[str, slice]) -> None:
        seen = features(self.layers, layers)
        self._check_histories(n_clients, seen.stop - seen.start)

    def _check_histories(self, n_clients: int, n_features: int) -> None:
        needed = 8e-9 * n_clients * n_features
        if needed > self.memory_gb:
            raise UserError(
                f"defense.memory_gb={self.memory_gb:g}: the histories of {n_clients} clients take "
                f"{needed:.2g} GB; raise it, or choose defense.layers=output or a smaller pool"
            )

    def init(self) -> dict[int, Tensor]:
        return {}

    def aggregate(
        self, updates: Tensor, state: dict[int, Tensor], view: ServerView
    ) -> tuple[Aggregate, dict[int, Tensor]]:
        seen = updates[:, features(self.layers, view.layers)]
        ids = view.client_ids.tolist()
        self._check_histories(len(state.keys() | set(ids)), seen.shape[1])
        sums = {i: row.double() + state.get(i, 0) for i, row in zip(ids, seen, strict=True)}
        trust = self._trust(torch.stack([sums[i] for i in ids]))  # [N]
        return weighted_mean(updates, trust, 1 - trust), state | sums

    def _trust(self, histories: Tensor) -> Tensor:
        """Weights w in 0..1 from the histories h: [N, F] -> [N]."""
        products = gram(histories)
        lengths = products.diagonal().sqrt()
        cosines = products / (lengths[:, None] * lengths[None, :])
        cosines = cosines.nan_to_num(0, 0, 0).clamp(-1, 1).fill_diagonal_(0)  # [N, N]
        closest = cosines.max(dim=1).values  # v [N], at least 0 because the diagonal is 0
        pardon = (closest[:, None] / closest[None, :]).nan_to_num(nan=1.0).clamp_max(1)
        trust = (1 - (cosines * pardon).max(dim=1).values).clamp(0, 1)
        if trust.max() <= LEAST_WEIGHT:
            return torch.zeros_like(trust)
        trust = trust / trust.max()
        trust = torch.where(trust == 1, 0.99, trust)
        return (self.kappa * (trust.logit() + 0.5)).clamp(0, 1)
