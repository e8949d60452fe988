"""The networks. A model is a frozen dataclass of settings that builds a torch module."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.data import Kind, Spec
from fedbench.digests import Plugin
from fedbench.errors import UserError
from fedbench.registry import Registry, require
from fedbench.user_code import UserCode


class Model(Plugin, ABC):
    """Settings of a network. `build` creates it for a sample shape and a number of classes."""

    def check(self, spec: Spec) -> None:
        """Raise ValueError if the network cannot process the data set's samples."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        """Return a module from samples [B, *sample_shape] to logits [B, C] or [B, T, C].

        Logits [B, T, C] are for sequences. A LightningModule trains with its own loss and
        optimizer, any other module with cross-entropy and SGD.
        """


MODELS: Registry[Model] = Registry("model", "fedbench.models")
MOST_LAYERS = 100
SMALLEST_CNN_IMAGE = 16  # pixels per side; two convolutions and poolings leave one


class ImageModel(Model):
    """A model for images."""

    def check(self, spec: Spec) -> None:
        _check_kind(spec, Kind.IMAGES)


class SequenceModel(Model):
    """A model for sequences of symbols. It predicts the symbol after each one."""

    def check(self, spec: Spec) -> None:
        _check_kind(spec, Kind.SEQUENCES)


def _check_kind(spec: Spec, *kinds: Kind) -> None:
    if spec.kind not in kinds:
        fitting = {Kind.FEATURES: "mlp", Kind.IMAGES: "mlp", Kind.SEQUENCES: "lstm or gru"}
        raise ValueError(
            f"needs {' or '.join(kinds)}, but {spec.name} has {spec.kind} of shape "
            f"{spec.sample_shape}; use {fitting.get(spec.kind, 'custom')}"
        )


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Fully connected layers with ReLU: the paper's network for Fashion-MNIST.

    235,146 parameters on 28 x 28 images and 10 classes. Also for feature vectors.
    """

    hidden: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        require(self, "hidden", min(self.hidden, default=1) >= 1, "widths of at least 1")

    def check(self, spec: Spec) -> None:
        _check_kind(spec, Kind.IMAGES, Kind.FEATURES)

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        widths = [math.prod(sample_shape), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], n_classes))


