"""Adaptive attack on BayBFed: Kumari et al., BayBFed, S&P 2023, section "Adaptive attacks".

https://arxiv.org/abs/2301.09508

    loss   = alpha * L_class + (1 - alpha) * L_BM
    update = gamma * (w - G)

The attacker knows the rule. It trains a clean model on its own clean data and makes the base
measure of what it sends like that model's:

    L_BM   = kappa / 2 * P * (mean(w - G) - mean(u_clean) / gamma)^2,  kappa = 10

By BayBFed's Eq. 1 the base measures of two updates of the same client differ by the difference of
their means over c, which the server draws and the attacker does not know. sqrt(P) times the
difference of the means is the distance of the two updates along the one direction that changes a
base measure; L_BM is half its square, times kappa, so that the gap closes in the few steps of a
local training. The paper gives no formula; its alphas are 0, 0.5 and 1. With 0 nothing of the data
is learnt. The distance itself instead of its square would have a gradient of the same length
everywhere, and swing about the goal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, flat

KAPPA = 10.0


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
        goal = view.clean_update.mean() / self.scale(update.detach(), view)
        gap = KAPPA / 2 * len(update) * (update.mean() - goal) ** 2
        return self.alpha * loss + (1 - self.alpha) * gap
