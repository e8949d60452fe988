"""The networks. A model is a frozen dataclass of its settings that builds a module."""

from __future__ import annotations

import importlib
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedbench.errors import UserError
from fedbench.registry import Registry


class Model(ABC):
    """Settings of a network; `build` makes it for one shape of samples and number of classes."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        """A module from samples [B, *sample_shape] to logits [B, C].

        A LightningModule is trained as it is, with its own loss and optimizer; any other module
        gets cross-entropy and SGD.
        """


MODELS: Registry[Model] = Registry("model", home="fedbench.models")


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Fully connected layers with ReLU: the paper's network for Fashion-MNIST.

    235,146 parameters on 28 x 28 images and 10 classes.
    """

    hidden: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden must be widths of at least 1, got {self.hidden}")

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        widths = [math.prod(sample_shape), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], n_classes))


@MODELS.register("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Two 5 x 5 convolutions and two linear layers: the paper's network for MNIST.

    431,080 parameters on 28 x 28 grey images and 10 classes (Cao et al., 2021).
    """

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        channels, height, width = sample_shape
        n_features = 50 * _after_convolutions(height) * _after_convolutions(width)
        return nn.Sequential(
            nn.Conv2d(channels, 20, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),  # after pooling: the same function on a quarter of the values
            nn.Conv2d(20, 50, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(n_features, 500),
            nn.ReLU(),
            nn.Linear(500, n_classes),
        )


def _after_convolutions(side: int) -> int:
    return ((side - 4) // 2 - 4) // 2


@MODELS.register("custom")
@dataclass(frozen=True)
class Custom(Model):
    """A module of the user's own, named by its import path and made with `arguments`."""

    target: str | None = None  # my_package.MyModule
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target is None or "." not in self.target:
            raise ValueError(
                f"target must be the path of a class, as in my_file.MyModule, got {self.target}"
            )

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        module_name, _, name = str(self.target).rpartition(".")
        try:
            made = getattr(importlib.import_module(module_name), name)(**self.arguments)
        except (ImportError, AttributeError, TypeError) as error:
            raise UserError(f"model.target={self.target}: {error}") from error
        if not isinstance(made, nn.Module):
            raise UserError(f"model.target={self.target}: must make a module, got {type(made)}")
        return made
