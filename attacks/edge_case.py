"""Edge case: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

The attacker assigns its label to rare inputs that honest clients hardly hold. They replace a share
pdr of a malicious client's samples. After each training step the model w is projected onto a ball
around the global model G (projected gradient descent):

    w      <- G + (w - G) * min(1, eps / |w - G|_2)
    update  = gamma * (w - G)

gamma is a number, auto or bounded, as in constrain_and_scale. The backdoor defines the rare inputs:
`tail` follows the paper's definition on any dataset; `southwest` on CIFAR-10 and `ardis` on MNIST
are the paper's own samples. The paper's eps on CIFAR-10 is 2.

Differs from the paper: eps defaults to `auto`, the norm of the update that the client would have
sent honestly, because a fixed number suits only one dataset and model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, flat
from fedbench.attacks.constrain_and_scale import ScaledBackdoorAttack


@ATTACKS.register("edge_case")
@dataclass(frozen=True)
class EdgeCase(ScaledBackdoorAttack):
    """Train on mislabeled rare inputs within a ball around the global model."""

    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "tail"}])
    eps: float | int | str | None = (
        "auto"  # radius of the ball: a number or auto; None: no projection
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        eps = self.eps
        if eps not in ("auto", None) and (isinstance(eps, str) or not 0 < float(eps) < math.inf):
            raise ValueError(f"eps must be auto, null or a number above 0, got {eps}")

    @property
    def needs_clean_update(self) -> bool:
        return self.eps == "auto" or super().needs_clean_update

    @torch.no_grad()
    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        if self.eps is None:
            return
        distance = torch.linalg.vector_norm(flat(params) - view.global_params)
        radius = self._radius(view)
        if distance > radius:
            centers = view.global_params.split([param.numel() for param in params])
            for param, center in zip(params, centers, strict=True):
                param.copy_(torch.lerp(center.view_as(param), param, radius / distance))

    def _radius(self, view: AttackView) -> Tensor:
        if self.eps == "auto":
            assert view.clean_update is not None
            norm: Tensor = torch.linalg.vector_norm(view.clean_update)
            return norm
        return view.global_params.new_tensor(self.eps)
