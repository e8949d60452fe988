"""Features: Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

https://openreview.net/forum?id=rkgyS0VFvr

The trigger for tabular data: some features of a sample x [F] are set to fixed values.

    x_j <- v_j  for each j in `features`,  by default v_j = max_i x_ij + std_i x_ij

over the training samples i, just outside the range that honest clients hold. Values are in the
data set's own units, before standardization.

The paper uses such triggers on LOAN. The authors' code sets six features of low importance to
chosen values and splits them into three parts of two, as attack=dba attack.n_parts=3 does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    PreparedBackdoor,
    Trigger,
    check_kind,
    check_target,
)
from fedbench.data import Kind, Spec

N_DEFAULT = 4  # features set if none are named


@BACKDOORS.register("features")
@dataclass(frozen=True)
class FeatureTrigger(Backdoor):
    """Chosen features set to chosen values. Split into parts, each part has some of them."""

    target: int = 0  # label that the attacker wants
    features: list[int] | None = None  # positions in a sample; None: the first four
    values: list[float] | None = None  # one per feature; None: just above the largest

    def __post_init__(self) -> None:
        chosen = self.features
        if chosen is not None and (not chosen or min(chosen) < 0 or len({*chosen}) < len(chosen)):
            raise ValueError(f"features must be one or more different positions, got {chosen}")
        if self.values is None:
            return
        if chosen is None or len(chosen) != len(self.values):
            raise ValueError(
                f"values must be one per feature, got features={chosen}, values={self.values}"
            )
        if not all(map(math.isfinite, self.values)):
            raise ValueError(f"values must be finite, got {self.values}")

    def n_places(self, sample_shape: tuple[int, ...]) -> int:
        return len(self._positions(sample_shape))

    def check(self, spec: Spec) -> None:
        check_kind("features", spec, Kind.FEATURES)
        check_target(self.target, spec)
        n = spec.sample_shape[0]
        if (last := max(self._positions(spec.sample_shape))) >= n:
            raise ValueError(f"features must be positions 0..{n - 1}, got {last}")

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        data = context.dataset
        positions = self._positions(data.input_shape)
        if self.values is not None:
            return FeatureValues(self.target, positions, tuple(self.values))
        held = data.x_train[:, list(positions)]  # [n, k]
        std = held.std(dim=0, correction=0)
        values = held.amax(dim=0) + std.where(std > 0, 1.0)  # [k]
        return FeatureValues(self.target, positions, tuple(values.tolist()))

    def _positions(self, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        default = range(min(N_DEFAULT, sample_shape[0]))
        return tuple(default if self.features is None else self.features)


@dataclass(frozen=True)
class FeatureValues(Trigger):
    """The trigger with its values."""

    target: int
    positions: tuple[int, ...]  # [k]
    values: tuple[float, ...]  # [k]

    def stamp(self, x: Tensor, part: int = 0, n_parts: int = 1) -> Tensor:
        places = torch.arange(len(self.positions)).tensor_split(n_parts)[part].tolist()
        x = x.clone()
        for place in places:
            x[:, self.positions[place]] = self.values[place]
        return x
