"""Auror: Shen et al., Auror: Defending Against Poisoning Attacks, ACSAC 2016.

https://doi.org/10.1145/2991079.2991125

For every coordinate of the output layer (a feature), the N values that the clients send are split
in two by 2-means:

    indicative = the features whose centres were further apart than alpha in any of the first rounds
    share_i    = share of the indicative features in which client i is in the smaller cluster
    malicious  = share_i > tau
    update     = mean of the other clients' updates

2-means is exact here: in one dimension the best clusters are neighbours in the sorted order, so all
N - 1 splits are tried. Clusters of equal size have no smaller one, and values that are all equal
make one cluster. The score is share_i.

Differences: the paper finds the indicative features in 10 rounds before it judges anybody; here
they are used at once, so that an attack in round 0 is met. Either way rounds under attack decide
what is indicative: one client that moves every weight by more than alpha in one of them makes every
feature indicative, after which a backdoor in few of them is not seen. Of two equally good splits
the one with fewer low values counts. alpha has no value that suits all models: it is set for each
data set, and docs/defenses.md says how.
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

VALUES = 1 << 21  # sorted at a time, so that all layers take no more memory than one


@DEFENSES.register("auror")
@dataclass(frozen=True)
class Auror(Defense):
    """Drops clients that are in the minority where clients fall into two groups."""

    alpha: float = 0.2  # distance of two centres above which a feature is indicative
    layers: str = "output"  # whose coordinates are features: output or all
    tau: float = 0.5  # share of minority features above which a client is malicious
    rounds: int = 10  # in which features can become indicative

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
        parts = [
            _gaps_and_minority(part) for part in values.split(VALUES // len(values) + 1, dim=1)
        ]
        gaps, minority = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        indicative = torch.zeros_like(gaps, dtype=torch.bool) if state is None else state  # [F]
        if view.index < self.rounds:
            indicative = indicative | (gaps > self.alpha)
        counts = (minority & indicative).sum(dim=1)
        shares = counts.double() / indicative.sum().clamp_min(1)  # [N]
        return mean_of(updates, shares <= self.tau, shares), indicative


def _gaps_and_minority(values: Tensor) -> tuple[Tensor, Tensor]:
    """How far the two centres of each column of [N, F] are apart [F], and its minority [N, F]."""
    gaps, lower = two_means(values)
    n, n_lower = len(values), lower.sum(dim=0)
    minority = torch.where(2 * n_lower < n, lower, ~lower)
    return gaps, minority & (2 * n_lower != n) & (gaps > 0)
