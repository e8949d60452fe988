"""Random generators by purpose: a draw depends on its purpose, never on earlier draws."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *keys: int) -> int:
    """Return a 63-bit seed for (seed, purpose, round, client, ...)."""
    text = "/".join([str(seed), purpose, *map(str, keys)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """Return a CPU generator for one purpose: selection, batches, poisoning, noise, ...

    Runs with the same seed make the same draws, regardless of the number of processes, the order
    of the clients or the defense.
    """
    return torch.Generator().manual_seed(derive(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, purpose, *keys))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch, and restore them afterwards.

    For code of the user's, which may draw from any of them.
    """
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
