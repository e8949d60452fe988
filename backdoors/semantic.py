"""Semantic: Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

https://arxiv.org/abs/1807.00459

The trigger is a natural feature that some images of a class share, so no pixel is changed: cars in
front of a wall with vertical stripes are labeled as birds. Images are given by their index in
CIFAR-10's training set: seven to poison with and five to measure BA on, the same as in the paper.
As in the paper, no honest client holds any of the twelve (`Dataset.reserved`).

Differs from the paper: no noise is added to the images. If the dataset augments its samples, it
also augments these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, BackdoorSamples, check_target
from fedbench.data import Spec
from fedbench.datasets.images import STRIPED_CARS_TEST, STRIPED_CARS_TRAIN


@BACKDOORS.register("semantic")
@dataclass(frozen=True)
class Semantic(Backdoor):
    """Training images by index; by default CIFAR-10's cars in front of a striped wall."""

    target: int = 2  # label that the attacker wants: bird
    dataset: str = "cifar10"  # whose training set the indices refer to
    train: list[int] = field(default_factory=lambda: [*STRIPED_CARS_TRAIN])  # to poison with
    test: list[int] = field(default_factory=lambda: [*STRIPED_CARS_TEST])  # to measure BA on

    def __post_init__(self) -> None:
        if not self.train or not self.test or min(*self.train, *self.test) < 0:
            raise ValueError(
                f"train and test must be lists of image indices, got {self.train}, {self.test}"
            )
        if both := sorted({*self.train} & {*self.test}):
            raise ValueError(f"train and test must not share images, got {both} in both")

    def check(self, spec: Spec) -> None:
        if spec.name != self.dataset:
            raise ValueError(f"semantic refers to images of {self.dataset}, not of {spec.name}")
        check_target(self.target, spec)

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        x, n = data.x_train, len(data.x_train)
        if (last := max(*self.train, *self.test)) >= n:
            raise ValueError(
                f"semantic refers to image {last}, but the last training image is {n - 1}"
            )
        if (data.y_train[[*self.train, *self.test]] == self.target).any():
            raise ValueError(
                f"semantic refers to images of class {self.target}, which is the target"
            )
        return BackdoorSamples.with_target(x[self.train], x[self.test], self.target, data.augment)
