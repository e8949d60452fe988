"""Files of data sets: where they are, how they are read, what proves that they are whole.

Bytes are checked against a SHA-256 taken after decompression, since packagers compress them anew.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import struct
import sys
import tarfile
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.errors import UserError
from fedbench.results.storage import write_atomically

ASSETS = Path(__file__).parent.parent / "assets"
UINT8 = 0x08  # the idx code of the only element type these sets use


def data_folders(name: str) -> Iterator[Path]:
    """Where a file or folder `name` is looked for: $FEDBENCH_DATA/<name>, then ./data/<name>."""
    shared = os.environ.get("FEDBENCH_DATA")
    for place in filter(None, (shared, "data")):
        yield Path(place).expanduser() / name


def local_file(given: str | None, usual: str) -> Path:
    """The file or folder `given`, or the `usual` one where data is looked for; a UserError."""
    if given is not None:
        path = Path(os.path.expanduser(given))  # which leaves ~nobody alone
        if not path.exists():
            raise UserError(f"{path}: no such file or folder, expected {usual}")
        return path
    for path in data_folders(usual):
        if path.exists():
            return path
    raise UserError(
        f"{usual} is not on this machine: put it into {Path('data').absolute()}, or say where it is"
    )


def read_arrays(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> list[Tensor]:
    """Whole numbers from the arrays of an .npz, in the order of `shapes`; None fits any length.

    uint8 stays as it is, other types become int64. No pickle is ever read. Anything else than what
    `shapes` says is a UserError.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in shapes if name not in archive]
            arrays = [] if missing else [archive[name] for name in shapes]
    except Exception as error:  # numpy, zipfile, zlib and tokenize each have their own
        reason = textwrap.shorten(str(error), 100)
        raise UserError(f"{path}: cannot be read as .npz ({reason})") from error
    if missing:
        raise UserError(f"{path}: no array {', '.join(missing)}, expected {', '.join(shapes)}")
    for (name, shape), array in zip(shapes.items(), arrays, strict=True):
        if not _fits(array, shape):
            wanted = " x ".join("n" if want is None else str(want) for want in shape)
            is_array = isinstance(array, np.ndarray)
            found = f"{array.dtype} of shape {array.shape}" if is_array else "no array"
            raise UserError(f"{path}: {name} must be whole numbers, {wanted}, got {found}")
    # torch cannot do much with other unsigned types, nor with the other order of bytes.
    native = [array if array.dtype == np.uint8 else array.astype(np.int64) for array in arrays]
    return [torch.from_numpy(array) for array in native]


def _fits(array: Any, shape: tuple[int | None, ...]) -> bool:
    """Whether it is a filled array of whole numbers of the shape."""
    if not isinstance(array, np.ndarray) or array.ndim != len(shape):
        return False
    alike = all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    return alike and array.size > 0 and array.dtype.kind in "iu"


def read_table(path: Path, n_columns: int) -> Tensor:
    """Numbers separated by blanks or commas, a row a line: [n, n_columns] float32."""
    try:
        text = path.read_text("utf-8").replace(",", " ")
        rows = [
            np.array(line.split(), dtype=np.float32) for line in text.splitlines() if line.strip()
        ]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a file") from error
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
    """One file of a data set, and what proves that it is the right one."""

    name: str  # without .gz
    sha256: str  # of the decompressed bytes
    md5: str  # of the .gz on the mirrors; - if it is not for download


def idx_files(dataset: str) -> tuple[IdxFile, ...]:
    """Train images, train labels, test images and test labels, as assets/idx_files.txt has them."""
    rows = [line.split() for line in _lines(ASSETS / "idx_files.txt") if f" {dataset}/" in line]
    return tuple(IdxFile(path.split("/")[1], sha256, md5) for sha256, md5, path in rows)


def read_idx(path: Path, n_dims: int, sha256: str | None = None) -> Tensor:
    """The uint8 array of `n_dims` dimensions in the idx file `path`, plain or gzipped.

    The format: two zero bytes, the element type, the number of dimensions, each dimension as a
    big-endian uint32, the elements. Anything else, a byte too few or too many, or bytes of another
    `sha256`, is a UserError.
    """
    data = _read_bytes(path)
    header = 4 * (1 + n_dims)
    magic = UINT8 << 8 | n_dims
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
        raise UserError(f"{path}: the header says {dims}, expected at least one element")
    if len(data) != header + math.prod(shape):
        raise UserError(
            f"{path}: {len(data)} bytes, expected {header + math.prod(shape)} "
            f"(a header of {header} and {dims} elements)"
        )
    if sha256 is not None:
        _check_hash(path, data, sha256)
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(shape)


