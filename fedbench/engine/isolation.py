"""Isolates a client's training from the other ranks of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import distributed


@contextmanager
def isolated() -> Iterator[None]:
    """Hide the process group, so that a client trains as in a process of its own.

    Ranks train different clients. Lightning's barriers and torchmetrics' `compute` would wait for
    ranks that never join, and code for rank 0 would run for some clients only.
    """
    marker: Any = rank_zero_only
    is_initialized, rank = distributed.is_initialized, marker.rank
    distributed.is_initialized = _never
    marker.rank = 0
    try:
        yield
    finally:
        distributed.is_initialized = is_initialized
        marker.rank = rank


def _never() -> bool:
    return False
