"""fedbench.datasets.files: arrays, tables, CIFAR-10 records; bad input gives a one-line error."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbench.datasets.files import (
    ASSETS,
    data_folders,
    local_file,
    read_arrays,
    read_cifar,
    read_table,
)
from fedbench.errors import UserError

TWO = {"train": (None, 3), "test": (None, 3)}
RECORD = 1 + 3 * 32 * 32


def message(call: Callable[..., Any], path: Path, *args: Any) -> str:
    """Return the message of the UserError: one line that names the file."""
    with pytest.raises(UserError) as caught:
        call(path, *args)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(path) in text
    return text


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    return tmp_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arrays.npz"


def test_the_shared_folder_comes_before_the_local_one(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*data_folders("made")] == [Path("data/made")]
    monkeypatch.setenv("FEDBENCH_DATA", "")
    assert [*data_folders("made")] == [Path("data/made")]
    monkeypatch.setenv("FEDBENCH_DATA", "/shared/sets")
    assert [*data_folders("made")] == [Path("/shared/sets/made"), Path("data/made")]
    monkeypatch.setenv("HOME", str(alone))
    monkeypatch.setenv("USERPROFILE", str(alone))
    monkeypatch.setenv("FEDBENCH_DATA", "~/sets")
    assert [*data_folders("made")] == [alone / "sets" / "made", Path("data/made")]


def test_a_given_path_is_the_only_candidate(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/usual.npz", "other.npz"):
        (alone / name).parent.mkdir(exist_ok=True)
        (alone / name).touch()
    assert local_file("other.npz", "usual.npz") == Path("other.npz")
    error = f"^{alone}/none: no such file or folder, expected usual.npz$"
    with pytest.raises(UserError, match=error):
        local_file(str(alone / "none"), "usual.npz")
    monkeypatch.setenv("HOME", str(alone))
    monkeypatch.setenv("USERPROFILE", str(alone))
    assert local_file("~/other.npz", "usual.npz") == alone / "other.npz"


def test_the_default_file_is_found_in_the_data_folders(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", str(alone / "shared"))
    with pytest.raises(UserError) as caught:
        local_file(None, "usual")
    error = f"usual is not on this machine: put it into {alone / 'data'}, or set its path"
    assert str(caught.value) == error
    (alone / "data" / "usual").mkdir(parents=True)  # a folder is fine too
    assert local_file(None, "usual") == Path("data/usual")
    (alone / "shared").mkdir()
    (alone / "shared" / "usual").touch()
    assert local_file(None, "usual") == alone / "shared" / "usual"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.sampled_from(["uint8", "int8", "int16", "int32", "int64"]).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=4, max_side=4))
    ),
    st.booleans(),
    st.booleans(),
)
def test_read_arrays_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, packed: bool, fortran: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.npz"
    stored = np.asfortranarray(array) if fortran else array
    (np.savez_compressed if packed else np.savez)(path, first=stored, second=stored[:1])
    exact, free = array.shape, (None,) * array.ndim
    second, first = read_arrays(path, {"second": free, "first": exact})
    assert first.numpy().dtype == (array.dtype if array.dtype == np.uint8 else np.int64)
    assert np.array_equal(first.numpy(), array)
    assert np.array_equal(second.numpy(), array[:1])


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def headed(header: str, data: bytes = bytes(3)) -> bytes:
    """An .npy file with a custom header."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zip_of(train: bytes, test: bytes | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.npy", train)
        archive.writestr("test.npy", npy(GOOD) if test is None else test)
    return file.getvalue()


def method_of(data: bytes, method: int) -> bytes:
    """A zip whose first member claims another compression method."""
    at = data.index(b"PK\x01\x02") + 10
    return data[:at] + struct.pack("<H", method) + data[at + 2 :]


def flagged(data: bytes, flag: int) -> bytes:
    """A zip whose first member has a flag set; 1 means encrypted."""
    at = data.index(b"PK\x01\x02") + 8
    return data[:at] + struct.pack("<H", flag) + data[at + 2 :]


GOOD = np.array([[1, 2, 3]], dtype=np.uint8)
LIKE_GOOD = "{'descr': '|u1', 'fortran_order': False, 'shape': "

NO_ARCHIVES = {
    "empty": b"",
    "a page": b"<!DOCTYPE html><html>",
    "a pickle": pickle.dumps({"train": GOOD, "test": GOOD}),
    "gzip": gzip.compress(npy(GOOD)),
    "an end alone": b"PK\x05\x06" + bytes(10),
    "an array without its header": zip_of(npy(GOOD)[:9]),
    "an array cut off": zip_of(npy(GOOD)[:-1]),
    "a negative shape": zip_of(headed(LIKE_GOOD + "(-1, 3), }")),
    "no type": zip_of(headed("{'descr': 'zz', 'fortran_order': False, 'shape': (1, 3), }")),
    "objects": zip_of(npy(np.array([[None, 1, 2]], dtype=object))),
    "an unknown version": zip_of(b"\x93NUMPY\x09\x09" + npy(GOOD)[8:]),
    "one array": npy(GOOD),
    "a member that is no array": zip_of(b"hello"),
    "an empty member": zip_of(b""),
    "a header cut off": zip_of(headed(LIKE_GOOD + "(1, 3)")),
    "an endless shape": zip_of(headed(LIKE_GOOD + f"({10**18}, 3), }}")),
    "an unknown packing": method_of(zip_of(npy(GOOD)), 99),
    "a password": flagged(zip_of(npy(GOOD)), 1),
}


