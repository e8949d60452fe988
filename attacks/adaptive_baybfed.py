"""Adaptive attack on BayBFed: Kumari et al., BayBFed, S&P 2023, section "Adaptive attacks".

https://arxiv.org/abs/2301.09508

    loss   = alpha * L_class + (1 - alpha) * L_BM
    update = gamma * (w - G)

w is the malicious model, trained with a share pdr of poisoned samples, and G the global model. The
attacker knows how BayBFed works. Each malicious client also trains a clean model on its clean data,
with update u_clean, and pulls the base measure of the update it sends toward that of u_clean:

    L_BM   = kappa / 2 * P * (mean(w - G) - mean(u_clean) / gamma)^2,  kappa = 10

gamma is a number, auto or bounded, as in constrain_and_scale.

By BayBFed's Eq. 1, the base measures of two updates of one client differ by the difference of their
means divided by c, which the server draws and the attacker does not know. sqrt(P) times the
difference of the means is the distance between the two updates along the only direction that
changes a base measure. L_BM is half the square of this distance, times kappa, so that the few steps
of a local training close the gap. Without the square, the gradient would have the same norm
everywhere and the model would oscillate around the goal.

The paper gives no formula. Its values of alpha are 0, 0.5 and 1; with 0, the client learns nothing
from its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, flat
from fedbench.attacks.constrain_and_scale import ScaledBackdoorAttack

KAPPA = 10.0


@ATTACKS.register("adaptive_baybfed")
@dataclass(frozen=True)
class AdaptiveBayBFed(ScaledBackdoorAttack):
    """Train a backdoor whose base measure matches that of a clean model."""

    adaptive_to: ClassVar[tuple[str, ...]] = ("baybfed",)

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
