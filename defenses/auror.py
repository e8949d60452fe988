"""Auror: Shen et al., Auror: Defending Against Poisoning Attacks, ACSAC 2016.

https://doi.org/10.1145/2991079.2991125

Each coordinate of the output layer is a feature. 2-means splits the N values of a feature, one per
client, into two clusters:

    indicative = features whose centers were more than alpha apart in any of the first rounds
    share_i    = share of the indicative features in which client i is in the smaller cluster
    malicious  = share_i > tau
    update     = mean of the other clients' updates

2-means is exact: in one dimension the best clusters are contiguous in sorted order, so it tries all
N - 1 splits. Of two equally good splits, it takes the one with fewer low values. Two clusters of
equal size have no smaller one, and equal values form a single cluster. The score is share_i.

Differs from the paper: the paper spends 10 rounds on finding the indicative features before it
judges any client. Here they are used immediately, to catch an attack in round 0. Either way, rounds
under attack decide which features are indicative. One client that moves every weight by more than
alpha in one of these rounds makes every feature indicative, and a backdoor in a few features then
goes unnoticed. No alpha suits all models: it is set per data set, see docs/defenses.md.

Each round is judged on its own: a client is left out of the rounds in which it counts as malicious,
not excluded for good. That, and the output layer as features, is our reading.
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
    mean_of,
)
from fedbench.ops import two_means

CHUNK = 1 << 21  # values to sort at a time, to bound the memory if all layers are used


@DEFENSES.register("auror")
@dataclass(frozen=True)
class Auror(Defense):
    """Drop clients that are in the minority wherever clients form two groups."""

    alpha: float = 0.2  # distance of the two centers above which a feature is indicative
    layers: str = "output"  # layers whose coordinates are features: output or all
    tau: float = 0.5  # share of minority features above which a client is malicious
    rounds: int = 10  # number of first rounds in which features can become indicative

    def __post_init__(self) -> None:
        check_features(self.layers)
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be 0 or more and finite, got {self.alpha}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be between 0 and 1, got {self.tau}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    def aggregate(
        self, updates: Tensor, state: Tensor | None, view: ServerView
    ) -> tuple[Aggregate, Tensor]:
        values = updates[:, features(self.layers, view.layers)]  # [N, F]
        parts = [_gaps_and_minority(part) for part in values.split(CHUNK // len(values) + 1, dim=1)]
        gaps, minority = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        indicative = torch.zeros_like(gaps, dtype=torch.bool) if state is None else state  # [F]
        if view.index < self.rounds:
            indicative = indicative | (gaps > self.alpha)
        counts = (minority & indicative).sum(dim=1)
        shares = counts.double() / indicative.sum().clamp_min(1)  # [N]
        return mean_of(updates, shares <= self.tau, shares, self.tau), indicative


def _gaps_and_minority(values: Tensor) -> tuple[Tensor, Tensor]:
    """Distance of the two centers of each column of [N, F]: [F], and its minority: [N, F]."""
    gaps, lower = two_means(values)
    n, n_lower = len(values), lower.sum(dim=0)
    minority = torch.where(2 * n_lower < n, lower, ~lower)
    return gaps, minority & (2 * n_lower != n) & (gaps > 0)
