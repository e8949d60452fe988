"""What a data set is: samples in memory, and what is known of them before. The contract of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.registry import Registry

Augment = Callable[[Tensor, torch.Generator], Tensor]  # raw samples -> others of the same shape


@dataclass(frozen=True)
class Spec:
    """What is known of a data set before it is loaded."""

    name: str
    sample_shape: tuple[int, ...]  # (1, 28, 28) for images, (64,) for sequences of 64 words
    n_classes: int
    natural: bool = False  # whether its samples have owners, who can be the clients

    @property
    def is_sequences(self) -> bool:
        """Whether a sample is a sequence of symbols, each of which has a label."""
        return len(self.sample_shape) == 1


@dataclass(frozen=True, eq=False)
class Dataset(ABC):
    """Samples in memory as they are stored; `decode` makes of them what a network reads."""

    name: str
    x_train: Tensor  # [n, *input_shape]
    y_train: Tensor  # [n] whole numbers, 0 <= y < n_classes; [n, T] for sequences
    x_test: Tensor  # [m, *input_shape]
    y_test: Tensor  # [m] or [m, T]
    n_classes: int
    _: KW_ONLY
    reserved: tuple[int, ...] = ()  # training samples that no client holds
    owners: Tensor | None = None  # [n] who each training sample belongs to: 0, 1, ...
    augment: Augment | None = None  # what changes training samples anew in each epoch
    threshold: float | None = None  # probability that makes a prediction right; None: the largest

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, such as (1, 28, 28)."""
        return tuple(self.x_train.shape[1:])

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.input_shape, self.n_classes, self.owners is not None)

    def to(self, device: torch.device) -> Dataset:
        """The same data set in the memory of a device."""
        tensors = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """What a network reads of raw samples x [B, ...]."""


@dataclass(frozen=True, eq=False)
class Images(Dataset):
    """Images [C, H, W] uint8 with a label each."""

    mean: float  # of the training pixels on a scale of 0 to 1
    std: float

    def decode(self, x: Tensor) -> Tensor:
        """(x / 255 - mean) / std of raw samples `x` [B, ...] uint8: [B, ...] float32, same device.

        Written as x / (255 std) - mean / std, in one pass over floats: of bytes it would take twice
        as long.
        """
        return torch.add(self._shift, x.float(), alpha=1 / (255 * self.std))

    @cached_property
    def _shift(self) -> Tensor:
        return torch.tensor(-self.mean / self.std, dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Sequences(Dataset):
    """Sequences of symbols x [n, T] by number, the label of each the symbol that follows it.

    A label of IGNORED does not count, in training nor in MA.
    """

    vocabulary: Mapping[str, int]  # symbol -> its number
    # Name -> windows of an attack [k, T + 1] to poison with, and others to measure BA on.
    attacks: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def decode(self, x: Tensor) -> Tensor:
        return x


def windows_of(stream: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """A stream of symbols [n] in windows [k, length + 1], each from the last symbol before it on.

    So every symbol but the first is a label once; a rest of no full window is left out.
    """
    starts = np.arange(0, len(stream) - length, length)
    windows: NDArray[np.int32] = stream[starts[:, None] + np.arange(length + 1)]
    return windows


@dataclass(frozen=True)
class DataSource(ABC):
    """A data set by name; its fields are its settings."""

    spec: ClassVar[Spec | None] = None  # what it will be; None: that is seen when it is loaded

    # What attackers plant when the attack does not say: backdoors, by name or with their settings.
    backdoors: list[Any] = field(default_factory=lambda: [{"name": "patch"}])

    @abstractmethod
    def load(self) -> Dataset:
        """Read the samples; UserError if they are missing or damaged."""


DATASETS: Registry[DataSource] = Registry(
    "dataset", "fedbench.datasets.images", "fedbench.datasets.reddit", "fedbench.datasets.iot"
)
