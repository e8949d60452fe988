"""Median: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

https://arxiv.org/abs/1803.01498

    update_p = median_i u_ip, for every coordinate p

For an even number of clients the median is the mean of the two middle values (`torch.median` takes
the lower one). Median does not judge clients, so TPR and TNR are undefined. The paper has no batch
norm; its statistics are combined by the server, see `fedbench.buffer_aggregation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.ops import column_median


@DEFENSES.register("median")
@dataclass(frozen=True)
class Median(Defense):
    """Coordinate-wise median."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        weights = updates.new_full((len(updates),), 1 / len(updates))
        return Aggregate(column_median(updates), weights), state
