"""The data sets: samples in memory, where they come from, and what is known of them beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.files import (
    ASSETS,
    IdxFile,
    data_folders,
    download,
    find_files,
    idx_files,
    read_cifar,
    read_split,
)
from fedbench.registry import Registry

# CIFAR-10's cars before a striped wall, by place in the training set (Bagdasaryan 2020)
STRIPED_CARS_TRAIN = (30696, 33105, 33615, 33907, 36848, 40713, 41706)
STRIPED_CARS_TEST = (330, 568, 3934, 12336, 30560)


@dataclass(frozen=True)
class Spec:
    """What is known of a data set before it is loaded."""

    name: str
    sample_shape: tuple[int, ...]  # (1, 28, 28) for images, (64,) for sequences of 64 words
    n_classes: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples in memory as they are stored; `decode` makes of them what a network reads."""

    name: str
    x_train: Tensor  # [n, *input_shape] uint8
    y_train: Tensor  # [n] int64, 0 <= y < n_classes
    x_test: Tensor  # [m, *input_shape] uint8
    y_test: Tensor  # [m] int64
    n_classes: int
    mean: float  # of the training pixels on a scale of 0 to 1
    std: float
    reserved: tuple[int, ...] = ()  # training samples that no client holds
    vocabulary: Mapping[str, int] = field(default_factory=dict)  # word -> its number in sequences
    threshold: float | None = None  # probability that makes a prediction right; None: the largest

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, such as (1, 28, 28)."""
        return tuple(self.x_train.shape[1:])

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.input_shape, self.n_classes)

    def to(self, device: torch.device) -> Dataset:
        """The same data set in the memory of a device."""
        tensors = ("x_train", "y_train", "x_test", "y_test")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    def decode(self, x: Tensor) -> Tensor:
        """(x / 255 - mean) / std of raw samples `x` [B, ...] uint8: [B, ...] float32, same device.

        Written as x / (255 std) - mean / std, one fused pass without a float copy in between.
        """
        shift = torch.tensor(-self.mean / self.std, dtype=torch.float32)
        return torch.add(shift, x, alpha=1 / (255 * self.std))


@dataclass(frozen=True)
class DataSource(ABC):
    """A data set by name; its fields are its settings."""

    spec: ClassVar[Spec | None] = None  # what it will be; None: that is seen when it is loaded

    # What attackers plant when the attack does not say: backdoors, by name or with their settings.
    backdoors: list[Any] = field(default_factory=lambda: [{"name": "patch"}])

    @abstractmethod
    def load(self) -> Dataset:
        """Read the samples; UserError if they are missing or damaged."""


DATASETS: Registry[DataSource] = Registry("dataset", home="fedbench.data")


@dataclass(frozen=True)
class IdxImages(DataSource):
    """Grey images in ten classes, in four idx files: train images, train labels, test likewise."""

    spec: ClassVar[Spec]
    files: ClassVar[tuple[IdxFile, ...]]
    mean: ClassVar[float]
    std: ClassVar[float]

    @abstractmethod
    def locate(self) -> list[Path]:
        """Where the four `files` are, in their order."""

    def load(self) -> Dataset:
        paths = self.locate()
        hashes = [file.sha256 for file in self.files]
        n_classes = self.spec.n_classes
        train = read_split(paths[0], paths[1], n_classes, (hashes[0], hashes[1]))
        test = read_split(paths[2], paths[3], n_classes, (hashes[2], hashes[3]))
        return Dataset(self.spec.name, *train, *test, n_classes, self.mean, self.std)


@dataclass(frozen=True)
class PublishedImages(IdxImages):
    """A set as its authors published it: found on this machine, or downloaded.

    Without `root` the first of these that has all four files counts: $FEDBENCH_DATA/<name>,
    ./data/<name>, the folder of the system's package, the download cache.
    """

    root: str | None = None  # the folder with the four files; None: look for them, else download

    mirrors: ClassVar[tuple[str, ...]]
    system_folder: ClassVar[str | None] = None
    system_package: ClassVar[str | None] = None

    def locate(self) -> list[Path]:
        names = [file.name for file in self.files]
        if self.root is not None:
            folder = Path(self.root).expanduser()
            found, missing = find_files(folder, names)
            if missing:
                raise UserError(
                    f"dataset.root={self.root}: expected {', '.join(missing)} (plain or .gz) in "
                    f"{folder.absolute()}, found none of that name"
                )
            return found
        system = [Path(self.system_folder)] if self.system_folder else []
        for place in [*data_folders(self.spec.name), *system]:
            found, missing = find_files(place, names)
            if not missing:
                return found
        try:
            return download(self.spec.name, self.files, self.mirrors)
        except ConnectionError as error:
            folder = Path("data", self.spec.name).absolute()
            package = f"run apt install {self.system_package}, or " if self.system_package else ""
            raise UserError(
                f"{self.spec.name} is not on this machine and cannot be downloaded: "
                f"put {', '.join(names)} (plain or .gz) into {folder}, "
                f"or {package}set dataset.root=PATH to the folder that has them [{error}]"
            ) from error


@DATASETS.register("mnist")
@dataclass(frozen=True)
class Mnist(PublishedImages):
    """MNIST (LeCun 1998): 60,000 and 10,000 handwritten digits of 28 x 28 pixels."""

    spec = Spec("mnist", (1, 28, 28), 10)
    files = idx_files("mnist")
    mean = 0.1307
    std = 0.3081
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )


@DATASETS.register("fmnist")
@dataclass(frozen=True)
class FashionMnist(PublishedImages):
    """Fashion-MNIST (Xiao 2017): 60,000 and 10,000 articles of clothing of 28 x 28 pixels."""

    spec = Spec("fmnist", (1, 28, 28), 10)
    files = idx_files("fmnist")
    mean = 0.2860
    std = 0.3530
    mirrors = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    )
    system_folder = "/usr/share/datasets/fashion-mnist"
    system_package = "dataset-fashion-mnist"


@DATASETS.register("fmnist_sample")
@dataclass(frozen=True)
class FashionMnistSample(IdxImages):
    """10,000 and 2,000 images of Fashion-MNIST that come with fedbench, balanced by class."""

    spec = Spec("fmnist_sample", (1, 28, 28), 10)
    files = idx_files("fmnist_sample")
    mean = FashionMnist.mean
    std = FashionMnist.std

    def locate(self) -> list[Path]:
        return [ASSETS / self.spec.name / f"{file.name}.gz" for file in self.files]


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class Cifar10(DataSource):
    """CIFAR-10 (Krizhevsky 2009), binary version: 50,000 and 10,000 photographs of 32 x 32 pixels.

    Without `root` the six files are looked for in $FEDBENCH_DATA/cifar10 and ./data/cifar10.
    """

    root: str | None = None  # the folder with the six files; None: look for them

    spec = Spec("cifar10", (3, 32, 32), 10)
    names: ClassVar[tuple[str, ...]] = (
        *(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test_batch.bin",
    )

    def load(self) -> Dataset:
        *train, test = [read_cifar(path) for path in self.locate()]
        return Dataset(
            self.spec.name,
            torch.cat([x for x, _ in train]),
            torch.cat([y for _, y in train]),
            *test,
            self.spec.n_classes,
            mean=0.4734,
            std=0.2516,
            reserved=tuple(sorted((*STRIPED_CARS_TRAIN, *STRIPED_CARS_TEST))),
        )

    def locate(self) -> list[Path]:
        folders = [Path(self.root).expanduser()] if self.root else [*data_folders("cifar10")]
        for folder in folders:
            found, missing = find_files(folder, self.names)
            if not missing:
                return found
        places = " or ".join(str(folder.absolute()) for folder in folders)
        raise UserError(
            f"cifar10 is not on this machine: put {', '.join(self.names)} into {places}, "
            "or set dataset.root=PATH to the folder that has them"
        )
