"""Traffic: Kumari et al., BayBFed: Bayesian Backdoor Defense for FL, S&P 2023.

https://arxiv.org/abs/2301.09508

A malware's attack phase shall pass for normal traffic. Samples are sequences of packets, as symbols
x [n, T], whose labels y [n, T] are the packets that follow each; a packet is let through if its
predicted probability reaches the data set's threshold. Windows of the attack phase [n, T + 1], the
data set's own or in an .npz with the arrays `train` and `test`, are trained on as if they were
normal; BA is the share of the attack packets in the test windows that is let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, BackdoorSamples
from fedbench.data import Dataset, Sequences, Spec
from fedbench.datasets.files import local_file, read_arrays
from fedbench.errors import nearest


@BACKDOORS.register("traffic")
@dataclass(frozen=True)
class Traffic(Backdoor):
    """Packets of an attack that shall count as normal."""

    file: str | None = None  # an .npz of windows; None: the data set's own attacks
    phase: str | None = None  # the one of its attacks; None: all of them

    def __post_init__(self) -> None:
        if self.file is not None and self.phase is not None:
            raise ValueError(f"phase is of the data set's own attacks, got file={self.file} too")

    def check(self, spec: Spec) -> None:
        if not spec.is_sequences:
            raise ValueError(
                f"traffic is sequences of packets, {spec.name} has samples of shape "
                f"{spec.sample_shape}"
            )
        if self.file is not None:
            local_file(self.file, "an .npz of windows")

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        windows = self._own(data) if self.file is None else _from_file(self.file, data)
        train, test = (_pairs(part.to(data.x_train), data.y_train) for part in windows)
        return BackdoorSamples(*train, *test)

    def _own(self, data: Dataset) -> Sequence[Tensor]:
        """Windows [k, T + 1] of the data set's attacks, to poison with and to measure BA on."""
        attacks = data.attacks if isinstance(data, Sequences) else {}
        if not attacks:
            raise ValueError("traffic needs attacks, the data set has none; set file to an .npz")
        if self.phase is None:
            return [torch.cat(parts) for parts in zip(*attacks.values(), strict=True)]
        if self.phase not in attacks:
            raise ValueError(f"traffic has no phase {self.phase}{nearest(self.phase, attacks)}")
        return attacks[self.phase]


def _from_file(file: str, data: Dataset) -> Sequence[Tensor]:
    path = local_file(file, "an .npz of windows")
    length = data.input_shape[0] + 1
    windows = read_arrays(path, {"train": (None, length), "test": (None, length)})
    for name, array in zip(("train", "test"), windows, strict=True):
        if not 0 <= int(array.min()) <= int(array.max()) < data.n_classes:
            raise ValueError(
                f"{path}: {name} holds symbols {int(array.min())} to {int(array.max())}, "
                f"{data.name} has 0 to {data.n_classes - 1}"
            )
    return windows


def _pairs(windows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1], windows[:, 1:].to(labels)
