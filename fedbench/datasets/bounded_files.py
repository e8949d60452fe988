"""Compressed files are read no further than honest ones of their size reach.

3 MB of a decompression bomb unpack to 3 GB. Captures and dumps of posts shrink to between a half
and a thirtieth; beyond MOST_EXPANSION times its size, a file is refused.
"""

from __future__ import annotations

import zipfile
from gzip import GzipFile
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from fedbench.errors import UserError
from fedbench.memory import check_memory

MOST_EXPANSION = 200
ALWAYS_ALLOWED = 2**22  # bytes, whatever the size of the file
LARGEST = 2**30  # bytes that a file of fixed content, such as idx, may have


class Expansion:
    """Counts the bytes that come out of a compressed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_bytes = 0
        self.most = max(ALWAYS_ALLOWED, MOST_EXPANSION * path.stat().st_size)

    def add(self, n_bytes: int) -> None:
        """Raise a UserError if there are too many."""
        self.n_bytes += n_bytes
        if self.n_bytes > self.most:
            raise UserError(
                f"{self.path}: unpacks to more than {MOST_EXPANSION} times its size, as a "
                "decompression bomb does; if it is what you expect, unpack it yourself"
            )


class _Counted(RawIOBase):
    """A stream of decompressed bytes that counts them."""

    def __init__(self, stream: GzipFile, expansion: Expansion) -> None:
        self._stream = stream
        self._expansion = expansion

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._expansion.n_bytes = 0
        return self._stream.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        self._expansion.add(len(data))
        view[: len(data)] = data
        return len(data)


def bounded(stream: GzipFile, path: Path) -> BufferedReader:
    """Return a stream of what `stream` decompresses from `path`, which must not be a bomb."""
    return BufferedReader(_Counted(stream, Expansion(path)), 2**16)


def check_archive(path: Path) -> None:
    """Raise a UserError if what a zip archive (.npz, .pt) holds does not fit into memory.

    Readers of an archive read no more of a member than its directory says.
    """
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            check_memory(str(path), sum(member.file_size for member in archive.infolist()))
