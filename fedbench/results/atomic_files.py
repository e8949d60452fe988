"""Atomic file writes and file locks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from fedbench.errors import UserError

LOCK_FILE = ".lock"  # in a run directory; held while the run is in progress
FULL = (errno.ENOSPC, errno.EDQUOT)


class WriteError(UserError):
    """A file could not be written: the disk is full, read-only or somebody else's."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError that says in words why `path` cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            reason = f"no space left on the disk of {path.parent}; free some"
            raise WriteError(f"{reason} and repeat the command") from error
        raise WriteError(f"cannot write {path}: {in_words(error)}") from error


def in_words(error: OSError) -> str:
    """Return the reason of an OSError, without its number and path."""
    return error.strerror or str(error) or type(error).__name__


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
        raise WriteError(f"cannot write to {path.parent}: {in_words(error)}") from error
    with held:
        yield


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write the file atomically: a crash leaves the old file or the new one, never a part.

    If that fails, the old file stays, and nothing else.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file, or an empty folder in its place, if there is one."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Delete what killed processes left of `write_atomically`; hold the folder's lock."""
    for path in folder.glob(".*.partial"):
        remove(path)


def _sync_folder(folder: Path) -> None:
    """Let a renamed file survive a power failure."""
    with suppress(OSError):  # some network file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