@pytest.mark.parametrize("data", NO_ARCHIVES.values(), ids=NO_ARCHIVES)
def test_other_content_than_arrays_is_an_error(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    message(read_arrays, path, TWO)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", ">i4", ">u2"])
def test_unusual_integer_types_are_read(path: Path, dtype: str) -> None:
    np.savez(path, train=GOOD.astype(dtype), test=GOOD)
    train, _ = read_arrays(path, TWO)
    assert train.tolist() == GOOD.tolist()


def test_an_archive_truncated_anywhere_is_an_error(path: Path) -> None:
    data = zip_of(npy(GOOD))
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert "cannot be read as .npz" in message(read_arrays, path, TWO)


def test_every_changed_byte_is_an_error_or_harmless(path: Path) -> None:
    """Timestamps and permissions in a zip carry no content."""
    data = zip_of(npy(GOOD))
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            arrays = read_arrays(path, TWO)
        except UserError:
            message(read_arrays, path, TWO)
            continue
        assert [array.tolist() for array in arrays] == [GOOD.tolist()] * 2


@pytest.mark.parametrize(
    ("train", "found"),
    [
        (GOOD[0], "uint8 of shape (3,)"),
        (GOOD[None], "uint8 of shape (1, 1, 3)"),
        (GOOD[:, :2], "uint8 of shape (1, 2)"),
        (GOOD[:0], "uint8 of shape (0, 3)"),
        (np.array(7), "int64 of shape ()"),
        (GOOD / 2, "float64 of shape (1, 3)"),
        (GOOD > 1, "bool of shape (1, 3)"),
        (GOOD + 1j, "complex128 of shape (1, 3)"),
        (GOOD.astype("U1"), "<U1 of shape (1, 3)"),
        (GOOD.astype("m8[s]"), "timedelta64[s] of shape (1, 3)"),
    ],
)
def test_arrays_of_other_shapes_are_errors(path: Path, train: np.ndarray, found: str) -> None:
    np.savez(path, train=train, test=GOOD)
    error = f"{path}: train must be whole numbers, n x 3, got {found}"
    assert message(read_arrays, path, TWO) == error
    np.savez(path, train=GOOD, test=train)
    assert message(read_arrays, path, TWO) == error.replace("train must", "test must")


def test_missing_arrays_are_errors(path: Path) -> None:
    np.savez(path, test=GOOD, other=GOOD)
    assert message(read_arrays, path, TWO) == f"{path}: no array train, expected train, test"
    np.savez(path)
    assert message(read_arrays, path, TWO) == f"{path}: no array train, test, expected train, test"


def test_a_missing_archive_and_a_folder_are_errors(tmp_path: Path) -> None:
    assert "No such file" in message(read_arrays, tmp_path / "none.npz", TWO)
    assert "Is a directory" in message(read_arrays, tmp_path, TWO)


def test_pickles_are_never_loaded(path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (path.with_suffix(".harm").touch, ())

    for data in (
        pickle.dumps(Harmful()),
        zip_of(npy(np.array([Harmful()], dtype=object))),
    ):
        path.write_bytes(data)
        message(read_arrays, path, TWO)
        assert not path.with_suffix(".harm").exists()


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=finite),
    st.sampled_from([" ", "  ", "\t", ",", ", ", " , "]),
    st.sampled_from(["\n", "\r\n", "\n\n", " \n"]),
    st.booleans(),
)
def test_read_table_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    table: np.ndarray,
    separator: str,
    end: str,
    ended: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "table.csv"
    text = end.join(separator.join(map(repr, row)) for row in table.tolist())
    path.write_bytes((text + end * ended).encode())
    got = read_table(path, table.shape[1])
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), table)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "no rows, expected 2 numbers in each row"),
        (b" \n\n", "no rows, expected 2 numbers in each row"),
        (b"1 2\n3", "1 in row 2, expected 2 numbers in each row"),
        (b"1 2 3\n4 5\n", "3 in row 1, expected 2 numbers in each row"),
        (b"1 2\n3 4\n5 6 7 8\n", "4 in row 3, expected 2 numbers in each row"),
        (b"1 2\nthree 4\n", "not a table of numbers (could not convert string to float: 'three')"),
        (b"1;2\n", "not a table of numbers"),
        (b"0x1 2\n", "not a table of numbers"),
        (b"1 2j\n", "not a table of numbers"),
        (b"1 \x002\n", "not a table of numbers"),
        (b"\x89PNG\r\n\x1a\n", "not a table of numbers"),
        (gzip.compress(b"1 2\n", mtime=0), "not a table of numbers"),
        (b"1 nan\n", "holds numbers that are not finite"),
        (b"1 2\n-inf 4\n", "holds numbers that are not finite"),
        (b"1 1e39\n", "holds numbers that are not finite"),
        (b"1 1e999\n", "holds numbers that are not finite"),
    ],
)
def test_other_content_than_a_table_is_an_error(tmp_path: Path, data: bytes, error: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(data)
    assert message(read_table, path, 2).startswith(f"{path}: {error}")


def test_a_missing_table_and_a_folder_are_errors(tmp_path: Path) -> None:
    assert "No such file" in message(read_table, tmp_path / "none.csv", 2)
    assert "Is a directory" in message(read_table, tmp_path, 2)


def records(n: int, seed: int = 0) -> bytes:
    """CIFAR-10 binary records with labels 0 to 9."""
    rows = np.random.default_rng(seed).integers(0, 256, (n, RECORD), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


@pytest.fixture
def publish(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes], None]:
    """Register the hash of some bytes as that of data_batch_1.bin."""
    assets = tmp_path_factory.mktemp("assets")
    monkeypatch.setattr("fedbench.datasets.files.ASSETS", assets)

    def publish(data: bytes) -> None:
        line = f"# a comment\n{hashlib.sha256(data).hexdigest()} data_batch_1.bin\n"
        (assets / "cifar10.txt").write_text(line)

    return publish


Publish = Callable[[bytes], None]


def test_a_cifar10_record_by_hand(tmp_path: Path, publish: Publish) -> None:
    # Label 6, then 1024 bytes each of red, green and blue by row: offset 35 is row 1, column 3.
    data = bytearray(RECORD)
    data[0] = 6
    data[1 + 35], data[1 + 1024 + 35], data[1 + 2048 + 35] = 10, 20, 30
    publish(bytes(data))
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    x, y = read_cifar(tmp_path / "data_batch_1.bin")
    assert y.tolist() == [6]
    assert y.dtype == torch.int64
    assert x.shape == (1, 3, 32, 32)
    assert x.dtype == torch.uint8
    assert x[0, :, 1, 3].tolist() == [10, 20, 30]
    assert x.count_nonzero() == 3


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_1.bin.gz"])
@pytest.mark.parametrize("zipped", [False, True])
def test_read_cifar_gives_back_what_was_written(
    tmp_path: Path, publish: Publish, name: str, zipped: bool
) -> None:
    data = records(5)
    publish(data)
    (tmp_path / name).write_bytes(gzip.compress(data) if zipped else data)
    x, y = read_cifar(tmp_path / name)
    rows = np.frombuffer(data, dtype=np.uint8).reshape(5, RECORD)
    assert y.tolist() == rows[:, 0].tolist()
    assert np.array_equal(x.flatten(1).numpy(), rows[:, 1:])


@pytest.mark.parametrize("length", [0, 1, RECORD - 1, RECORD + 1, 2 * RECORD - 1])
def test_truncated_records_are_errors(tmp_path: Path, publish: Publish, length: int) -> None:
    path, data = tmp_path / "data_batch_1.bin", records(2)
    publish(data)
    path.write_bytes(data[:length])
    error = f"{path}: {length} bytes, expected up to 10000 records of {RECORD} bytes"
    assert message(read_cifar, path) == error


def test_unpublished_records_are_errors(tmp_path: Path, publish: Publish) -> None:
    """One record less, one more, another pixel, another label."""
    path, data = tmp_path / "data_batch_1.bin", records(2)
    publish(data)
    wanted = hashlib.sha256(data).hexdigest()
    for other in (
        data[:RECORD],
        data + data[:RECORD],
        data[:-1] + bytes([data[-1] ^ 1]),
        bytes([data[0] ^ 1]) + data[1:],
    ):
        path.write_bytes(other)
        error = message(read_cifar, path)
        assert hashlib.sha256(other).hexdigest() in error
        assert f"expected {wanted}" in error


def test_a_missing_file_and_truncated_gzip_are_errors(tmp_path: Path, publish: Publish) -> None:
    path, data = tmp_path / "data_batch_1.bin", records(1)
    publish(data)
    assert "No such file" in message(read_cifar, path)
    path.write_bytes(gzip.compress(data)[:-9])
    assert "compressed data is truncated" in message(read_cifar, path)


def test_every_file_of_cifar10_has_its_hash() -> None:
    lines = (ASSETS / "cifar10.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    assert [name for _, name in rows] == [*batches, "test_batch.bin"]
    assert all(len(bytes.fromhex(sha256)) == 32 for sha256, _ in rows)
