"""Multi-backdoor: Kumari et al., BayBFed: Bayesian Backdoor Defense for FL, S&P 2023.

https://arxiv.org/abs/2301.09508

Constrain-and-scale with 1 to 4 backdoors, each a trigger and a target, planted by every malicious
client at once: the share pdr of its data is divided among them in equal parts. BA is measured for
each, and their mean is the run's. The paper does this on network traffic; the default triggers are
squares in the four corners of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbench.attack import ATTACKS, Poisoning, plant
from fedbench.attacks.constrain_and_scale import ConstrainAndScale
from fedbench.backdoor import Backdoor
from fedbench.data import Spec

CORNERS = ("bottom_right", "top_left", "top_right", "bottom_left")


@ATTACKS.register("multi_backdoor")
@dataclass(frozen=True)
class MultiBackdoor(ConstrainAndScale):
    """Several backdoors in every malicious client."""

    backdoors: list[Any] | None = field(
        default_factory=lambda: [
            {"name": "patch", "corner": corner, "target": target}
            for target, corner in enumerate(CORNERS)
        ]
    )
    n_backdoors: int = 4  # the first of `backdoors` that are planted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_backdoors < 1:
            raise ValueError(f"n_backdoors must be at least 1, got {self.n_backdoors}")

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return super().backdoor_settings(default)[: self.n_backdoors]

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        super().check(backdoors, spec)
        if len(backdoors) < self.n_backdoors:
            raise ValueError(f"n_backdoors={self.n_backdoors} of {len(backdoors)} backdoors")

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        return plant(x, y, poisoning, poisoning.backdoors)
