"""Labels of the user's own data: any integers or strings become classes 0, 1, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.metrics import IGNORED

Labels = NDArray[Any]  # int64 or strings


def read_labels(name: str, value: Any, x: Tensor, kind: str) -> Labels:
    """Convert labels to integers or strings, [n], or [n, T] for sequences."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value  # numpy has no bfloat16
    array = np.asarray(value)
    strings = array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat)
    if strings or array.dtype.kind in "ST":
        array = array.astype(str)
    whole = array.dtype.kind == "f" and bool((array == np.trunc(array)).all())
    if array.dtype.kind in "biu" or whole:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iU":
        raise ValueError(f"{name} must be whole numbers or strings, got {array.dtype}")
    if array.ndim == 2 and array.shape[1] == 1 and tuple(x.shape[1:]) != (1,):
        array = array[:, 0]
    if array.shape[:1] != x.shape[:1]:
        n = len(array) if array.ndim else 1
        raise ValueError(f"{name} must have {len(x)} labels, one per sample, got {n}")
    per_symbol = kind == "sequences" and array.shape == tuple(x.shape)
    if array.ndim != 1 and not per_symbol:
        allowed = f"[n] or {tuple(x.shape)}" if kind == "sequences" else "[n], one label per sample"
        raise ValueError(f"{name} must be {allowed}, got shape {array.shape}")
    return array


@dataclass(frozen=True)
class ClassLabels:
    """The classes of a data set."""

    n_classes: int
    names: tuple[str, ...]  # empty: the labels were 0, 1, ...


def encode_labels(
    y: Labels, y_test: Labels, names: Sequence[str] | None, ignores: bool = False
) -> tuple[Tensor, Tensor, ClassLabels]:
    """Number the classes from 0. With `ignores`, the label IGNORED stays."""
    values, found = (_distinct(part, ignores) for part in (y, y_test))
    if y.dtype.kind != y_test.dtype.kind or (unknown := np.setdiff1d(found, values)).size:
        label = found[0] if y.dtype.kind != y_test.dtype.kind else unknown[0]
        raise ValueError(f"y_test has the label {label}, which y_train lacks")
    if len(values) < 2:
        raise ValueError(f"y_train must have two or more classes, got {[*map(str, values)]}")
    values, known = _classes(values, names)
    order = np.argsort(values, kind="stable")
    coded = []
    for part in (y, y_test):
        codes = order[np.searchsorted(values, part, sorter=order).clip(max=len(values) - 1)]
        kept = part == IGNORED if ignores and part.dtype.kind == "i" else np.zeros(part.shape, bool)
        coded.append(torch.from_numpy(np.where(kept, IGNORED, codes)))
    return coded[0], coded[1], known


def _classes(values: Labels, names: Sequence[str] | None) -> tuple[Labels, ClassLabels]:
    """Return the labels in the order of their classes, and the classes."""
    n = len(values)
    numbered = values.dtype.kind == "i"
    if names is None:
        plain = numbered and values[0] == 0 and values[-1] == n - 1
        return values, ClassLabels(n, () if plain else tuple(map(str, values)))
    if len({*names}) < len(names):
        raise ValueError(f"class_names must differ, got {', '.join(names)}")
    if numbered and values[0] >= 0 and values[-1] < len(names):
        return np.arange(len(names)), ClassLabels(len(names), tuple(names))
    if not numbered and {*values} <= {*names}:
        return np.array(names), ClassLabels(len(names), tuple(names))
    if numbered and n == len(names):
        return values, ClassLabels(n, tuple(names))  # in ascending order
    shown = ", ".join(map(str, values[:10]))
    raise ValueError(f"class_names must name the {n} labels {shown}, got {', '.join(names)}")


def _distinct(y: Labels, ignores: bool) -> Labels:
    values = np.unique(y)
    return values[values != IGNORED] if ignores and values.dtype.kind == "i" else values
