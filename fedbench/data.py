"""The data set contract: samples in memory, and their specification before loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.digests import Plugin
from fedbench.registry import Registry

Augment = Callable[[Tensor, torch.Generator], Tensor]  # raw samples -> same shape


class Kind(StrEnum):
    """What a sample is and what is predicted for it. The values appear in error messages."""

    IMAGES = "images"  # [C, H, W], one label
    FEATURES = "feature vectors"  # [F] floats, one label
    SEQUENCES = "sequences labeled with the next symbol"  # [T] symbols, one label per symbol
    TAGGED = "sequences with a label per symbol"  # [T] symbols, labels of another alphabet
    CLASSIFIED = "sequences with one label"  # [T] symbols, one label

    @property
    def is_sequences(self) -> bool:
        """Whether a sample is a sequence of symbols."""
        return self in (Kind.SEQUENCES, Kind.TAGGED, Kind.CLASSIFIED)

    @property
    def has_one_label(self) -> bool:
        """Whether a sample has one label, not one per symbol."""
        return self not in (Kind.SEQUENCES, Kind.TAGGED)


@dataclass(frozen=True)
class Spec:
    """What is known about a data set before loading it."""

    name: str
    sample_shape: tuple[int, ...]  # (1, 28, 28) for images, (64,) for 64-word sequences
    n_classes: int
    kind: Kind = Kind.IMAGES
    natural: bool = False  # samples have owners, which can serve as clients


@dataclass(frozen=True, eq=False)
class Dataset(ABC):
    """Raw samples in memory; `decode` turns them into network inputs."""

    name: str
    x_train: Tensor  # [n, *input_shape]
    y_train: Tensor  # [n] integers, 0 <= y < n_classes; [n, T] for sequences
    x_test: Tensor  # [m, *input_shape]
    y_test: Tensor  # [m] or [m, T]
    n_classes: int
    _: KW_ONLY
    reserved: tuple[int, ...] = ()  # training samples withheld from all clients
    owners: Tensor | None = None  # [n] owner of each training sample: 0, 1, ...
    augment: Augment | None = None  # applied to training samples in every epoch
    # A label counts as predicted if its probability is at least this; None: if it is the largest.
    threshold: float | None = None
    class_names: tuple[str, ...] = ()  # in the order of the classes; empty: numbers serve as names

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What the samples are."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, e.g. (1, 28, 28)."""
        return tuple(self.x_train.shape[1:])

    @property
    def spec(self) -> Spec:
        natural = self.owners is not None
        return Spec(self.name, self.input_shape, self.n_classes, self.kind, natural)

    def to(self, device: torch.device) -> Dataset:
        """Return a copy on `device`."""
        tensors = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """Turn raw samples x [B, ...] into network inputs."""


@dataclass(frozen=True, eq=False)
class Images(Dataset):
    """Images [C, H, W] with pixels 0..255, uint8 or float32, one label each."""

    mean: float  # of the training pixels, scaled to 0..1
    std: float

    @property
    def kind(self) -> Kind:
        return Kind.IMAGES

    def decode(self, x: Tensor) -> Tensor:
        """Return (x / 255 - mean) / std for x [B, ...]: [B, ...] float32, same device.

        Computed as x / (255 std) - mean / std in one pass over floats. A pass over bytes takes
        twice as long.
        """
        return torch.add(self._shift, x.float(), alpha=1 / (255 * self.std))

    @cached_property
    def _shift(self) -> Tensor:
        return torch.tensor(-self.mean / self.std, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Features(Dataset):
    """Feature vectors [F] float32, one label each."""

    mean: Tensor  # [F] of the training samples
    std: Tensor  # [F]

    @property
    def kind(self) -> Kind:
        return Kind.FEATURES

    def to(self, device: torch.device) -> Dataset:
        moved = super().to(device)
        return replace(moved, mean=self.mean.to(device), std=self.std.to(device))  # type: ignore[call-arg]

    def decode(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std for x [B, F]."""
        return (x - self.mean) / self.std


@dataclass(frozen=True, eq=False)
class Sequences(Dataset):
    """Sequences of symbol ids x [n, T]; by default the label of each symbol is its successor.

    The label IGNORED counts neither in training nor in MA.
    """

    vocabulary: Mapping[str, int]  # symbol -> id
    # Attack phase -> windows [k, T + 1] for poisoning, and others for measuring BA.
    attacks: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sequence_kind: Kind = Kind.SEQUENCES  # or TAGGED or CLASSIFIED

    @property
    def kind(self) -> Kind:
        return self.sequence_kind

    def decode(self, x: Tensor) -> Tensor:
        return x


def cut_windows(stream: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Cut a stream of symbols [n] into windows [k, length + 1] that overlap by one symbol.

    Every symbol except the first is a label exactly once. An incomplete last window is dropped.
    """
    starts = np.arange(0, len(stream) - length, length)
    return np.asarray(stream[starts[:, None] + np.arange(length + 1)])


@dataclass(frozen=True)
class DataSource(Plugin, ABC):
    """Loads one registered data set; the fields are its settings."""

    spec: ClassVar[Spec | None] = None  # None: known only after loading

    # Backdoors to plant if the attack names none: names, or mappings with settings.
    # None: the one that fits the samples, known after loading.
    backdoors: list[Any] | None = field(default_factory=lambda: [{"name": "patch"}])

    @abstractmethod
    def load(self) -> Dataset:
        """Read the samples. Raise UserError if they are missing or damaged."""


DATASETS: Registry[DataSource] = Registry(
    "dataset",
    *("fedbench.datasets.images", "fedbench.datasets.reddit", "fedbench.datasets.iot"),
    "fedbench.datasets.custom",
)
