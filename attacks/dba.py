"""DBA: Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

https://openreview.net/forum?id=rkgyS0VFvr

One trigger is split into parts. Each malicious client poisons a share pdr of its samples with one
part, assigned in turn, and sends

    update = gamma * (w - G)

for its trained model w and the global model G; gamma is a number, auto or bounded, as in
constrain_and_scale. BA is measured with the whole trigger, which no client trains on.

The paper attacks in one round with gamma 100 ('attack_rounds=[5]' attack.gamma=100), or in many
rounds without scaling. Its trigger is `bars` with target 2, of length 4 and gap 2 on MNIST, 6 and 3
on CIFAR-10. On tabular data, use `features`.

With fewer malicious clients than parts, no client trains on some of the parts, and BA suffers. For
4 malicious of 30 clients, set pmr=0.14.

Differs from the paper: a share pdr of the client's data is poisoned, instead of a fixed number of
samples per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbench.attack import ATTACKS, Poisoning
from fedbench.attacks.constrain_and_scale import ScaledBackdoorAttack
from fedbench.backdoor import Backdoor, Trigger
from fedbench.data import Kind, Spec


@ATTACKS.register("dba")
@dataclass(frozen=True)
class DBA(ScaledBackdoorAttack):
    """Split one trigger among the malicious clients."""

    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "bars", "target": 2}])
    epochs: int | None = 10  # unscaled, the model learns a part in few rounds only by long training
    n_parts: int = 4  # parts that the trigger is split into

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_parts < 1:
            raise ValueError(f"n_parts must be at least 1, got {self.n_parts}")

    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        super().check(backdoors, spec)
        n_places = [backdoor.n_places(spec.sample_shape) for backdoor in backdoors]
        if len(n_places) != 1 or not n_places[0]:
            names = ", ".join(type(backdoor).__name__ for backdoor in backdoors)
            raise ValueError(f"backdoors must be one trigger to split, got {names}")
        if n_places[0] < self.n_parts:
            unit = "features" if spec.kind is Kind.FEATURES else "pixels"
            raise ValueError(
                f"n_parts must be at most the trigger's {n_places[0]} {unit}, got {self.n_parts}"
            )

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        (trigger,) = poisoning.backdoors
        assert isinstance(trigger, Trigger)
        chosen = poisoning.choose(len(y)).to(y.device)
        x, y = x.clone(), y.clone()
        x[chosen] = trigger.stamp(x[chosen], poisoning.slot % self.n_parts, self.n_parts)
        y[chosen] = trigger.target
        return x, y
