"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017.

https://arxiv.org/abs/1602.05629

    update = 1/N * sum_i u_i

Differs from the paper: all clients have the same weight, whatever their number of samples, because
a client can lie about that number. BayBFed's evaluation does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of


@DEFENSES.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Defense):
    """The plain mean, without a defense. Accepts all clients."""

    averages_buffers: ClassVar[bool] = True

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), state
