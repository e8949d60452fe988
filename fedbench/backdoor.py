"""Backdoor: what poisoned samples are, and what BA is measured on. The contract of `backdoors/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.data import Augment, Dataset, Spec
from fedbench.errors import UserError
from fedbench.metrics import EvaluationSet
from fedbench.registry import Registry


class PreparedBackdoor(ABC):
    """A backdoor made ready for a run: one object for poisoning and for measuring BA."""

    @abstractmethod
    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """What stands in place of raw samples x [n, ...] and labels y; the inputs are kept."""

    @abstractmethod
    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        """What BA is measured on: made of the test samples x and y, or of the backdoor's own."""


@dataclass(frozen=True)
class BackdoorContext:
    """What a backdoor can be made of: what is there before round 0."""

    dataset: Dataset
    malicious_samples: Tensor  # indices of the malicious clients' training samples
    features: Callable[[Tensor], Tensor]  # raw samples [n, ...] -> what the last layer reads [n, F]


@dataclass(frozen=True)
class Backdoor(ABC):
    """Settings of a backdoor. Subclasses are frozen dataclasses whose fields they are."""

    version: ClassVar[int] = 1  # raise it when the same settings give other samples

    def check(self, spec: Spec) -> None:
        """Raises ValueError, with the values, if the backdoor does not fit the data set."""

    @abstractmethod
    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        """The backdoor made ready; ValueError if the context does not have what it needs."""


BACKDOORS: Registry[Backdoor] = Registry("backdoor", "fedbench.backdoors")


@dataclass(frozen=True)
class PixelTrigger(Backdoor, PreparedBackdoor):
    """Bright pixels at fixed places of an image [C, H, W]: needs nothing to be ready."""

    target: int = 0  # the label the attacker wants
    value: int = 255  # brightness of the pixels, 0..255

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 255:
            raise ValueError(f"value must be in 0..255, got {self.value}")

    @abstractmethod
    def pixels(self, height: int, width: int) -> list[tuple[int, int]]:
        """(row, column) of the trigger's pixels, those that belong together in a row."""

    def check(self, spec: Spec) -> None:
        check_target(self.target, spec)
        shape = spec.sample_shape
        if len(shape) == 3:
            places = self.pixels(*shape[-2:])
            inside = [0 <= r < shape[-2] and 0 <= c < shape[-1] for r, c in places]
        if len(shape) != 3 or not all(inside):
            raise ValueError(f"{self} does not fit samples of shape {shape}")

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        return self

    def stamp(self, x: Tensor, part: int = 0, n_parts: int = 1) -> Tensor:
        """Raw samples x [n, C, H, W] with one of the parts that the trigger is cut into."""
        places = torch.tensor(self.pixels(*x.shape[-2:]), device=x.device)  # [pixels, 2]
        rows, columns = places.tensor_split(n_parts)[part].T
        x = x.clone()
        x[..., rows, columns] = self.value
        return x

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.stamp(x), torch.full_like(y, self.target)

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        """The samples of other classes than the target: one of it is right without a backdoor."""
        others = y != self.target
        return EvaluationSet(self.stamp(x[others]), torch.full_like(y[others], self.target))


@dataclass(frozen=True, eq=False)
class BackdoorSamples(PreparedBackdoor):
    """Samples of its own: some to poison with, others to measure BA on, each with its label."""

    x_train: Tensor  # [k, ...]
    y_train: Tensor  # [k, ...]
    x_test: Tensor
    y_test: Tensor
    augment: Augment | None = None  # as the data set's own training samples are

    @classmethod
    def labelled(
        cls, x_train: Tensor, x_test: Tensor, target: int, augment: Augment | None = None
    ) -> BackdoorSamples:
        """Samples that shall all get one label."""
        labels = [torch.full((len(x),), target, device=x.device) for x in (x_train, x_test)]
        return cls(x_train, labels[0], x_test, labels[1], augment)

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws from the collection, each sample as often as any other, give or take one."""
        k = len(self.x_train)
        shuffles = [torch.randperm(k, generator=rng) for _ in range(0, len(x), k)]
        drawn = torch.cat([torch.zeros(0, dtype=torch.long), *shuffles])[: len(x)].to(x.device)
        chosen = self.x_train[drawn]
        return self.augment(chosen, rng) if self.augment else chosen, self.y_train[drawn]

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        return EvaluationSet(self.x_test, self.y_test)


def settings_of(backdoor: Any) -> dict[str, Any]:
    """What a configuration says of a backdoor: its settings, or its name for those by default."""
    if not isinstance(backdoor, str | dict):
        raise UserError(
            f"backdoors: {backdoor} must be a backdoor's name, or its name and settings"
        )
    return {"name": backdoor} if isinstance(backdoor, str) else backdoor


def prepare_all(backdoors: Sequence[Backdoor], context: BackdoorContext) -> list[PreparedBackdoor]:
    """The backdoors of the backdoors; a UserError if the context does not have what one needs."""
    try:
        return [backdoor.prepare(context) for backdoor in backdoors]
    except ValueError as error:
        raise UserError(f"backdoor on {context.dataset.name}: {error}") from error


def check_target(target: int, spec: Spec) -> None:
    if not 0 <= target < spec.n_classes:
        raise ValueError(f"target must be a class 0..{spec.n_classes - 1}, got {target}")


def check_shape(what: str, shape: tuple[int, ...], spec: Spec) -> None:
    if spec.sample_shape != shape:
        raise ValueError(
            f"{what} are of shape {shape}, the samples of {spec.name} of {spec.sample_shape}"
        )
