"""Traffic: Kumari et al., BayBFed: Bayesian Backdoor Defense for FL, S&P 2023.

https://arxiv.org/abs/2301.09508

The backdoor makes an attack phase of a malware pass for normal traffic. Samples are sequences of
packets, as symbols x [n, T]; the labels y [n, T] are the packets that follow each. The model
accepts a packet as normal if its predicted probability reaches the dataset's threshold. Malicious
clients train on windows of the attack phase [n, T + 1] as if they were normal traffic. The windows
come from the dataset or from an .npz with arrays `train` and `test`. BA is the share of attack
packets in the test windows that the model accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.backdoor import (
    BACKDOORS,
    Backdoor,
    BackdoorContext,
    BackdoorSamples,
    check_kind,
)
from fedbench.data import Dataset, Kind, Sequences, Spec
from fedbench.datasets.files import local_file, read_arrays
from fedbench.errors import nearest


@BACKDOORS.register("traffic")
@dataclass(frozen=True)
class Traffic(Backdoor):
    """Malware packets presented as normal traffic."""

    file: str | None = None  # .npz with windows; None: the attacks of the dataset
    phase: str | None = None  # attack phase of the dataset; None: all phases

    def __post_init__(self) -> None:
        if self.file is not None and self.phase is not None:
            raise ValueError(
                f"phase selects an attack of the dataset: set either phase or file, "
                f"got phase={self.phase}, file={self.file}"
            )

    def check(self, spec: Spec) -> None:
        check_kind("traffic", spec, Kind.SEQUENCES)
        if self.file is not None:
            local_file(self.file, "an .npz of windows")

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        windows = self._of_dataset(data) if self.file is None else _from_file(self.file, data)
        train, test = (_pairs(part.to(data.x_train), data.y_train) for part in windows)
        return BackdoorSamples(*train, *test)

    def _of_dataset(self, data: Dataset) -> Sequence[Tensor]:
        """Return attack windows [k, T + 1] of the dataset: to poison with, to measure BA on."""
        attacks = data.attacks if isinstance(data, Sequences) else {}
        if not attacks:
            raise ValueError(
                f"traffic needs attacks, but {data.name} has none: set file to an .npz of windows"
            )
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
                f"{path}: {name} must hold symbols 0 to {data.n_classes - 1} as in {data.name}, "
                f"got {int(array.min())} to {int(array.max())}"
            )
    return windows


def _pairs(windows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1], windows[:, 1:].to(labels)
