"""Cache for prepared data sets, rebuilt when the source files or settings change.

Cached tensors are memory-mapped, so concurrent processes share them.
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

from fedbench.datasets.files import cache_folder, reading
from fedbench.results.atomic_files import WriteError, locked, write_atomically


def cached(
    dataset: str, key_parts: Sequence[Any], build: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of `build`, or the one cached for the same `key_parts`.

    `key_parts` lists everything the result depends on, as JSON values: a code version, the
    settings, and the `fingerprint` of every file. The result may hold tensors, numbers, strings,
    lists and dicts. If several processes ask at once, one builds and the others wait. A damaged
    file is rebuilt. If the cache is not writable, the result serves this run only.
    """
    text = json.dumps(key_parts, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder(dataset) / f"{name}.pt"
    if not _writable(path.parent):
        return build()
    with locked(path.with_suffix(".lock")):
        content = _load(path, text)
        if content is None:
            content = build()
            try:
                write_atomically(path, partial(torch.save, {"key": text, "content": content}))
            except (WriteError, RuntimeError):  # disk full; torch raises RuntimeErrors of its own
                return content
        return _load(path, text) or content


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def fingerprint(path: Path) -> tuple[str, int, int]:
    """Return path, size and modification time, which change when the content does."""
    with reading(path):
        status = path.stat()
    return str(path.absolute()), status.st_size, status.st_mtime_ns


def _load(path: Path, key: str) -> dict[str, Any] | None:
    """Return the content of a cache file, or None if it is damaged or has another key."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch.load does not verify checksums
                return None
        found = torch.load(path, weights_only=True, mmap=True)
        return found["content"] if found["key"] == key else None
    except Exception:  # torch, pickle and zipfile raise different types for damaged files
        return None
