"""southwest: images read from a file, and errors for every kind of bad file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbench.attack import BackdoorAttack, Poisoning
from fedbench.backdoor import BackdoorContext, BackdoorSamples
from fedbench.backdoors.southwest import Southwest
from fedbench.data import Images, Spec
from fedbench.datasets.files import local_file
from fedbench.errors import UserError
from fedbench.testing import check_backdoor
from fedbench.testing.samples import images as example_images

CIFAR10 = Spec("cifar10", (3, 32, 32), 10)
TRUCK = 9


def context() -> BackdoorContext:
    x, y = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)
    data = Images("cifar10", x, y, x, y, n_classes=10, mean=0.5, std=0.25)
    return BackdoorContext(data, malicious_samples=torch.arange(4), features=lambda x: x)


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def prepared(path: Path, **arrays: Any) -> BackdoorSamples:
    """Prepare the backdoor from a file with these arrays."""
    np.savez(path, **arrays)
    return Southwest(file=str(path)).prepare(context())


def error_of(path: Path) -> str:
    """Return the error for this file: one line that names it."""
    with pytest.raises((UserError, ValueError)) as caught:
        Southwest(file=str(path)).prepare(context())
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(path) in text
    return text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "planes.npz"


def test_by_hand(path: Path) -> None:
    # One image, black except for (red, green, blue) = (10, 20, 30) in row 1, column 2.
    image = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    image[0, 1, 2] = 10, 20, 30
    ready = prepared(path, train=image, test=image)
    assert ready.x_train[0, :, 1, 2].tolist() == [10, 20, 30]
    assert ready.x_train.count_nonzero() == 3
    assert ready.y_train.tolist() == [TRUCK]


def test_all_pixels_are_preserved(path: Path) -> None:
    train, test = images(5, seed=0), images(3, seed=1)
    ready = prepared(path, train=train, test=test, other=np.zeros(2))
    for got, want in ((ready.x_train, train), (ready.x_test, test)):
        assert got.dtype == torch.uint8
        assert got.is_contiguous()
        for channel in range(3):
            assert np.array_equal(got[:, channel].numpy(), want[..., channel])
    assert ready.y_train.tolist() == [TRUCK] * 5
    evaluation = ready.evaluation_set(torch.zeros(1), torch.zeros(1))
    assert evaluation.x is ready.x_test
    assert evaluation.expected.tolist() == [TRUCK] * 3


def test_planes_replace_samples(path: Path) -> None:
    ready = prepared(path, train=images(3, seed=0), test=images(1, seed=1))
    x, y = torch.zeros(10, 3, 32, 32, dtype=torch.uint8), torch.zeros(10, dtype=torch.long)
    poisoning = Poisoning(0, [ready], pdr=0.4, n_classes=10, rng=torch.Generator())
    poisoned, labels = BackdoorAttack().poison(x, y, poisoning)
    assert poisoned.dtype == torch.uint8
    changed = poisoned.ne(0).flatten(1).any(dim=1)
    assert changed.sum() == 4
    assert labels[changed].tolist() == [TRUCK] * 4
    assert labels[~changed].tolist() == [0] * 6
    assert len(poisoned[changed].unique(dim=0)) == 3  # 4 draws of 3 planes


@pytest.mark.parametrize("dtype", ["int64", "uint16", "int8"])
def test_other_integer_types_are_refused_or_converted(path: Path, dtype: str) -> None:
    train = (images(2, seed=0) // 2).astype(dtype)
    np.savez(path, train=train, test=train)
    try:
        ready = Southwest(file=str(path)).prepare(context())
    except (UserError, ValueError):
        error_of(path)
        return
    assert ready.x_train.dtype == ready.x_test.dtype == torch.uint8
    assert np.array_equal(ready.x_train.permute(0, 2, 3, 1).numpy(), train)


@pytest.mark.parametrize("value", [256, 300, -1, 2**40])
@pytest.mark.parametrize("name", ["train", "test"])
def test_values_outside_0_to_255_are_an_error(path: Path, name: str, value: int) -> None:
    arrays = {part: images(2, seed=0).astype(np.int64) for part in ("train", "test")}
    arrays[name][1, 5, 6, 2] = value
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert name in error_of(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": images(2, 0)}, "no array test, expected train, test"),
        ({"test": images(2, 0)}, "no array train, expected train, test"),
        ({}, "no array train, test"),
        (
            {"train": images(2, 0).transpose(0, 3, 1, 2), "test": images(2, 0)},
            "train must be whole numbers, n x 32 x 32 x 3, got uint8 of shape (2, 3, 32, 32)",
        ),
        (
            {"train": images(2, 0), "test": images(2, 0)[..., :1]},
            "test must be whole numbers, n x 32 x 32 x 3, got uint8 of shape (2, 32, 32, 1)",
        ),
        ({"train": images(2, 0)[0], "test": images(2, 0)}, "got uint8 of shape (32, 32, 3)"),
        ({"train": images(2, 0), "test": images(2, 0)[None]}, "shape (1, 2, 32, 32, 3)"),
        ({"train": images(0, 0), "test": images(2, 0)}, "got uint8 of shape (0, 32, 32, 3)"),
        (
            {"train": images(2, 0) / 255, "test": images(2, 0)},
            "train must be whole numbers, n x 32 x 32 x 3, got float64",
        ),
        ({"train": images(2, 0), "test": images(2, 0) > 9}, "test must be whole numbers"),
        (
            {"train": images(2, 0), "test": images(2, 0).astype(object)},
            "cannot be read as .npz (Object arrays cannot be loaded when allow_pickle=False)",
        ),
    ],
    ids=[
        "no test",
        "no train",
        "no arrays",
        "channels first",
        "grey",
        "one image",
        "a dimension more",
        "no images",
        "floats",
        "booleans",
        "pickled objects",
    ],
)
def test_wrong_arrays_are_an_error(path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(path, **arrays)
    assert message in error_of(path)


def npy_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zip_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<!DOCTYPE html><html>",
        images(1, 0).dumps(),  # a pickle, the authors' format
        zip_of(train=npy_bytes(images(1, 0))[:-1], test=npy_bytes(images(1, 0))),
        zip_of(train=npy_bytes(images(1, 0)), test=npy_bytes(images(1, 0)))[:-30],
    ],
    ids=["empty", "html", "pickle", "truncated array", "truncated"],
)
def test_other_files_are_an_error(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert "cannot be read as .npz" in error_of(path)


def test_check_refuses_a_missing_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    message = f"^{path}: no such file or folder, expected southwest.npz$"
    with pytest.raises(UserError, match=message):
        Southwest(file=str(path)).check(CIFAR10)
    with pytest.raises(UserError, match=r"^southwest\.npz is not on this machine: put it into "):
        Southwest().check(CIFAR10)
    with pytest.raises(UserError, match=r"southwest\.npz is not on this machine"):
        Southwest().prepare(context())


def test_the_file_is_found_in_fedbench_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    np.savez(tmp_path / "southwest.npz", train=images(2, 0), test=images(1, 1))
    Southwest().check(CIFAR10)
    assert len(Southwest().prepare(context()).x_train) == 2


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (32, 32, 3), (64,)])
def test_samples_of_another_shape_are_refused(path: Path, shape: tuple[int, ...]) -> None:
    path.touch()
    with pytest.raises(ValueError, match=r"have shape \(3, 32, 32\), but samples of made have \("):
        Southwest(file=str(path)).check(Spec("made", shape, 10))


@pytest.mark.parametrize("target", [-1, 10])
def test_a_target_out_of_range_is_refused(path: Path, target: int) -> None:
    path.touch()
    with pytest.raises(ValueError, match=rf"target must be a class 0\.\.9, got {target}"):
        Southwest(file=str(path), target=target).check(CIFAR10)


def test_the_published_file() -> None:
    try:
        path = local_file(None, "southwest.npz")
    except UserError:
        pytest.skip("southwest.npz is not on this machine; FEDBENCH_DATA may name its folder")
    Southwest().check(CIFAR10)
    ready = Southwest().prepare(context())
    assert ready.x_train.shape == (784, 3, 32, 32)
    assert ready.x_test.shape == (196, 3, 32, 32)
    with np.load(path) as archive:
        for name, x in (("train", ready.x_train), ("test", ready.x_test)):
            assert np.array_equal(x.numpy().transpose(0, 2, 3, 1), archive[name])


def test_the_class_of_the_planes_cannot_be_the_target(tmp_path: Path) -> None:
    path = tmp_path / "southwest.npz"
    np.savez(path, train=images(2, 0), test=images(2, 1))
    with pytest.raises(ValueError, match="images are of class 0, which is the target"):
        Southwest(target=0, file=str(path)).check(Spec("cifar10", (3, 32, 32), 10))
    Southwest(target=0, file=str(path)).check(Spec("other", (3, 32, 32), 10))


def test_contract(path: Path) -> None:
    np.savez(path, train=images(5, 0), test=images(3, 1))
    check_backdoor(Southwest(file=str(path)), [example_images(3, 32, 32)])
