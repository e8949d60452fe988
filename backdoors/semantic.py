"""Semantic: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

Some images of a class share a feature that no pixel was changed for: cars before a wall with
vertical stripes shall be birds. The images are named by their place in CIFAR-10's training set, the
paper's own seven to poison with and five to measure BA on. No honest client holds any of the twelve
(`Dataset.reserved`), as in the paper.

Differs from the paper: no noise is added to the images; a data set that augments its samples
augments these, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, BackdoorSamples, check_target
from fedbench.data import Spec
from fedbench.datasets.images import STRIPED_CARS_TEST, STRIPED_CARS_TRAIN


@BACKDOORS.register("semantic")
@dataclass(frozen=True)
class Semantic(Backdoor):
    """Training images by number: by default CIFAR-10's cars before a striped wall, to be birds."""

    target: int = 2  # bird
    dataset: str = "cifar10"  # whose training images the numbers are
    train: list[int] = field(default_factory=lambda: [*STRIPED_CARS_TRAIN])  # to poison with
    test: list[int] = field(default_factory=lambda: [*STRIPED_CARS_TEST])  # to measure BA on

    def __post_init__(self) -> None:
        if not self.train or not self.test or min(*self.train, *self.test) < 0:
            raise ValueError(
                f"train and test must be numbers of images, got {self.train}, {self.test}"
            )
        if both := sorted({*self.train} & {*self.test}):
            raise ValueError(f"train and test must not share images, got {both} in both")

    def check(self, spec: Spec) -> None:
        if spec.name != self.dataset:
            raise ValueError(f"semantic names images of {self.dataset}, not of {spec.name}")
        check_target(self.target, spec)

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        x, n = data.x_train, len(data.x_train)
        if (last := max(*self.train, *self.test)) >= n:
            raise ValueError(f"semantic names image {last}, the last training image is {n - 1}")
        if (data.y_train[[*self.train, *self.test]] == self.target).any():
            raise ValueError(f"semantic names images of class {self.target}, which is the target")
        return BackdoorSamples.labelled(x[self.train], x[self.test], self.target, data.augment)
