"""Norm-matched: ours; a backdoor with the two numbers that BayBFed reads (Kumari et al., S&P 2023).

https://arxiv.org/abs/2301.09508

    update = (u_clean . g) g + |v_clean| v / |v|

g = G / |G| is the direction of the global model, u the update trained with a share pdr of poisoned
samples, u_clean the one that the client would send honestly, and v = u - (u . g) g, the part across
G; v_clean likewise. With c = cos(u_clean, G), the update is

    |u_clean| (c g + sqrt(1 - c^2) v / |v|)

It has the norm of u_clean and the same cosine with G. Only its direction across G is poisoned.

BayBFed's verdicts depend on the norm of an update and its cosine with G, and hardly on anything
else (docs/baybfed.md, "Attackers that look honest"). So the attack is adaptive to BayBFed, but not
to rules that compare updates with each other. The attacker knows the rule and its own clients'
data, not the honest updates: each client matches its own u_clean.

If G is 0, it has no direction, and only the norm is matched: |u_clean| u / |u|. If u has no part
across G, there is no backdoor to send: the client sends u_clean. The sums are in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack

LEAST_ACROSS = 1e-9  # |v| / |u|; a smaller v is rounding error


@ATTACKS.register("norm_matched")
@dataclass(frozen=True)
class NormMatched(BackdoorAttack):
    """Send a backdoor with the norm of an honest update, and its cosine with the global model."""

    adaptive_to: ClassVar[tuple[str, ...]] = ("baybfed",)

    @property
    def needs_clean_update(self) -> bool:
        return True

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        assert view.clean_update is not None
        g = view.global_params.double()  # [P]
        g = g / torch.linalg.vector_norm(g).clamp_min(torch.finfo(g.dtype).tiny)
        _, across = _split(update.double(), g)
        along, clean_across = _split(view.clean_update.double(), g)
        norm = torch.linalg.vector_norm(across)
        if norm <= LEAST_ACROSS * torch.linalg.vector_norm(update, dtype=torch.float64):
            return view.clean_update
        sent: Tensor = along * g + torch.linalg.vector_norm(clean_across) / norm * across
        return sent.to(update.dtype)


def _split(u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return u . g and the part of u [P] orthogonal to the unit vector g, [P]."""
    along = u @ g
    return along, u - along * g
