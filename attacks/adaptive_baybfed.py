"""Adaptive attack on BayBFed: Kumari et al., BayBFed, S&P 2023, section "Adaptive attacks".

https://arxiv.org/abs/2301.09508

    loss   = alpha * L_class + (1 - alpha) * L_BM
    update = gamma * (w - G)

The attacker knows the rule. It trains a clean model on its own clean data and makes the base
measure of what it sends like that model's:

    L_BM   = sqrt(P) * |mean(gamma (w - G)) - mean(u_clean)|

By BayBFed's Eq. 1 the base measures of two updates of the same client differ by the difference of
their means over c. c is drawn by the server and unknown to the attacker, so the difference is taken
as it is, times sqrt(P): the length of the difference of the two updates along the one direction
that changes a base measure, whose gradient has length 1, as that of constrain-and-scale's L_ano.
The paper gives no formula; its alphas are 0, 0.5 and 1. With 0 nothing of the data is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, flat


@ATTACKS.register("adaptive_baybfed")
@dataclass(frozen=True)
class AdaptiveBayBFed(BackdoorAttack):
    """A backdoor whose base measure is that of a clean model."""

    alpha: float = 0.5  # weight of the task loss

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")

    @property
    def needs_clean_update(self) -> bool:
        return True

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        if self.alpha == 1:
            return loss
        assert view.clean_update is not None
        update = flat(params) - view.global_params  # [P]
        sent = self.scale(update.detach(), view) * update.mean()
        distance = math.sqrt(len(update)) * (sent - view.clean_update.mean()).abs()
        return self.alpha * loss + (1 - self.alpha) * distance