def _check_hash(path: Path, data: bytearray, sha256: str) -> None:
    if (digest := hashlib.sha256(data).hexdigest()) != sha256:
        raise UserError(
            f"{path}: SHA-256 of the decompressed bytes is {digest}, expected {sha256}; "
            "replace the file, its content is not the published one"
        )


def _lines(path: Path) -> list[str]:
    """The lines of a table of hashes, without its comments."""
    lines = path.read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _read_bytes(path: Path) -> bytearray:
    try:
        data = path.read_bytes()
        # Told by content and not by name: browsers and mirrors unpack .gz files and keep the name.
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except EOFError as error:
        raise UserError(
            f"{path}: gzip data cut off after {len(data)} bytes, expected all"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip data ({error}), expected an intact file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a file") from error
    return bytearray(data)  # writable, as torch.frombuffer wants it


def read_split(
    images: Path, labels: Path, n_classes: int, sha256: tuple[str | None, str | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Images [n, 1, height, width] uint8 and their labels [n] int64, from one idx file each."""
    x = read_idx(images, 3, sha256[0]).unsqueeze(1)
    y = read_idx(labels, 1, sha256[1]).long()
    if len(x) != len(y):
        raise UserError(f"{labels}: {len(y)} labels, expected {len(x)}, one an image of {images}")
    if (top := int(y.max())) >= n_classes:
        raise UserError(f"{labels}: label {top}, expected 0 to {n_classes - 1}")
    return x, y


def read_cifar(path: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] uint8 and labels [n] int64 from a file of CIFAR-10's binary version.

    A record is a byte of label and 32 x 32 bytes each of red, green and blue. Bytes of another
    SHA-256 than assets/cifar10.txt has for the file's name are a UserError.
    """
    data = _read_bytes(path)
    record = 1 + 3 * 32 * 32
    if not data or len(data) % record:
        raise UserError(f"{path}: {len(data)} bytes, expected records of {record} bytes")
    hashes = {name: sha256 for sha256, name in map(str.split, _lines(ASSETS / "cifar10.txt"))}
    _check_hash(path, data, hashes[path.name.removesuffix(".gz")])
    rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, record)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def find_files(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files `names` in `folder`, as they are or with .gz, and the names not found."""
    found, missing = [], []
    for name in names:
        # os.path, since Path.is_file raises in a folder that may not be read.
        paths = [p for p in (folder / name, folder / f"{name}.gz") if os.path.isfile(p)]
        found += paths[:1]
        missing += [] if paths else [name]
    return found, missing


def download(dataset: str, hashes: Mapping[str, str], mirrors: Sequence[str]) -> list[Path]:
    """Files in the user's cache, each fetched from the first mirror that has it intact.

    `hashes` are their names and MD5s. What is there with the right MD5 is not fetched again; what
    is fetched appears whole or not at all. ConnectionError, with every mirror's reason, if none of
    them serves a file.
    """
    import pooch  # type: ignore[import-untyped]  # takes 0.1 s, and most runs have their data

    def fetch(name: str, md5: str) -> Path:
        reasons = []
        for mirror in mirrors:
            try:
                return Path(
                    pooch.retrieve(mirror + name, f"md5:{md5}", name, cache, downloader=http)
                )
            except (OSError, ValueError) as error:  # the network or the disk; a wrong hash
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
                reasons.append(f"{mirror}: {reason}")
        raise ConnectionError("; ".join(reasons))

    http = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=20)
    cache = cache_folder(dataset)
    return [fetch(name, md5) for name, md5 in hashes.items()]


def cache_folder(dataset: str) -> Path:
    """Where what is downloaded or prepared for a data set is kept between runs."""
    import pooch

    return Path(pooch.os_cache("fedbench")) / dataset


def unpack(archive: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names in a tar archive, next to it; each is whole or not there."""
    paths = [archive.parent / name for name in names]
    with tarfile.open(archive) as tar:
        inside = {Path(member.name).name: member for member in tar if member.isfile()}
        for path in paths:
            content = tar.extractfile(inside[path.name])
            assert content is not None  # it is a file
            write_atomically(path, partial(shutil.copyfileobj, content))
    return paths
