"""Multi-backdoor: Kumari et al., BayBFed: Bayesian Backdoor Defense for FL, S&P 2023.

https://arxiv.org/abs/2301.09508

Several backdoors at once, each with its own trigger and target label. Every malicious client
inserts all of them: it draws a share pdr of its samples, divides them equally among the backdoors
and leaves the rest clean. Training and scaling are those of constrain_and_scale, from the global
model G to the malicious model w:

    loss   = alpha * L_class + (1 - alpha) * L_ano,  L_ano = |w - G|_2 or 1000 * (1 - cos(w, G))
    update = gamma * (w - G),  by default gamma = N / (server_lr * M) for M malicious of N clients

BA is measured for each backdoor by itself: for a trigger, on the test samples whose label is not
its target, with that trigger added. The BA of the run is the mean over the backdoors.

The backdoors are the first `n_backdoors` of the list `backdoors`, by default patches in the four
corners of an image with targets 0 to 3. The paper uses 1 to 4 backdoors in network traffic;
on iot_sample the default list is the attack phases of the malware
(conf/tuned_attack/iot_sample_multi_backdoor.yaml).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbench.attack import ATTACKS, Poisoning
from fedbench.attacks.constrain_and_scale import ConstrainAndScale
from fedbench.backdoor import Backdoor
from fedbench.data import Spec

CORNERS = ("bottom_right", "top_left", "top_right", "bottom_left")


@ATTACKS.register("multi_backdoor")
@dataclass(frozen=True)
class MultiBackdoor(ConstrainAndScale):
    """Insert several backdoors from every malicious client."""

    backdoors: list[Any] | None = field(
        default_factory=lambda: [
            {"name": "patch", "corner": corner, "target": target}
            for target, corner in enumerate(CORNERS)
        ]
    )
    n_backdoors: int = 4  # use this many, the first of `backdoors`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_backdoors < 1:
            raise ValueError(f"n_backdoors must be at least 1, got {self.n_backdoors}")

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return super().backdoor_settings(default)[: self.n_backdoors]

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        super().check(backdoors, spec)
        if len(backdoors) < self.n_backdoors:
            raise ValueError(
                f"n_backdoors must be at most {len(backdoors)}, the length of backdoors, "
                f"got {self.n_backdoors}"
            )

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        """Divide the share `pdr` of the samples equally among the backdoors."""
        chosen = poisoning.choose(len(y)).to(y.device)
        parts = chosen.tensor_split(len(poisoning.backdoors))
        x, y = x.clone(), y.clone()
        for part, backdoor in zip(parts, poisoning.backdoors, strict=True):
            x[part], y[part] = backdoor.poison(x[part], y[part], poisoning.rng)
        return x, y
