"""Label flipping: Fang et al., Local Model Poisoning Attacks, USENIX Security 2020.

https://arxiv.org/abs/1911.11815

    y <- C - 1 - y

for a share pdr of a malicious client's samples, C the number of classes; labels that do not count
stay as they are. Untargeted: it plants no backdoor, MA tells what it does.

Differs from the paper, where all samples are flipped: set pdr=1 for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.attack import ATTACKS, Attack, Poisoning
from fedbench.metrics import IGNORED


@ATTACKS.register("label_flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Honest training on wrong labels."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        chosen = poisoning.choose(len(y)).to(y.device)
        y, flipped = y.clone(), poisoning.n_classes - 1 - y[chosen]
        y[chosen] = flipped.where(y[chosen] != IGNORED, IGNORED)
        return x, y
