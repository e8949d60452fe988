"""Randomness by purpose: a draw depends on what it is for, never on what was drawn before it."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed for (seed, purpose, round, client, ...)."""
    text = "/".join([str(seed), purpose, *map(str, keys)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, purpose: str, *keys: int) -> torch.Generator:
    """A CPU generator for one purpose: selection, batches, poisoning, noise, ...

    Two runs that share the seed share every such draw, whatever the number of processes, the order
    of the clients or the defense.
    """
    return torch.Generator().manual_seed(derive(seed, purpose, *keys))


def numpy_generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The same for numpy's draws."""
    return np.random.default_rng(derive(seed, purpose, *keys))
