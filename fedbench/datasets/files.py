"""Data set files: find, download, verify and read them.

The SHA-256 covers the decompressed bytes, because packagers recompress files.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import os
import shutil
import struct
import sys
import tarfile
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbench.datasets.bounded_files import LARGEST, bounded, check_archive
from fedbench.errors import UserError
from fedbench.memory import check_memory
from fedbench.results.atomic_files import write_atomically

ASSETS = Path(__file__).parent.parent / "assets"
LARGEST_CIFAR = 10_000  # records of a file
UINT8 = 0x08  # idx type code; these data sets use no other


def data_folders(name: str) -> Iterator[Path]:
    """Yield where to look for `name`: $FEDBENCH_DATA/<name>, then ./data/<name>."""
    shared = os.environ.get("FEDBENCH_DATA")
    for folder in filter(None, (shared, "data")):
        yield Path(folder).expanduser() / name


def local_file(given: str | None, default: str) -> Path:
    """Return the path `given` by the user, or `default` in one of the data folders."""
    if given is not None:
        path = Path(os.path.expanduser(given))  # unlike Path.expanduser, accepts unknown ~users
        if not path.exists():
            raise UserError(f"{path}: no such file or folder, expected {default}")
        return path
    for path in data_folders(default):
        if path.exists():
            return path
    folder = Path("data").absolute()
    raise UserError(f"{default} is not on this machine: put it into {folder}, or set its path")


@contextmanager
def reading(path: Path, expected: str = "a file", *errors: type[Exception]) -> Iterator[None]:
    """Turn I/O and decompression errors, and `errors`, into a UserError that names the file."""
    failures: tuple[type[Exception], ...] = (OSError, zlib.error, lzma.LZMAError, *errors)
    try:
        yield
    except EOFError as error:
        raise UserError(f"{path}: compressed data is truncated, expected {expected}") from error
    except failures as error:
        reason = textwrap.shorten(str(getattr(error, "strerror", None) or error), 100)
        raise UserError(f"{path}: cannot be read ({reason}), expected {expected}") from error


@contextmanager
def decompressed(path: Path, expected: str = "an intact file") -> Iterator[BufferedReader]:
    """Open a file that may be gzipped; raise errors as `reading` does, or for a bomb."""
    with reading(path, expected), path.open("rb") as file:
        # Check the content, not the name: browsers and mirrors unpack .gz files but keep the name.
        is_gzip = file.peek(2).startswith(b"\x1f\x8b")
        yield bounded(gzip.GzipFile(fileobj=file), path) if is_gzip else file


def read_arrays(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> list[Tensor]:
    """Read integer arrays from an .npz file, in the order of `shapes`; None matches any length.

    uint8 stays uint8; other types become int64. Pickles are never loaded. An array that is missing
    or does not match `shapes` raises a UserError.
    """
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in shapes if name not in archive]
            arrays = [] if missing else [np.asarray(archive[name]) for name in shapes]
    except UserError:
        raise
    except Exception as error:  # numpy, zipfile, zlib and tokenize raise different types
        reason = textwrap.shorten(str(error), 100)
        raise UserError(f"{path}: cannot be read as .npz ({reason})") from error
    if missing:
        raise UserError(f"{path}: no array {', '.join(missing)}, expected {', '.join(shapes)}")
    for (name, shape), array in zip(shapes.items(), arrays, strict=True):
        sizes = zip(shape, array.shape, strict=False)
        fits = array.ndim == len(shape) and all(want in (None, have) for want, have in sizes)
        if not (fits and array.size and array.dtype.kind in "iu"):
            wanted = " x ".join("n" if want is None else str(want) for want in shape)
            found = f"{array.dtype} of shape {array.shape}"
            raise UserError(f"{path}: {name} must be whole numbers, {wanted}, got {found}")
    # torch supports neither other unsigned types nor non-native byte order well.
    native = [array if array.dtype == np.uint8 else array.astype(np.int64) for array in arrays]
    return [torch.from_numpy(array) for array in native]


def read_table(path: Path, n_columns: int) -> Tensor:
    """Read numbers separated by blanks or commas, one row per line: [n, n_columns] float32."""
    try:
        with reading(path):
            check_memory(str(path), 2 * path.stat().st_size)
            lines = path.read_text("utf-8").replace(",", " ").splitlines()
        rows = [np.array(line.split(), dtype=np.float32) for line in lines if line.strip()]
    except ValueError as error:
        raise UserError(f"{path}: not a table of numbers ({error})") from error
    wrong = next((i for i, row in enumerate(rows) if len(row) != n_columns), None)
    if not rows or wrong is not None:
        found = "no rows" if not rows else f"{len(rows[wrong or 0])} in row {(wrong or 0) + 1}"
        raise UserError(f"{path}: {found}, expected {n_columns} numbers in each row")
    table = torch.from_numpy(np.stack(rows))
    if not table.isfinite().all():
        raise UserError(f"{path}: holds numbers that are not finite")
    return table


@dataclass(frozen=True)
class IdxFile:
    """One idx file of a data set and its hashes."""

    name: str  # without .gz
    sha256: str  # of the decompressed bytes
    md5: str  # of the .gz on the mirrors; `-` if there is no download


def idx_files(dataset: str) -> tuple[IdxFile, ...]:
    """Return the train images, train labels, test images and test labels in idx_files.txt."""
    rows = [line.split() for line in _lines(ASSETS / "idx_files.txt") if f" {dataset}/" in line]
    return tuple(IdxFile(path.split("/")[1], sha256, md5) for sha256, md5, path in rows)


def read_idx(path: Path, n_dims: int, sha256: str | None = None) -> Tensor:
    """Read a uint8 array of `n_dims` dimensions from an idx file, plain or gzipped.

    Format: two zero bytes, the element type, the number of dimensions, each dimension as a
    big-endian uint32, the elements. Any other content or size, or another `sha256`, raises a
    UserError.
    """
    header = 4 * (1 + n_dims)
    magic = UINT8 << 8 | n_dims
    with decompressed(path) as file:
        data = bytearray(file.read(header))  # torch.frombuffer needs a writable buffer
        size = _idx_size(data, header, magic)
        data += file.read(size + 1 - header) if size is not None else b""
    if len(data) < header:
        raise UserError(f"{path}: {len(data)} bytes, too short for an idx header of {header} bytes")
    found, *shape = struct.unpack_from(f">{1 + n_dims}I", data)
    if found != magic:
        raise UserError(
            f"{path}: magic number 0x{found:08x}, expected 0x{magic:08x} "
            f"(idx, unsigned bytes, {n_dims} dimensions)"
        )
    dims = " x ".join(map(str, shape))
    if 0 in shape:
        raise UserError(f"{path}: no elements ({dims}), expected at least one")
    if size is None:
        raise UserError(f"{path}: {dims} elements, more than the {LARGEST} bytes of any such file")
    if len(data) != size:
        more = " or more" * (len(data) > size)
        raise UserError(
            f"{path}: {len(data)} bytes{more}, expected {header + math.prod(shape)} "
            f"(a header of {header} and {dims} elements)"
        )
    if sha256 is not None:
        _check_hash(path, data, sha256)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(shape)


def _idx_size(data: bytearray, header: int, magic: int) -> int | None:
    """Return the bytes of an idx file by its header; None if that is damaged or too large."""
    if len(data) < header or int.from_bytes(data[:4]) != magic:
        return None
    size = header + math.prod(struct.unpack_from(f">{header // 4 - 1}I", data, 4))
    return size if size <= LARGEST else None


def _check_hash(path: Path, data: bytearray, sha256: str) -> None:
    if (digest := hashlib.sha256(data).hexdigest()) != sha256:
        raise UserError(
            f"{path}: SHA-256 of the decompressed bytes is {digest}, expected {sha256}; "
            "replace the file, its content differs from the published data"
        )


def _lines(path: Path) -> list[str]:
    """Return the lines of a hash table, without comments."""
    lines = path.read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def read_split(
    images: Path, labels: Path, n_classes: int, sha256: tuple[str | None, str | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Read images [n, 1, height, width] uint8 and labels [n] int64 from one idx file each."""
    x = read_idx(images, 3, sha256[0]).unsqueeze(1)
    y = read_idx(labels, 1, sha256[1]).long()
    if len(x) != len(y):
        raise UserError(f"{labels}: {len(y)} labels, expected {len(x)}, one per image in {images}")
    if (top := int(y.max())) >= n_classes:
        raise UserError(f"{labels}: label {top}, expected 0 to {n_classes - 1}")
    return x, y


