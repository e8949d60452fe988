"""Edge case: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

Rare inputs, which honest clients hardly hold, get the attacker's label. After each step of training
the model is projected onto a ball around the global one (projected gradient descent):

    w      <- G + (w - G) * min(1, eps / |w - G|_2)
    update  = gamma * (w - G)

The backdoor says what is rare: `tail`, the paper's own definition on any data set, or the paper's
collections `southwest` on CIFAR-10 and `ardis` on MNIST. The paper's eps is 2 on CIFAR-10.

Differs from the paper: eps is by default (`auto`) the length of the update that the client would
have sent honestly, since a number suits one data set and model only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView, BackdoorAttack, flat


@ATTACKS.register("edge_case")
@dataclass(frozen=True)
class EdgeCase(BackdoorAttack):
    """Rare inputs with the attacker's label, trained within a ball around the global model."""

    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "tail"}])
    eps: float | int | str | None = "auto"  # the ball's radius: a number, auto; None: no projection

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
        length = torch.linalg.vector_norm(flat(params) - view.global_params)
        radius = self._radius(view)
        if length > radius:
            centres = view.global_params.split([param.numel() for param in params])
            for param, centre in zip(params, centres, strict=True):
                param.copy_(torch.lerp(centre.view_as(param), param, radius / length))

    def _radius(self, view: AttackView) -> Tensor:
        if self.eps == "auto":
            assert view.clean_update is not None
            return torch.linalg.vector_norm(view.clean_update)
        return view.global_params.new_tensor(self.eps)
