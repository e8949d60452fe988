"""Sacrifice: ours; raises the mean score of BayBFed (Kumari et al., S&P 2023) for accomplices.

https://arxiv.org/abs/2301.09508

    update = length * median |u| * G / |G|    from the first n_sacrificed malicious clients
    update = u = gamma * (w - G)              from the others, as in constrain_and_scale

The median is over the round's malicious clients, G is the global model and w a malicious model.

BayBFed keeps the clients whose score is below the mean of all scores. A multiple of G has cosine 1
with G: its distribution is a spike, and its score is close to the highest possible one, whatever
its length. It is rejected, but it raises the mean, and by the paper's rule its accomplices pass.
BayBFed's `score_cap` limits how far one score can raise the mean, and `norm_range` how long a
judged update can be (docs/baybfed.md, "A sacrificed client"). The attacker knows the rule and the
updates of its own clients, not the honest ones.

Clients are sacrificed in order of id. If all clients take part in every round, these are the same
ones in every round, so that rules with a memory learn nothing about the others. One malicious
client is never sacrificed, since nobody else would profit: a malicious client that is alone in its
round sends u. If G is 0, nobody is sacrificed. gamma=auto counts all malicious clients.

Differs from constrain_and_scale: gamma is 1.5 instead of auto. `score_cap` keeps the threshold so
low that long updates stay above it. docs/attacks.md has the values tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView
from fedbench.attacks.constrain_and_scale import ConstrainAndScale
from fedbench.ops import median, row_norms
from fedbench.registry import require


@ATTACKS.register("sacrifice")
@dataclass(frozen=True)
class Sacrifice(ConstrainAndScale):
    """Give up some clients, whose scores raise the threshold for the others."""

    adaptive_to: ClassVar[tuple[str, ...]] = ("baybfed",)

    n_sacrificed: int = 1  # malicious clients to give up in a round; at least one is left
    length: float = 10.0  # norm of their updates, in median norms of the malicious updates
    gamma: float | int | str = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "n_sacrificed", self.n_sacrificed >= 1, "at least 1")
        require(self, "length", 0 < self.length < math.inf, "above 0")

    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        n_sacrificed = min(self.n_sacrificed, len(updates) - 1)
        g = view.global_params.double()  # [P]
        norm = torch.linalg.vector_norm(g)
        if n_sacrificed == 0 or norm == 0:
            return updates
        sent = updates.clone()
        sent[:n_sacrificed] = self.length * median(row_norms(updates)) / norm * g
        return sent
