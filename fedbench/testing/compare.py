"""Comparisons for checks: bit by bit, within a tolerance, and of global random generators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.defense import Aggregate


def bits(value: Any) -> Any:
    """Return a value to compare bit by bit, so that -0.0 differs from 0.0."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, Aggregate):
        return [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


class Unchanged:
    """Named tensors that a plugin must not modify."""

    def __init__(self, **tensors: Tensor | None) -> None:
        self._tensors = {name: value for name, value in tensors.items() if value is not None}
        self._before = {name: (bits(v), v._version) for name, v in self._tensors.items()}

    def verify(self, method: str) -> None:
        for name, value in self._tensors.items():
            content, version = self._before[name]
            unchanged = bits(value) == content and value._version == version
            assert unchanged, f"{method} modified {name} in place; clone it first"


def is_close(a: Tensor | None, b: Tensor | None, rtol: float = 1e-5) -> bool:
    """Compare relative to the largest value: coordinates near zero suffer from cancellation."""
    if a is None or b is None:
        return a is None and b is None
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    tolerance = rtol * float(b.abs().max())
    return bool(((a - b).abs() <= tolerance).all())


def global_generators() -> list[Any]:
    """Return the states of the global generators of torch, numpy and Python."""
    numpy_state: Any = np.random.get_state()
    return [
        bits(torch.get_rng_state()),
        numpy_state[1].tobytes(),
        numpy_state[2:],
        random.getstate(),
    ]


def seed_globally(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Run on one thread, which suits small tensors; restore the global generators afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def no_global_randomness(method: str) -> Iterator[None]:
    """Fail if the block changes a global random generator."""
    before = global_generators()
    yield
    assert global_generators() == before, (
        f"{method} draws from a global random generator; draw from the rng that it receives, "
        "or from one with a fixed seed"
    )
