"""Check the user's arrays and turn them into a data set. Errors are ValueErrors in one line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.data import Dataset, Features, Images, Kind, Sequences
from fedbench.datasets.custom_labels import ClassLabels, Labels, encode_labels, read_labels
from fedbench.datasets.custom_readers import UserArrays
from fedbench.memory import check_memory
from fedbench.metrics import IGNORED
from fedbench.rng import numpy_generator

KINDS = ("images", "features", "sequences")
CHANNELS = (1, 3, 4)  # sizes of a last dimension that is taken for channels
CHUNK = 1000  # images at a time in float64


@dataclass(frozen=True)
class ArrayOptions:
    """How to interpret arrays; the settings of `dataset=custom`."""

    kind: str | None
    pixel_range: Sequence[float] | None
    standardize: bool
    test_rate: float
    split_seed: int


def dataset_of(name: str, arrays: UserArrays, options: ArrayOptions) -> Dataset:
    """Return the data set that the arrays describe."""
    x = _samples("x_train", arrays.x_train)
    kind = options.kind or _kind_of(x)
    y = read_labels("y_train", arrays.y_train, x, kind)
    owners = _owners(arrays.owners, len(x))
    if (arrays.x_test is None) != (arrays.y_test is None):
        given, lacking = ("x_test", "y_test") if arrays.y_test is None else ("y_test", "x_test")
        raise ValueError(f"has {given} but no {lacking}")
    if arrays.x_test is None:
        train, test = _split(y, options.test_rate, options.split_seed)
        x, x_test, y, y_test = x[train], x[test], y[train], y[test]
        owners = None if owners is None else _owners(owners[train], len(train))
    else:
        x_test = _samples("x_test", arrays.x_test)
        y_test = read_labels("y_test", arrays.y_test, x_test, kind)
        if (x.shape[1:], x.dtype) != (x_test.shape[1:], x_test.dtype):
            raise ValueError(
                f"x_train and x_test must have samples of one shape and type, got "
                f"{tuple(x.shape[1:])} {_dtype(x)} and {tuple(x_test.shape[1:])} {_dtype(x_test)}"
            )
        if y.shape[1:] != y_test.shape[1:]:
            raise ValueError(
                f"y_train and y_test must have one shape per sample, got {y.shape} and "
                f"{y_test.shape}"
            )
    names = None if arrays.class_names is None else [*map(str, arrays.class_names)]
    build = {"images": _images, "features": _features, "sequences": _sequences}[kind]
    return build(name, (x, y, x_test, y_test), names, owners, options)


Parts = tuple[Tensor, Labels, Tensor, Labels]  # x_train, y_train, x_test, y_test


def _images(
    name: str, parts: Parts, names: Any, owners: Tensor | None, options: ArrayOptions
) -> Images:
    x, y, x_test, y_test = parts
    low, high = min(x.min(), x_test.min()).item(), max(x.max(), x_test.max()).item()
    x, x_test = (_pixels(_channels_first(part), low, high, options) for part in (x, x_test))
    codes, test_codes, known = encode_labels(y, y_test, names)
    mean, std = _pixel_statistics(x) if options.standardize else (0.0, 1.0)
    return Images(
        name, x, codes, x_test, test_codes, known.n_classes, mean, std,
        owners=owners, class_names=known.names,
    )  # fmt: skip


def _features(
    name: str, parts: Parts, names: Any, owners: Tensor | None, options: ArrayOptions
) -> Features:
    x, y, x_test, y_test = parts
    if x.dim() != 2:
        raise ValueError(f"features must be [F] per sample, got {tuple(x.shape[1:])}; flatten them")
    x, x_test = x.float(), x_test.float()
    codes, test_codes, known = encode_labels(y, y_test, names)
    mean, std = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    if options.standardize:
        mean = x.double().mean(dim=0).float()
        spread = x.double().std(dim=0, correction=0).float()
        std = spread.where(spread > 0, 1.0)  # a constant feature becomes 0
    return Features(
        name, x, codes, x_test, test_codes, known.n_classes, mean, std,
        owners=owners, class_names=known.names,
    )  # fmt: skip


def _sequences(
    name: str, parts: Parts, names: Any, owners: Tensor | None, options: ArrayOptions
) -> Sequences:
    x, y, x_test, y_test = parts
    if x.dim() != 2 or x.is_floating_point():
        raise ValueError(
            f"sequences must be [T] symbol ids per sample, got {tuple(x.shape[1:])} {_dtype(x)}"
        )
    x, x_test = x.long(), x_test.long()
    if (lowest := min(int(x.min()), int(x_test.min()))) < 0:
        raise ValueError(f"symbol ids must be 0 or more, got {lowest}")
    n_symbols = max(int(x.max()), int(x_test.max())) + 1
    if y.ndim == 2 and _are_successors(x, y) and _are_successors(x_test, y_test):
        kind, alphabet = Kind.SEQUENCES, _alphabet(n_symbols, y, y_test, names)
        codes, test_codes = torch.from_numpy(y), torch.from_numpy(y_test)
        known = ClassLabels(len(alphabet), ())
    else:
        kind = Kind.TAGGED if y.ndim == 2 else Kind.CLASSIFIED
        alphabet = [*map(str, range(n_symbols))]
        codes, test_codes, known = encode_labels(y, y_test, names, ignores=y.ndim == 2)
    return Sequences(
        name, x, codes, x_test, test_codes, known.n_classes,
        {symbol: i for i, symbol in enumerate(alphabet)}, sequence_kind=kind,
        owners=owners, class_names=known.names,
    )  # fmt: skip


def _alphabet(n_symbols: int, y: Labels, y_test: Labels, names: Sequence[str] | None) -> list[str]:
    """Names of the symbols, which are the classes, too."""
    lowest = min(part[part != IGNORED].min(initial=0) for part in (y, y_test))
    if lowest < 0:
        raise ValueError(f"labels of symbols must be 0 or more, or {IGNORED}, got {lowest}")
    n = max(n_symbols, int(y.max()) + 1, int(y_test.max()) + 1)
    alphabet = [*map(str, range(n))] if names is None else [*names]
    if len(alphabet) < n or len({*alphabet}) < len(alphabet):
        raise ValueError(f"class_names must be {n} different names, one per symbol")
    return alphabet


def _are_successors(x: Tensor, y: Labels) -> bool:
    """Whether each label y [n, T] is the symbol after that of x [n, T], or ignored."""
    if y.dtype.kind != "i":
        return False
    labels, following = y[:, :-1], x.numpy()[:, 1:]
    counted = labels != IGNORED
    return bool(counted.any() and (labels == following)[counted].all())


def _samples(name: str, value: Any) -> Tensor:
    """Convert samples to float32, uint8 or int64."""
    x = value if isinstance(value, Tensor) else _tensor(name, value)
    if x.is_sparse or x.is_complex():
        raise ValueError(f"{name} must be a dense array of real numbers, got {_dtype(x)}")
    check_memory(name, 4 * x.numel())  # a file can hold one number that stands for a trillion
    x = x.detach().cpu()
    if x.is_floating_point() or x.dtype == torch.bool:
        x = x.float()
        if not x.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    elif x.dtype != torch.uint8:
        x = x.long()
    if x.dim() < 2 or not x.numel():
        raise ValueError(f"{name} must be samples [n, ...], got shape {tuple(x.shape)}")
    return x


def _tensor(name: str, value: Any) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} must be one array ({error})") from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be an array of numbers, got {array.dtype}")
    if array.dtype != np.uint8:  # torch lacks some types and byte orders
        with np.errstate(over="ignore"):  # infinity is refused later
            array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _kind_of(x: Tensor) -> str:
    if x.dim() in (3, 4):
        return "images"
    if x.dim() != 2:
        raise ValueError(
            f"x_train must be images [n, C, H, W] or [n, H, W], features [n, F] or sequences "
            f"[n, T], got shape {tuple(x.shape)}"
        )
    return "features" if x.is_floating_point() else "sequences"


def _channels_first(x: Tensor) -> Tensor:
    """Return [n, C, H, W] for [n, H, W], [n, C, H, W] or [n, H, W, C]."""
    if x.dim() not in (3, 4):
        raise ValueError(f"images must be [C, H, W] or [H, W] each, got {tuple(x.shape[1:])}")
    if x.dim() == 3:
        return x.unsqueeze(1)
    last = x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS
    return x.permute(0, 3, 1, 2).contiguous() if last else x


def _pixels(x: Tensor, low: float, high: float, options: ArrayOptions) -> Tensor:
    """Scale pixels to 0..255; bytes stay bytes. All pixels are in low..high."""
    if options.pixel_range is not None:
        least, most = options.pixel_range
        if low < least or high > most:
            raise ValueError(
                f"pixels must be in dataset.pixel_range={[*options.pixel_range]}, "
                f"got {low:g} to {high:g}"
            )
        return (x.float() - least) * (255 / (most - least))
    if x.dtype == torch.uint8:
        return x
    top = 1 if x.is_floating_point() else 255
    if low < 0 or high > top:
        raise ValueError(
            f"pixels must be integers 0..255 or floats 0..1, got {_dtype(x)} from {low:g} to "
            f"{high:g}; set 'dataset.pixel_range=[lowest,highest]'"
        )
    return x * 255 if x.is_floating_point() else x.to(torch.uint8)


def _pixel_statistics(x: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of pixels 0..255, scaled to 0..1."""
    total = squares = 0.0
    for chunk in x.split(CHUNK):  # all at once would take eight times the memory of bytes
        values = chunk.double() / 255
        total, squares = total + float(values.sum()), squares + float(values.square().sum())
    mean = total / x.numel()
    std = max(squares / x.numel() - mean**2, 0.0) ** 0.5
    return mean, std if std > 1e-6 else 1.0


def _owners(value: Any, n: int) -> Tensor | None:
    """Number the owners 0, 1, ... in the order in which they appear."""
    if value is None:
        return None
    items = value.tolist() if isinstance(value, Tensor | np.ndarray) else [*value]
    if len(items) != n:
        raise ValueError(f"owners must be {n}, one per training sample, got {len(items)}")
    if not all(isinstance(item, Hashable) for item in items):
        raise ValueError("owners must be numbers or names, one per training sample")
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(item, len(numbers)) for item in items])


def _split(y: Labels, test_rate: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw test samples: a fraction of each class, of all sequences with a label per symbol."""
    rng = numpy_generator(seed, "test split")
    groups = [np.flatnonzero(y == c) for c in np.unique(y)] if y.ndim == 1 else [np.arange(len(y))]
    drawn = []
    for group in groups:
        n = min(int(test_rate * len(group) + 0.5), len(group) - 1)  # leaves one for training
        drawn.append(rng.permutation(group)[:n])
    test = np.sort(np.concatenate(drawn))
    if not len(test):
        raise ValueError(f"dataset.test_rate={test_rate} leaves no test sample of {len(y)}")
    return np.setdiff1d(np.arange(len(y)), test), test