def read_cifar(path: Path) -> tuple[Tensor, Tensor]:
    """Read images [n, 3, 32, 32] uint8 and labels [n] int64 from a CIFAR-10 binary file.

    A record is one label byte and 32 x 32 bytes each of red, green and blue. The SHA-256 must match
    the entry for this file name in assets/cifar10.txt.
    """
    record = 1 + 3 * 32 * 32
    with decompressed(path) as file:
        data = bytearray(file.read(LARGEST_CIFAR * record + 1))
    if not data or len(data) % record:
        raise UserError(
            f"{path}: {len(data)} bytes, expected up to {LARGEST_CIFAR} records of {record} bytes"
        )
    hashes = {name: sha256 for sha256, name in map(str.split, _lines(ASSETS / "cifar10.txt"))}
    _check_hash(path, data, hashes[path.name.removesuffix(".gz")])
    rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, record)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def find_files(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files `names` in `folder`, plain or .gz, and the names not found."""
    found, missing = [], []
    for name in names:
        # Not Path.is_file: it raises if the folder is not readable.
        paths = [p for p in (folder / name, folder / f"{name}.gz") if os.path.isfile(p)]
        found += paths[:1]
        missing += [] if paths else [name]
    return found, missing


def download(dataset: str, hashes: Mapping[str, str], mirrors: Sequence[str]) -> list[Path]:
    """Download files to the user's cache, each from the first mirror that serves it intact.

    `hashes` maps file names to MD5s. Files with the right MD5 are not downloaded again. Files are
    written atomically. If no mirror serves a file, raise a ConnectionError with every reason.
    """
    import pooch  # type: ignore[import-untyped]  # takes 0.1 s and most runs need no download

    def fetch(name: str, md5: str) -> Path:
        reasons = []
        for mirror in mirrors:
            try:
                return Path(
                    pooch.retrieve(mirror + name, f"md5:{md5}", name, cache, downloader=http)
                )
            except (OSError, ValueError) as error:  # network or disk; wrong hash
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
                reasons.append(f"{mirror}: {reason}")
        raise ConnectionError("; ".join(reasons))

    http = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=20)
    cache = cache_folder(dataset)
    return [fetch(name, md5) for name, md5 in hashes.items()]


def cache_folder(dataset: str) -> Path:
    """Return the folder that keeps a data set's downloads and prepared files between runs."""
    import pooch

    return Path(pooch.os_cache("fedbench")) / dataset


def unpack(archive: Path, names: Sequence[str]) -> list[Path]:
    """Extract files by name from a tar archive into its folder, each atomically."""
    paths = [archive.parent / name for name in names]
    with tarfile.open(archive) as tar:
        inside = {Path(member.name).name: member for member in tar if member.isfile()}
        for path in paths:
            content = tar.extractfile(inside[path.name])
            assert content is not None  # members are regular files
            write_atomically(path, partial(shutil.copyfileobj, content))
    return paths
