"""Image data sets: where their files are, how they are read, what proves that they are whole.

A data set is four idx files, plain or gzipped: images and labels, for training and for testing. The
bytes are checked against a SHA-256 taken after decompression, since packagers compress them anew.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import sys
import textwrap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.registry import Registry

ASSETS = Path(__file__).parent / "assets"
UINT8 = 0x08  # the idx code of the only element type these sets use


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

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, such as (1, 28, 28)."""
        return tuple(self.x_train.shape[1:])

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

    # What attackers plant when the attack does not say: a list of backdoors, each its settings.
    backdoors: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "patch"}])

    @abstractmethod
    def load(self) -> Dataset:
        """Read the samples; UserError if they are missing or damaged."""


DATASETS: Registry[DataSource] = Registry("dataset", home="fedbench.data")


@dataclass(frozen=True)
class IdxFile:
    """One file of a data set, and what proves that it is the right one."""

    name: str  # without .gz
    sha256: str  # of the decompressed bytes
    md5: str  # of the .gz on the mirrors; - if it is not for download


def idx_files(dataset: str) -> tuple[IdxFile, ...]:
    """Train images, train labels, test images and test labels, as assets/idx_files.txt has them."""
    lines = (ASSETS / "idx_files.txt").read_text("utf-8").splitlines()
    rows = [line.split() for line in lines if f" {dataset}/" in line]
    return tuple(IdxFile(path.split("/")[1], sha256, md5) for sha256, md5, path in rows)


def read_idx(path: Path, n_dims: int, sha256: str | None = None) -> Tensor:
    """The uint8 array of `n_dims` dimensions in the idx file `path`, plain or gzipped.

    The format: two zero bytes, the element type, the number of dimensions, each dimension as a
    big-endian uint32, the elements. Anything else, a byte too few or too many, or bytes of another
    `sha256`, is a UserError.
    """
    data = _read_bytes(path)
    header = 4 * (1 + n_dims)
    magic = UINT8 << 8 | n_dims
    if len(data) < header:
        raise UserError(f"{path}: {len(data)} bytes, too short for an idx header of {header} bytes")
    found, *shape = struct.unpack_from(f">{1 + n_dims}I", data)
    if found != magic:
        raise UserError(
            f"{path}: magic number 0x{found:08x}, expected 0x{magic:08x} "
            f"(idx, unsigned bytes, {n_dims} dimensions)"
        )
    dims = " x ".join(map(str, shape))
    if 0 in shape:
        raise UserError(f"{path}: the header says {dims}, expected at least one element")
    if len(data) != header + math.prod(shape):
        raise UserError(
            f"{path}: {len(data)} bytes, expected {header + math.prod(shape)} "
            f"(a header of {header} and {dims} elements)"
        )
    if sha256 is not None and (digest := hashlib.sha256(data).hexdigest()) != sha256:
        raise UserError(
            f"{path}: SHA-256 of the decompressed bytes is {digest}, expected {sha256}; "
            "replace the file, its content is not the published one"
        )
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(shape)


def _read_bytes(path: Path) -> bytearray:
    try:
        data = path.read_bytes()
        # Told by content and not by name: browsers and mirrors unpack .gz files and keep the name.
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except EOFError as error:
        raise UserError(
            f"{path}: gzip data cut off after {len(data)} bytes, expected all"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip data ({error}), expected an intact file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a file") from error
    return bytearray(data)  # writable, as torch.frombuffer wants it


def read_split(
    images: Path, labels: Path, n_classes: int, sha256: tuple[str | None, str | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Images [n, 1, height, width] uint8 and their labels [n] int64, from one idx file each."""
    x = read_idx(images, 3, sha256[0]).unsqueeze(1)
    y = read_idx(labels, 1, sha256[1]).long()
    if len(x) != len(y):
        raise UserError(f"{labels}: {len(y)} labels, expected {len(x)}, one an image of {images}")
    if (top := int(y.max())) >= n_classes:
        raise UserError(f"{labels}: label {top}, expected 0 to {n_classes - 1}")
    return x, y


def find_files(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files `names` in `folder`, as they are or with .gz, and the names not found."""
    found, missing = [], []
    for name in names:
        # os.path, since Path.is_file raises in a folder that may not be read.
        paths = [p for p in (folder / name, folder / f"{name}.gz") if os.path.isfile(p)]
        found += paths[:1]
        missing += [] if paths else [name]
    return found, missing


def download(dataset: str, files: Sequence[IdxFile], mirrors: Sequence[str]) -> list[Path]:
    """`files` as .gz in the user's cache, each fetched from the first mirror that has it intact.

    What is there with the right MD5 is not fetched again; what is fetched appears whole or not at
    all. ConnectionError, with every mirror's reason, if none of them serves a file.
    """
    import pooch  # type: ignore[import-untyped]  # takes 0.1 s, and most runs have their data

    def fetch(file: IdxFile) -> Path:
        name, reasons = f"{file.name}.gz", []
        for mirror in mirrors:
            try:
                return Path(
                    pooch.retrieve(mirror + name, f"md5:{file.md5}", name, cache, downloader=http)
                )
            except (OSError, ValueError) as error:  # the network or the disk; a wrong hash
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
                reasons.append(f"{mirror}: {reason}")
        raise ConnectionError("; ".join(reasons))

    http = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=20)
    cache = Path(pooch.os_cache("fedbench")) / dataset
    return [fetch(file) for file in files]


@dataclass(frozen=True)
class IdxImages(DataSource):
    """Grey images in ten classes, in four idx files: train images, train labels, test likewise."""

    name: ClassVar[str]
    files: ClassVar[tuple[IdxFile, ...]]
    mean: ClassVar[float]
    std: ClassVar[float]
    n_classes: ClassVar[int] = 10

    @abstractmethod
    def locate(self) -> list[Path]:
        """Where the four `files` are, in their order."""

    def load(self) -> Dataset:
        paths = self.locate()
        hashes = [file.sha256 for file in self.files]
        train = read_split(paths[0], paths[1], self.n_classes, (hashes[0], hashes[1]))
        test = read_split(paths[2], paths[3], self.n_classes, (hashes[2], hashes[3]))
        return Dataset(self.name, *train, *test, self.n_classes, self.mean, self.std)


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
        shared = os.environ.get("FEDBENCH_DATA")
        places = (shared and f"{shared}/{self.name}", f"data/{self.name}", self.system_folder)
        for place in filter(None, places):
            found, missing = find_files(Path(place).expanduser(), names)
            if not missing:
                return found
        try:
            return download(self.name, self.files, self.mirrors)
        except ConnectionError as error:
            package = f"run apt install {self.system_package}, or " if self.system_package else ""
            raise UserError(
                f"{self.name} is not on this machine and cannot be downloaded: "
                f"put {', '.join(names)} (plain or .gz) into {Path('data', self.name).absolute()}, "
                f"or {package}set dataset.root=PATH to the folder that has them [{error}]"
            ) from error


@DATASETS.register("mnist")
@dataclass(frozen=True)
class Mnist(PublishedImages):
    """MNIST (LeCun 1998): 60,000 and 10,000 handwritten digits of 28 x 28 pixels."""

    name = "mnist"
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

    name = "fmnist"
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

    name = "fmnist_sample"
    files = idx_files("fmnist_sample")
    mean = FashionMnist.mean
    std = FashionMnist.std

    def locate(self) -> list[Path]:
        return [ASSETS / self.name / f"{file.name}.gz" for file in self.files]
