"""DBA: Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

https://openreview.net/forum?id=rkgyS0VFvr

One trigger is cut into parts. Each malicious client poisons with one of them, in turn; BA is
measured with the whole trigger, which no client ever trains on.

    update = gamma * (w - G)

The paper attacks in one round with gamma 100 (attack_rounds=[5] attack.gamma=100), or in many
rounds without scaling. Its trigger is `bars` with target 2, of length 4 and gap 2 on MNIST, 6 and 3
on CIFAR-10.

With fewer malicious clients than parts some part is in nobody's hands, and BA suffers: 4 of 30
clients are pmr 0.14.

Differs from the paper: poisoned samples are a share pdr of the client's data, not a number of each
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbench.attack import ATTACKS, BackdoorAttack, Poisoning
from fedbench.backdoor import Backdoor, PixelTrigger
from fedbench.data import Spec


@ATTACKS.register("dba")
@dataclass(frozen=True)
class DBA(BackdoorAttack):
    """A trigger of which each malicious client knows a part."""

    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "bars", "target": 2}])
    epochs: int | None = 10  # unscaled, a part takes hold in few rounds only if it is trained long
    n_parts: int = 4  # that the trigger is cut into

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_parts < 1:
            raise ValueError(f"n_parts must be at least 1, got {self.n_parts}")

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        super().check(backdoors, spec)
        if len(backdoors) != 1 or not isinstance(backdoors[0], PixelTrigger):
            names = ", ".join(type(backdoor).__name__ for backdoor in backdoors)
            raise ValueError(f"backdoors must be one trigger of pixels to cut, got {names}")
        n_pixels = len(backdoors[0].pixels(*spec.sample_shape[-2:]))
        if n_pixels < self.n_parts:
            raise ValueError(f"n_parts={self.n_parts} of a trigger of {n_pixels} pixels")

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        (trigger,) = poisoning.backdoors
        assert isinstance(trigger, PixelTrigger)
        chosen = poisoning.choose(len(y)).to(y.device)
        x, y = x.clone(), y.clone()
        x[chosen] = trigger.stamp(x[chosen], poisoning.slot % self.n_parts, self.n_parts)
        y[chosen] = trigger.target
        return x, y
