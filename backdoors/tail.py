"""Tail: Wang et al., Attack of the Tails: Yes, You Really Can Backdoor FL, NeurIPS 2020.

https://arxiv.org/abs/2007.05084

Edge cases of any dataset: the samples of a class that are least likely under a Gaussian fitted to
their features f, the inputs of the network's last layer.

    m, S   = mean and covariance of the features of the malicious clients' samples of the class
    edge   = the share `rate` of the class's samples with the largest (f - m)' S^-1 (f - m)

The attacker selects among the samples of its own clients, using the global model before round 0. BA
is measured on the test samples that the same Gaussian ranks as edge cases. The malicious clients
must hold at least two samples of the class: if clients hold few classes each, set `source` to one
of theirs.

Differs from the paper: one Gaussian for one class instead of a mixture over all classes, because
the backdoor uses one class only. A hundredth of the mean variance is added to each variance,
because there can be more features than samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    BackdoorSamples,
    check_kind,
    check_target,
)
from fedbench.config import rounded_count
from fedbench.data import Kind, Spec

RIDGE = 0.01  # share of the mean variance added to each variance


@BACKDOORS.register("tail")
@dataclass(frozen=True)
class Tail(Backdoor):
    """The least likely samples of a class."""

    source: int = 1  # class to take edge cases from
    target: int = 3  # label that the attacker wants
    rate: float = 0.1  # share of the class that counts as edge cases

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"source must differ from target={self.target}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {self.rate}")

    def check(self, spec: Spec) -> None:
        check_kind("tail", spec, *(kind for kind in Kind if kind.has_one_label))
        check_target(self.target, spec)
        if not 0 <= self.source < spec.n_classes:
            raise ValueError(f"source must be a class 0..{spec.n_classes - 1}, got {self.source}")

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        held = context.malicious_samples
        held = held[data.y_train[held] == self.source]
        test = data.x_test[data.y_test == self.source]
        if len(held) < 2 or not len(test):
            raise ValueError(
                f"tail needs at least 2 training samples of class {self.source} on malicious "
                f"clients and 1 test sample, got {len(held)} and {len(test)}"
            )
        features = context.features(data.x_train[held]).double()  # [k, F]
        distances = _mahalanobis_sq(features, features)  # [k]
        test_distances = _mahalanobis_sq(context.features(test).double(), features)
        return BackdoorSamples.with_target(
            data.x_train[held][self._edge(distances)],
            test[self._edge(test_distances)],
            self.target,
            data.augment,
        )

    def _edge(self, distances: Tensor) -> Tensor:
        n_edge = max(rounded_count(self.rate, len(distances)), 1)
        return distances.argsort(descending=True, stable=True)[:n_edge]


def _mahalanobis_sq(features: Tensor, population: Tensor) -> Tensor:
    """Squared distances [n] of features [n, F] under the Gaussian fitted to population [k, F]."""
    mean = population.mean(dim=0)
    centered = population - mean
    covariance = centered.T @ centered / len(population)  # [F, F]
    ridge = RIDGE * covariance.diagonal().mean()
    if ridge == 0:  # all samples are equal: no covariance to invert
        return (features - mean).square().sum(dim=1)
    covariance.diagonal().add_(ridge)
    away = features - mean
    solved: Tensor = torch.linalg.solve(covariance, away.T)  # [F, n]
    return (away * solved.T).sum(dim=1)
