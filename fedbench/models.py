"""The networks. A model is a frozen dataclass of its settings that builds a module."""

from __future__ import annotations

import importlib
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.data import Spec
from fedbench.errors import UserError
from fedbench.registry import Registry


class Model(ABC):
    """Settings of a network; `build` makes it for one shape of samples and number of classes."""

    def check(self, spec: Spec) -> None:
        """Raises ValueError, with the values, if the network cannot read the data set's samples."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        """A module from samples [B, *sample_shape] to logits [B, C], or [B, T, C] of sequences.

        A LightningModule is trained as it is, with its own loss and optimizer; any other module
        gets cross-entropy and SGD.
        """


MODELS: Registry[Model] = Registry("model", "fedbench.models")


class ImageModel(Model):
    """Reads images."""

    def check(self, spec: Spec) -> None:
        if len(spec.sample_shape) != 3:
            raise ValueError(
                f"reads images, the samples of {spec.name} are of shape {spec.sample_shape}"
            )


class SequenceModel(Model):
    """Reads sequences of symbols and predicts what follows each."""

    def check(self, spec: Spec) -> None:
        if not spec.is_sequences:
            raise ValueError(
                f"reads sequences, the samples of {spec.name} are of shape {spec.sample_shape}"
            )


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLP(ImageModel):
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
class CNN(ImageModel):
    """Two 5 x 5 convolutions and two linear layers: the paper's network for MNIST.

    431,080 parameters on 28 x 28 grey images and 10 classes (Cao et al., 2021).
    """

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        channels, height, width = sample_shape
        n_features = 50 * _after_convolutions(height) * _after_convolutions(width)
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
    """The layers with their numbers in the order that convolutions read them fastest."""
    network = nn.Sequential(*layers)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _after_convolutions(side: int) -> int:
    return ((side - 4) // 2 - 4) // 2


@MODELS.register("resnet18_light")
@dataclass(frozen=True)
class LightResNet18(ImageModel):
    """ResNet-18 (He 2016) of half the usual widths, with a 3 x 3 stem: the paper's for CIFAR-10.

    2,797,610 parameters on 32 x 32 colour images and 10 classes (Bagdasaryan 2020).
    """

    widths: list[int] = field(default_factory=lambda: [32, 64, 128, 256])

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths must be one or more of at least 1, got {self.widths}")

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
    """With batch norm, which makes a bias needless."""
    return [
        nn.Conv2d(n_in, n_out, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(n_out),
    ]


@MODELS.register("lstm")
@dataclass(frozen=True)
class LSTM(SequenceModel):
    """Two LSTM layers, the embedding of words tied to the output: the paper's for Reddit.

    10,693,200 parameters with 50,000 words (Bagdasaryan 2020).
    """

    width: int = 200  # of the embedding and of each layer
    n_layers: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        _check_recurrent(self.width, self.n_layers)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, got {self.dropout}")

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        embedding, output = nn.Embedding(n_classes, self.width), nn.Linear(self.width, n_classes)
        output.weight = embedding.weight
        nn.init.uniform_(embedding.weight, -0.1, 0.1)
        nn.init.zeros_(output.bias)
        between = self.dropout if self.n_layers > 1 else 0.0  # torch warns of it after one layer
        layers = nn.LSTM(self.width, self.width, self.n_layers, batch_first=True, dropout=between)
        drop = nn.Dropout(self.dropout)
        return nn.Sequential(embedding, drop, Recurrent(layers), nn.Dropout(self.dropout), output)


@MODELS.register("gru")
@dataclass(frozen=True)
class GRU(SequenceModel):
    """Two GRU layers and a linear one over the symbols: the paper's for traffic (Nguyen 2019)."""

    width: int = 128  # of the embedding and of each layer
    n_layers: int = 2

    def __post_init__(self) -> None:
        _check_recurrent(self.width, self.n_layers)

    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        layers = nn.GRU(self.width, self.width, self.n_layers, batch_first=True)
        embedding, output = nn.Embedding(n_classes, self.width), nn.Linear(self.width, n_classes)
        return nn.Sequential(embedding, Recurrent(layers), output)


class Recurrent(nn.Module):
    """Recurrent layers, from a state of zeros at the start of every sequence."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return]


def _check_recurrent(width: int, n_layers: int) -> None:
    if width < 1 or n_layers < 1:
        raise ValueError(f"width and n_layers must be at least 1, got {width}, {n_layers}")


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
