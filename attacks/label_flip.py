"""Label flipping: Fang et al., Local Model Poisoning Attacks, USENIX Security 2020.

https://arxiv.org/abs/1911.11815

    y <- C - 1 - y

for a share pdr of a malicious client's samples, with C classes. Labels that the loss ignores stay
unchanged. Untargeted: there is no backdoor, and its effect shows in MA.

Differs from the paper: the paper flips the labels of all samples, as pdr=1 does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, Attack, Poisoning
from fedbench.metrics import IGNORED


@ATTACKS.register("label_flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train honestly on flipped labels."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        chosen = poisoning.choose(len(y)).to(y.device)
        y, flipped = y.clone(), poisoning.n_classes - 1 - y[chosen]
        y[chosen] = flipped.where(y[chosen] != IGNORED, IGNORED)
        return x, y
