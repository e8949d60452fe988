"""Pauses Python's garbage collector where it finds little but walks through millions of objects."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect nothing until the block ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def fast_imports() -> Iterator[None]:
    """Pause the collector, and let it ignore for good what the imports leave behind.

    They are a million objects, which it would visit again and again, and a last time at exit.
    """
    n_modules = len(sys.modules)
    with paused_collector():
        yield
        if len(sys.modules) > n_modules:
            gc.freeze()
