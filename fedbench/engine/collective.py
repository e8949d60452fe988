"""Operations that all ranks of a run perform together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

GRACE = 30  # seconds for the parent process to end this one


@contextmanager
def collective() -> Iterator[None]:
    """Wrap a collective operation, which fails on all ranks if one of them dies.

    The parent process then ends every rank and reports the cause. The error of a survivor would
    hide it, so it waits to be ended.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(GRACE)
        raise