@MODELS.register("cnn")
@dataclass(frozen=True)
class CNN(ImageModel):
    """Two 5 x 5 convolutions and two linear layers: the paper's network for MNIST.

    431,080 parameters on 28 x 28 gray images and 10 classes (Cao et al., 2021).
    """

    def check(self, spec: Spec) -> None:
        super().check(spec)
        height, width = spec.sample_shape[1:]
        if min(height, width) < SMALLEST_CNN_IMAGE:
            raise ValueError(
                f"needs images of at least {SMALLEST_CNN_IMAGE} pixels per side, but {spec.name} "
                f"has {height} x {width}"
            )

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        channels, height, width = sample_shape
        n_features = 50 * math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
        return _channels_last(
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


def _channels_last(*layers: nn.Module) -> nn.Module:
    """The layers in sequence, in the memory format in which convolutions are fastest."""
    network = nn.Sequential(*layers)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


@MODELS.register("resnet18_light")
@dataclass(frozen=True)
class LightResNet18(ImageModel):
    """ResNet-18 (He 2016), half as wide, with a 3 x 3 stem: the paper's network for CIFAR-10.

    2,797,610 parameters on 32 x 32 color images and 10 classes (Bagdasaryan 2020).
    """

    widths: list[int] = field(default_factory=lambda: [32, 64, 128, 256])

    def __post_init__(self) -> None:
        rule = "one or more widths of at least 1"
        require(self, "widths", min(self.widths, default=0) >= 1, rule)

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        stem, n_in = self.widths[0], self.widths[0]
        layers: list[nn.Module] = [*_convolution(sample_shape[0], stem, 3), nn.ReLU()]
        for i, width in enumerate(self.widths):
            layers += [ResidualBlock(n_in, width, stride=1 + (i > 0)), ResidualBlock(width, width)]
            n_in = width
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return _channels_last(*layers, *pooled, nn.Linear(n_in, n_classes))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm, added to their input."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        first, second = _convolution(n_in, n_out, 3, stride), _convolution(n_out, n_out, 3)
        self.residual = nn.Sequential(*first, nn.ReLU(), *second)
        fits = stride == 1 and n_in == n_out
        self.shortcut = nn.Sequential(*([] if fits else _convolution(n_in, n_out, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x))


def _convolution(n_in: int, n_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and batch norm, which makes a bias redundant."""
    return [
        nn.Conv2d(n_in, n_out, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(n_out),
    ]


@MODELS.register("lstm")
@dataclass(frozen=True)
class LSTM(SequenceModel):
    """Two LSTM layers, word embedding and output tied: the paper's network for Reddit.

    10,693,200 parameters with 50,000 words (Bagdasaryan 2020).
    """

    width: int = 200  # of the embedding and each layer
    n_layers: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        require(self, "width", self.width >= 1, "at least 1")
        require(self, "n_layers", 1 <= self.n_layers <= MOST_LAYERS, f"from 1 to {MOST_LAYERS}")
        require(self, "dropout", 0 <= self.dropout < 1, "at least 0 and below 1")

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        embedding, output = nn.Embedding(n_classes, self.width), nn.Linear(self.width, n_classes)
        output.weight = embedding.weight
        nn.init.uniform_(embedding.weight, -0.1, 0.1)
        nn.init.zeros_(output.bias)
        between = self.dropout if self.n_layers > 1 else 0.0  # one layer: torch would warn
        layers = nn.LSTM(self.width, self.width, self.n_layers, batch_first=True, dropout=between)
        drop = nn.Dropout(self.dropout)
        return nn.Sequential(embedding, drop, Recurrent(layers), nn.Dropout(self.dropout), output)


@MODELS.register("gru")
@dataclass(frozen=True)
class GRU(SequenceModel):
    """Two GRU layers and a linear output: the paper's network for traffic (Nguyen 2019)."""

    width: int = 128  # of the embedding and each layer
    n_layers: int = 2

    def __post_init__(self) -> None:
        require(self, "width", self.width >= 1, "at least 1")
        require(self, "n_layers", 1 <= self.n_layers <= MOST_LAYERS, f"from 1 to {MOST_LAYERS}")

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        layers = nn.GRU(self.width, self.width, self.n_layers, batch_first=True)
        embedding, output = nn.Embedding(n_classes, self.width), nn.Linear(self.width, n_classes)
        return nn.Sequential(embedding, Recurrent(layers), output)


class Recurrent(nn.Module):
    """Recurrent layers that start every sequence from a zero state."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]


@MODELS.register("custom")
@dataclass(frozen=True)
class Custom(Model):
    """The user's own module, called with `arguments`.

    A constructor that names `sample_shape` or `n_classes` receives those of the data set.
    """

    target: str | None = None  # my_package.my_module.Net, or path/to/file.py:Net
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Import the module and check its arguments, before any data is loaded."""
        if self.target is None:
            raise ValueError("target must be set, to my_module.Net or path/to/file.py:Net")
        self._code.check_arguments(self._loaded())

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        module = self._code.call(self._loaded(), sample_shape=sample_shape, n_classes=n_classes)
        if not isinstance(module, nn.Module):
            got = type(module).__name__
            raise UserError(f"model.target={self.target}: must build an nn.Module, got {got}")
        return module

    def inputs(self) -> Iterable[ModuleType]:
        return self._code.modules()

    def _loaded(self) -> Callable[..., Any]:
        return self._code.load("a class of nn.Module", lambda cls: issubclass(cls, nn.Module))

    @property
    def _code(self) -> UserCode:
        return UserCode("model.target", str(self.target), self.arguments, example="Net")
