"""What is made of a data set's files, kept between runs: made again when they change.

It is mapped into memory from its file: processes side by side share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedbench.datasets.files import cache_folder
from fedbench.errors import UserError
from fedbench.results.storage import locked, write_atomically


def cached(
    dataset: str, key_parts: Sequence[Any], build: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `build` makes, or made before for the same `key_parts`.

    `key_parts` are what the result depends on, as JSON can write it: a version of the code, the
    settings, `stamp` of every file. The result holds tensors, numbers, text, lists and dicts. Of
    several processes one builds and the others wait. A damaged file is built anew. Where nothing
    can be written, it is built for this run alone.
    """
    text = json.dumps(key_parts, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder(dataset) / f"{name}.pt"
    if not _writable(path.parent):
        return build()
    with locked(path.with_suffix(".lock")):
        kept = _load(path, text)
        if kept is None:
            kept = build()
            try:
                write_atomically(path, partial(torch.save, {"key": text, "content": kept}))
            except OSError:  # such as a full disk
                return kept
        return _load(path, text) or kept


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def stamp(path: Path) -> tuple[str, int, int]:
    """Where a file is, its size and when it was written: what changes when its content does."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a file") from error
    return str(path.absolute()), status.st_size, status.st_mtime_ns


def _load(path: Path, key: str) -> dict[str, Any] | None:
    """The content of a file if it is whole and of this key."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch takes changed bytes as they are
                return None
        found = torch.load(path, weights_only=True, mmap=True)
        return found["content"] if found["key"] == key else None
    except Exception:  # torch, pickle and zipfile each have their own for a damaged file
        return None
