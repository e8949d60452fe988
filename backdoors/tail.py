"""Tail: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

The edge cases of any data set: the samples of a class that are least likely under a Gaussian fit on
the features that the last layer of the network reads.

    m, S   = mean and covariance of the features of the malicious clients' samples of the class
    edge   = the share `rate` of the class's samples with the largest (f - m)' S^-1 (f - m)

The attacker chooses among its own clients' samples, with the model that it receives before round 0;
BA is measured on the test samples that the same Gaussian makes edge cases. They must hold two
samples of the class at least: where clients hold few classes each, choose `source` among theirs.

Differs from the paper: one Gaussian of one class instead of a mixture over all, since it looks at
one class; a hundredth of the mean variance is added to each variance, since there can be more
features than samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, BackdoorSamples, check_target
from fedbench.config import rounded_count
from fedbench.data import Spec

RIDGE = 0.01  # of the mean variance


@BACKDOORS.register("tail")
@dataclass(frozen=True)
class Tail(Backdoor):
    """The least likely samples of a class."""

    source: int = 1  # the class whose tail it is
    target: int = 3  # the label the attacker wants
    rate: float = 0.1  # share of the class

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"source must be another class than target={self.target}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {self.rate}")

    def check(self, spec: Spec) -> None:
        if spec.is_sequences:
            raise ValueError(
                f"tail needs samples with one label, {spec.name} has sequences of shape "
                f"{spec.sample_shape}"
            )
        check_target(self.target, spec)
        if not 0 <= self.source < spec.n_classes:
            raise ValueError(f"source must be a class 0..{spec.n_classes - 1}, got {self.source}")

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        own = context.malicious_samples[data.y_train[context.malicious_samples] == self.source]
        test = data.x_test[data.y_test == self.source]
        if len(own) < 2 or not len(test):
            raise ValueError(
                f"tail needs samples of class {self.source}, got {len(own)} of the malicious "
                f"clients and {len(test)} to test on"
            )
        features = context.features(data.x_train[own]).double()  # [k, F]
        strange = _mahalanobis_sq(features, features)  # [k]
        strange_test = _mahalanobis_sq(context.features(test).double(), features)
        return BackdoorSamples.labelled(
            data.x_train[own][self._edge(strange)],
            test[self._edge(strange_test)],
            self.target,
            data.augment,
        )

    def _edge(self, strangeness: Tensor) -> Tensor:
        n_edge = max(rounded_count(self.rate, len(strangeness)), 1)
        return strangeness.argsort(descending=True, stable=True)[:n_edge]


def _mahalanobis_sq(features: Tensor, population: Tensor) -> Tensor:
    """[n, F] under the Gaussian of [k, F]: [n]."""
    mean = population.mean(dim=0)
    centred = population - mean
    covariance = centred.T @ centred / len(population)  # [F, F]
    ridge = RIDGE * covariance.diagonal().mean()
    if ridge == 0:  # all alike: nothing is rarer than anything else
        return (features - mean).square().sum(dim=1)
    covariance.diagonal().add_(ridge)
    away = features - mean
    return (away * torch.linalg.solve(covariance, away.T).T).sum(dim=1)
