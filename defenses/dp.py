"""DP, clip and noise: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459, after McMahan et al., Learning Differentially Private Recurrent
Language Models, ICLR 2018, https://arxiv.org/abs/1710.06963

    u'_i   = u_i * min(1, S / |u_i|)
    update = 1/N * sum_i u'_i + N(0, sigma^2 I)

S and sigma are constants, chosen per data set (see docs/defenses.md). This is a defense and not a
privacy guarantee: sigma is far below what a useful (epsilon, delta) needs, and no privacy budget is
tracked. DP does not judge clients, so TPR and TNR are undefined. Batch-norm statistics are neither
clipped nor noised; the server combines them, see `fedbench.buffer_aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.ops import clipped_sum, gaussian, row_norms


@DEFENSES.register("dp")
@dataclass(frozen=True)
class DP(Defense):
    """Clip every update, average, add noise."""

    exemptions: ClassVar[Mapping[str, str]] = {
        "unanimity": "clips and adds noise",
        "update_precision": "float32 and float64 noise of the same seed differ",
    }

    clip: float = 0.4  # S: maximum norm of an update
    noise: float = 0.008  # sigma: standard deviation of the noise on each coordinate

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be above 0 and finite, got {self.clip}")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be 0 or more and finite, got {self.noise}")

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        weights = updates.new_full((len(updates),), 1 / len(updates))
        update = clipped_sum(updates, weights, row_norms(updates), self.clip)
        update += self.noise * gaussian(update, view.rng)
        return Aggregate(update, weights), state
