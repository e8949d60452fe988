"""Readers of the user's own data: data modules, folders of images, .npz and .pt files."""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.sampler import RandomSampler, SequentialSampler, WeightedRandomSampler

from fedbench.datasets.bounded_files import check_archive
from fedbench.datasets.cache import cached, fingerprint
from fedbench.errors import UserError, nearest
from fedbench.memory import check_memory

if TYPE_CHECKING:  # takes seconds to import
    from lightning.pytorch import LightningDataModule

VERSION = 1  # increase when the same folder gives different images
EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".pgm", ".ppm"),
)
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # others can start programs
LARGEST_IMAGE = 2**26  # pixels
MODES = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "PA": "RGB"}
MODES |= {"CMYK": "RGB", "YCbCr": "RGB"}
READ_BATCH = 256  # samples at a time, if the data loader does not say


@dataclass(frozen=True, eq=False)
class UserArrays:
    """Arrays, tensors or lists as the user gives them; None: not given."""

    x_train: Any
    y_train: Any
    x_test: Any = None
    y_test: Any = None
    owners: Any = None  # of the training samples
    class_names: Any = None


class SourceError(UserError):
    """What is wrong with the content of a source, without its name."""


KEYS = tuple(field.name for field in fields(UserArrays))


def arrays_of(content: Any) -> UserArrays:
    """Name the parts of a tuple of 4 or 2, or of a mapping; ValueError for anything else."""
    if isinstance(content, tuple | list):
        if len(content) not in (2, 4):
            raise ValueError(
                f"must be (x_train, y_train, x_test, y_test) or (x, y), got {len(content)} values"
            )
        return UserArrays(*content)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"must be a tuple of arrays or a mapping with {', '.join(KEYS)}, "
            f"got {type(content).__name__}"
        )
    for key in content:
        if key not in KEYS:
            raise ValueError(f"no array is called {key}{nearest(str(key), KEYS)}")
    if missing := [key for key in ("x_train", "y_train") if content.get(key) is None]:
        raise ValueError(f"must have {' and '.join(missing)}")
    return UserArrays(**content)


def read_archive(path: Path) -> UserArrays:
    """Read an .npz or .pt file of arrays. No code in it is executed."""
    try:
        check_archive(path)
        if path.suffix == ".npz":
            content: Any = _read_npz(path)
        else:
            with warnings.catch_warnings(action="ignore"):  # about files of other formats
                content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # numpy, torch, zipfile and pickle raise different types
        raise SourceError(_why_unreadable(path, error)) from error
    return arrays_of(content)


def _read_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):  # numpy would take it for a pickle
            raise zipfile.BadZipFile
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _why_unreadable(path: Path, error: Exception) -> str:
    reason = str(error)
    if isinstance(error, OSError | MemoryError):
        return f"cannot be read ({reason})"
    refused = "allow_pickle" in reason or "weights_only" in reason
    is_numpy = path.suffix == ".npz"
    if refused and "Unsupported operand" not in reason:  # torch's word for bytes of another format
        what = "arrays of numbers" if is_numpy else "tensors"
        return f"it holds Python objects, which are never loaded; save {what}"
    return f"it is not {'an .npz' if is_numpy else 'a .pt'} file, or it is damaged"


def is_data_module(value: Any) -> bool:
    """Whether a value is a LightningDataModule, or a class of them."""
    cls = value if isinstance(value, type) else type(value)
    # By name first: importing Lightning takes seconds.
    return any(base.__name__ == "LightningDataModule" for base in cls.__mro__)


