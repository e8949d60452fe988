"""Atomic file writes and file locks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from fedbench.errors import UserError

LOCK_FILE = ".lock"  # in a run directory; held while the run is in progress


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a file lock; the system releases it if the process dies.

    Without `wait`, raise a Timeout if another process holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(path).acquire(blocking=wait)
    except Timeout:
        raise
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror or error}") from error
    with held:
        yield


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write the file atomically: a crash leaves the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
