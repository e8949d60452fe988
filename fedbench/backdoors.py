"""Backdoors: what is stamped on a sample, and the label it shall then get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from fedbench.registry import Registry

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")


@dataclass(frozen=True)
class Backdoor(ABC):
    """A trigger and its target, the same object for poisoning and for measuring BA."""

    target: int = 0  # the label the attacker wants

    def check(self, sample_shape: tuple[int, ...], n_classes: int) -> None:
        """Raises ValueError, with the values, if the backdoor does not fit the data set."""
        if not 0 <= self.target < n_classes:
            raise ValueError(f"target must be a class 0..{n_classes - 1}, got {self.target}")

    @abstractmethod
    def stamp(self, x: Tensor) -> Tensor:
        """Raw samples x [n, ...] with the trigger; the input is kept."""


BACKDOORS: Registry[Backdoor] = Registry("backdoor", home="fedbench.backdoors")


@BACKDOORS.register("patch")
@dataclass(frozen=True)
class Patch(Backdoor):
    """A bright square in a corner of an image [C, H, W] (Gu et al., BadNets, 2017)."""

    size: int = 4  # pixels a side
    corner: str = "bottom_right"
    margin: int = 0  # pixels between the square and the border
    value: int = 255  # brightness, 0..255

    def __post_init__(self) -> None:
        if self.size < 1 or self.margin < 0:
            raise ValueError(f"size must be >= 1, margin >= 0, got {self.size}, {self.margin}")
        if self.corner not in CORNERS:
            raise ValueError(f"corner must be one of {', '.join(CORNERS)}, got {self.corner!r}")
        if not 0 <= self.value <= 255:
            raise ValueError(f"value must be in 0..255, got {self.value}")

    def check(self, sample_shape: tuple[int, ...], n_classes: int) -> None:
        super().check(sample_shape, n_classes)
        if len(sample_shape) != 3 or self.size + self.margin > min(sample_shape[-2:]):
            raise ValueError(
                f"a patch of {self.size} pixels, {self.margin} from the border, "
                f"does not fit samples of shape {sample_shape}"
            )

    def stamp(self, x: Tensor) -> Tensor:
        near, far = self.margin, self.margin + self.size
        height, width = x.shape[-2:]
        rows = slice(near, far) if "top" in self.corner else slice(height - far, height - near)
        columns = slice(near, far) if "left" in self.corner else slice(width - far, width - near)
        x = x.clone()
        x[..., rows, columns] = self.value
        return x