def read_data_module(module: LightningDataModule) -> UserArrays:
    """Read the training and test loaders in order; without test loader, the validation loader."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    module.prepare_data()
    module.setup("fit")
    train = _read_loader("train_dataloader", module.train_dataloader())
    test: list[Any] = [None, None]
    if is_overridden("test_dataloader", module):
        module.setup("test")
        test = _read_loader("test_dataloader", module.test_dataloader())
    elif is_overridden("val_dataloader", module):
        test = _read_loader("val_dataloader", module.val_dataloader())
    return UserArrays(
        x_train=train[0],
        y_train=train[1],
        x_test=test[0],
        y_test=test[1],
        owners=train[2] if len(train) == 3 else None,
        class_names=getattr(module, "class_names", None),
    )


def _read_loader(name: str, loader: Any) -> list[Any]:
    """Read all batches (x, y) or (x, y, owners) of a loader into one array each."""
    if not isinstance(loader, DataLoader):
        raise SourceError(f"{name} must return one DataLoader, got {type(loader).__name__}")
    parts: list[list[Any]] = []
    for batch in _in_order(loader):
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            got = (
                f"{len(batch)} values" if isinstance(batch, tuple | list) else type(batch).__name__
            )
            raise SourceError(
                f"{name} must yield (samples, labels) or (samples, labels, owners), got {got}"
            )
        parts.append(list(batch))
    if not parts:
        raise SourceError(f"{name} has no samples")
    return [_joined(column) for column in zip(*parts, strict=True)]


def _joined(column: Sequence[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.cat([*column])
    return [value for part in column for value in part]  # e.g. strings


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same samples without shuffling, dropping or worker processes."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return loader
    whole = (RandomSampler, SequentialSampler, WeightedRandomSampler)
    if loader.batch_size is not None and not isinstance(loader.sampler, whole):
        dataset = Subset(dataset, sorted(loader.sampler))  # a sampler of some samples
    unbatched = loader.batch_size is None and loader.batch_sampler is None
    size = None if unbatched else loader.batch_size or READ_BATCH
    return DataLoader(dataset, batch_size=size, collate_fn=loader.collate_fn)


def read_folder(root: Path, size: Sequence[int] | None) -> UserArrays:
    """Read train/<class>/* and test/<class>/*, or <class>/* without a test set."""
    train = root / "train" if (root / "train").is_dir() else root
    parts = [train] if train == root or not (root / "test").is_dir() else [train, root / "test"]
    names = _subfolders(train)
    if len(names) < 2:
        raise SourceError(
            f"must have a folder of images per class, in train and test or "
            f"directly, got {len(names)} in {train}"
        )
    if len(parts) == 2 and (unknown := sorted({*_subfolders(parts[1])} - {*names})):
        raise SourceError(f"test has the class {unknown[0]}, train does not")
    files = [
        [(path, label) for label, name in enumerate(names) for path in _images(part / name)]
        for part in parts
    ]
    if len(parts) == 2 and not files[1]:
        raise SourceError(f"no images in {parts[1]}")
    stamps = [fingerprint(path) for part in files for path, _ in part]
    digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    content = cached("custom", [VERSION, size, digest], lambda: _read_images(files, size))
    return UserArrays(**content, class_names=names)


def _subfolders(folder: Path) -> list[str]:
    hidden = (".", "__")
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(hidden))


def _images(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    found = sorted(path for path in files if path.suffix.lower() in EXTENSIONS)
    if folder.is_dir() and not found:
        raise SourceError(f"no images in {folder} ({', '.join(EXTENSIONS)})")
    return found


def _read_images(
    files: Sequence[Sequence[tuple[Path, int]]], size: Sequence[int] | None
) -> dict[str, Tensor]:
    """Read images of one size: [n, C, H, W] uint8, gray if all of them are."""
    n = sum(map(len, files))
    if size is not None:
        _check_fits(n, size)
    first = _read_image(files[0][0][0], size)
    _check_fits(n, first.shape)  # all have the same
    pixels = [[_read_image(path, size) for path, _ in part] for part in files]
    shapes = {
        image.shape[:2]: path
        for part, images in zip(files, pixels, strict=True)
        for (path, _), image in zip(part, images, strict=True)
    }
    if len(shapes) > 1:
        (one, path), (other, another) = [*shapes.items()][:2]
        raise SourceError(
            f"images differ in size, {path} has {one[0]} x {one[1]} pixels and "
            f"{another} {other[0]} x {other[1]}; set 'dataset.size=[height,width]' to resize all"
        )
    gray = all(image.ndim == 2 for images in pixels for image in images)
    content = {}
    for name, part, images in zip(("train", "test"), files, pixels, strict=False):
        stacked = np.stack([image[None] if gray else _color(image) for image in images])
        content[f"x_{name}"] = torch.from_numpy(stacked)
        content[f"y_{name}"] = torch.tensor([label for _, label in part])
    return content


def _check_fits(n: int, shape: Sequence[int]) -> None:
    check_memory(f"{n} images of {shape[0]} x {shape[1]} pixels", 2 * n * 3 * shape[0] * shape[1])


def _color(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [3, H, W] for an image [H, W] or [H, W, 3]."""
    return np.stack([image] * 3) if image.ndim == 2 else image.transpose(2, 0, 1)


def _read_image(path: Path, size: Sequence[int] | None) -> NDArray[np.uint8]:
    """Read an image as [H, W] gray or [H, W, 3]."""
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > LARGEST_IMAGE:  # before its pixels are unpacked
                raise ValueError(f"{image.width} x {image.height} pixels, {LARGEST_IMAGE} allowed")
            if image.mode not in MODES:
                raise ValueError(f"mode {image.mode} is not 8 bits per channel")
            plain = image.convert(MODES[image.mode])
    except Exception as error:  # Pillow raises different types for damaged files
        raise SourceError(f"cannot read the image {path} ({error})") from error
    if size is not None:
        plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(plain)
