"""Backdoor: how samples are poisoned and what BA is measured on. Contract for `backdoors/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.data import Augment, Dataset, Kind, Spec
from fedbench.digests import Plugin
from fedbench.errors import UserError
from fedbench.metrics import EvaluationSet
from fedbench.registry import Registry, require


class PreparedBackdoor(ABC):
    """A backdoor ready for a run. One object both poisons samples and defines what BA is."""

    @abstractmethod
    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return n poisoned samples and labels to replace raw samples x [n, ...] and labels y.

        Do not modify x and y.
        """

    @abstractmethod
    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        """Return what BA is measured on, made from the test samples x, y or independent of them."""


@dataclass(frozen=True)
class BackdoorContext:
    """What a backdoor can be prepared from, as it is before round 0."""

    dataset: Dataset
    malicious_samples: Tensor  # indices of the malicious clients' training samples
    features: Callable[[Tensor], Tensor]  # raw samples [n, ...] -> inputs of the last layer [n, F]


@dataclass(frozen=True)
class Backdoor(Plugin, ABC):
    """Base class of backdoors. Subclasses are frozen dataclasses whose fields are the settings."""

    version: ClassVar[int] = 1  # increase it when the same settings give different samples

    @property
    def exemptions(self) -> Mapping[str, str]:
        """Checks of `fedbench.testing` that the backdoor fails by definition, each with the reason.

        A class attribute can replace this property, unless the exemptions depend on settings.
        """
        return {}

    def check(self, spec: Spec) -> None:
        """Raise ValueError, naming the values, if the backdoor does not fit the dataset."""

    def n_places(self, sample_shape: tuple[int, ...]) -> int:
        """Return the number of places that a `Trigger` changes; 0: no trigger to split."""
        return 0

    @abstractmethod
    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        """Return the backdoor ready for the run; ValueError if the context lacks what it needs."""


BACKDOORS: Registry[Backdoor] = Registry("backdoor", "fedbench.backdoors")


# Backdoor to plant if neither the attack nor the data set names one
BY_KIND = {Kind.IMAGES: "patch", Kind.FEATURES: "features"}
# What to do about a backdoor that does not fit
ADVICE = {
    Kind.IMAGES: "use 'attack.backdoors=[patch]'",
    Kind.FEATURES: "use 'attack.backdoors=[features]'",
    Kind.SEQUENCES: "use 'attack.backdoors=[{name:words,trigger:[a,b],target:c}]', your symbols",
    Kind.TAGGED: "write one, see docs/adding-an-attack.md",
    Kind.CLASSIFIED: "use 'attack.backdoors=[tail]' or write one, see docs/adding-an-attack.md",
}


class Trigger(PreparedBackdoor):
    """A pattern added to samples, which are then labeled with the target. It can be split."""

    target: int

    @abstractmethod
    def stamp(self, x: Tensor, part: int = 0, n_parts: int = 1) -> Tensor:
        """Add one of `n_parts` parts of the trigger to a copy of raw samples x [n, ...]."""

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.stamp(x), torch.full_like(y, self.target)

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        """Samples of all classes but the target, which needs no backdoor to be predicted."""
        others = y != self.target
        return EvaluationSet(self.stamp(x[others]), torch.full_like(y[others], self.target))


@dataclass(frozen=True)
class PixelTrigger(Backdoor, Trigger):
    """Bright pixels at fixed positions of an image [C, H, W]. Needs no preparation."""

    target: int = 0  # label that the attacker wants
    value: int = 255  # brightness of the pixels, 0..255

    def __post_init__(self) -> None:
        require(self, "value", 0 <= self.value <= 255, "in 0..255")

    @abstractmethod
    def pixels(self, height: int, width: int) -> list[tuple[int, int]]:
        """(row, column) of each trigger pixel, in the order in which `stamp` splits them."""

    def check(self, spec: Spec) -> None:
        check_kind("a pixel trigger", spec, Kind.IMAGES)
        check_target(self.target, spec)
        shape = spec.sample_shape
        if len(shape) == 3:
            places = self.pixels(*shape[-2:])
            inside = [0 <= r < shape[-2] and 0 <= c < shape[-1] for r, c in places]
        if len(shape) != 3 or not all(inside):
            raise ValueError(f"{self} does not fit images of shape {shape}")

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        return self

    def n_places(self, sample_shape: tuple[int, ...]) -> int:
        return len(self.pixels(*sample_shape[-2:]))

    def stamp(self, x: Tensor, part: int = 0, n_parts: int = 1) -> Tensor:
        places = torch.tensor(self.pixels(*x.shape[-2:]), device=x.device)  # [pixels, 2]
        rows, columns = places.tensor_split(n_parts)[part].T
        x = x.clone()
        x[..., rows, columns] = self.value
        return x


@dataclass(frozen=True, eq=False)
class BackdoorSamples(PreparedBackdoor):
    """A backdoor with samples of its own: some to poison with, others to measure BA on."""

    x_train: Tensor  # [k, ...]
    y_train: Tensor  # [k, ...]
    x_test: Tensor
    y_test: Tensor
    augment: Augment | None = None  # the dataset's augmentation of training samples

    @classmethod
    def with_target(
        cls, x_train: Tensor, x_test: Tensor, target: int, augment: Augment | None = None
    ) -> BackdoorSamples:
        """Label all samples with the target."""
        labels = [torch.full((len(x),), target, device=x.device) for x in (x_train, x_test)]
        return cls(x_train, labels[0], x_test, labels[1], augment)

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw from the training samples; how often each is drawn differs by at most one."""
        k = len(self.x_train)
        shuffles = [torch.randperm(k, generator=rng) for _ in range(0, len(x), k)]
        drawn = torch.cat([torch.zeros(0, dtype=torch.long), *shuffles])[: len(x)].to(x.device)
        chosen = self.x_train[drawn]
        return self.augment(chosen, rng) if self.augment else chosen, self.y_train[drawn]

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        return EvaluationSet(self.x_test, self.y_test)


def settings_of(backdoor: Any) -> dict[str, Any]:
    """Settings of a configured backdoor; a bare name stands for the default settings."""
    if not isinstance(backdoor, str | dict):
        raise UserError(
            f"backdoors: {backdoor} must be the name of a backdoor, or its name and settings"
        )
    return {"name": backdoor} if isinstance(backdoor, str) else backdoor


def prepare_all(backdoors: Sequence[Backdoor], context: BackdoorContext) -> list[PreparedBackdoor]:
    """Prepare all backdoors; UserError if the context lacks what one needs."""
    try:
        return [backdoor.prepare(context) for backdoor in backdoors]
    except ValueError as error:
        raise UserError(f"backdoor on {context.dataset.name}: {error}") from error


def check_kind(what: str, spec: Spec, *kinds: Kind) -> None:
    if spec.kind not in kinds:
        raise ValueError(
            f"{what} needs {' or '.join(kinds)}, but {spec.name} has {spec.kind} of shape "
            f"{spec.sample_shape}; {ADVICE[spec.kind]}"
        )


def check_target(target: int, spec: Spec) -> None:
    if not 0 <= target < spec.n_classes:
        raise ValueError(f"target must be a class 0..{spec.n_classes - 1}, got {target}")


def check_shape(what: str, shape: tuple[int, ...], spec: Spec) -> None:
    if spec.sample_shape != shape:
        raise ValueError(
            f"{what} have shape {shape}, but samples of {spec.name} have {spec.sample_shape}"
        )
