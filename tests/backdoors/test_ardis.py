"""ardis: digits of one class from files in the published format; errors name the bad file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.backdoor import BACKDOORS, BackdoorContext
from fedbench.backdoors.ardis import Ardis
from fedbench.data import Images, Spec
from fedbench.errors import UserError
from fedbench.testing import check_backdoor
from fedbench.testing.samples import images as example_images

MNIST = Spec("mnist", (1, 28, 28), 10)
TRAIN = (7, 0, 7, 1, 7, 9)
TEST = (3, 7, 7)
NAMES = [f"ARDIS_{part}_{what}.csv" for part in ("train", "test") for what in ("2828", "labels")]


def context() -> BackdoorContext:
    x, y = torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.arange(4)
    data = Images("mnist", x, y, x, y, n_classes=10, mean=0.5, std=0.25)
    return BackdoorContext(data, malicious_samples=torch.arange(4), features=lambda x: x)


def pixels(digits: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (len(digits), 784))


def lines(rows: np.ndarray, form: str = "%d", separator: str = " ") -> str:
    return "".join(separator.join(form % value for value in row) + "\n" for row in rows)


def write(folder: Path, form: str = "%d", separator: str = " ") -> None:
    """Write the four files of a synthetic ARDIS with the digits TRAIN and TEST."""
    for seed, (part, digits) in enumerate((("train", TRAIN), ("test", TEST))):
        images, labels = pixels(digits, seed), np.eye(10)[list(digits)]
        (folder / f"ARDIS_{part}_2828.csv").write_text(lines(images, form, separator))
        (folder / f"ARDIS_{part}_labels.csv").write_text(lines(labels, form, separator))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def error_of(folder: Path, source: int = 7, target: int = 1) -> str:
    """Return the error for these files: one line that names them."""
    with pytest.raises((UserError, ValueError)) as caught:
        Ardis(source=source, target=target, folder=str(folder)).prepare(context())
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(folder) in text
    return text


def test_by_hand(tmp_path: Path) -> None:
    # Digits 1 and 7 with one bright pixel each; that of the 7, in row 1 and column 2, has index 30.
    image = np.zeros((2, 784))
    image[0, 0], image[1, 30] = 200, 100
    for part in ("train", "test"):
        (tmp_path / f"ARDIS_{part}_2828.csv").write_text(lines(image))
        (tmp_path / f"ARDIS_{part}_labels.csv").write_text(
            "0 1 0 0 0 0 0 0 0 0\n0 0 0 0 0 0 0 1 0 0\n"
        )
    ready = Ardis(folder=str(tmp_path)).prepare(context())
    assert ready.x_train.shape == (1, 1, 28, 28)
    assert ready.x_train[0, 0, 1, 2] == 100
    assert ready.x_train.count_nonzero() == 1
    assert ready.y_train.tolist() == [1]


@pytest.mark.parametrize("form", ["%d", "%.1f", "%.18e"])
@pytest.mark.parametrize("separator", [" ", "   ", "\t", ","])
def test_only_sevens_are_taken(tmp_path: Path, form: str, separator: str) -> None:
    write(tmp_path, form, separator)
    ready = Ardis(folder=str(tmp_path)).prepare(context())
    sets = ((ready.x_train, TRAIN), (ready.x_test, TEST))
    for seed, (x, digits) in enumerate(sets):
        sevens = [i for i, digit in enumerate(digits) if digit == 7]
        assert x.dtype == torch.uint8
        assert x.flatten(1).tolist() == pixels(digits, seed)[sevens].tolist()
    assert ready.y_train.tolist() == [1, 1, 1]
    evaluation = ready.evaluation_set(torch.zeros(1), torch.zeros(1))
    assert len(evaluation.x) == 2
    assert evaluation.expected.tolist() == [1, 1]


def test_another_digit_and_another_target(tmp_path: Path) -> None:
    write(tmp_path)
    for part, digits in (("train", TRAIN), ("test", (9, 9, 3))):
        text = lines(np.eye(10)[list(digits)])
        (tmp_path / f"ARDIS_{part}_labels.csv").write_text(text)
    ready = Ardis(source=9, target=4, folder=str(tmp_path)).prepare(context())
    assert ready.x_train.flatten(1).tolist() == pixels(TRAIN, 0)[[5]].tolist()
    assert ready.y_train.tolist() == [4]
    assert ready.y_test.tolist() == [4, 4]


def test_all_pixel_values_are_preserved(folder: Path) -> None:
    image = np.arange(784) % 256
    (folder / "ARDIS_train_2828.csv").write_text(lines(np.stack([image] * len(TRAIN))))
    ready = Ardis(folder=str(folder)).prepare(context())
    assert ready.x_train[0].flatten().tolist() == image.tolist()


@pytest.mark.parametrize(("value", "nearest"), [(256, 255), (300, 255), (1000, 255), (-1, 0)])
def test_values_outside_0_to_255_never_wrap_around(folder: Path, value: int, nearest: int) -> None:
    images = pixels(TRAIN, 0)
    images[0, 5] = value
    (folder / "ARDIS_train_2828.csv").write_text(lines(images))
    try:
        ready = Ardis(folder=str(folder)).prepare(context())
    except (UserError, ValueError):
        error_of(folder)
        return
    assert ready.x_train[0].flatten()[5] == nearest


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_an_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert (
        error_of(folder)
        == f"{folder / name}: cannot be read (No such file or directory), expected a file"
    )


def changed(text: str, row: int, column: int, value: str | None) -> str:
    """Replace one number of the table, or remove it if value is None."""
    rows = [line.split() for line in text.splitlines()]
    rows[row][column : column + 1] = [] if value is None else [value]
    return "".join(" ".join(line) + "\n" for line in rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "{short} in row 2, expected {n} numbers in each row"),
        ("1 1", "{long} in row 2, expected {n} numbers in each row"),
        ("seven", "not a table of numbers (could not convert string to float: 'seven')"),
        ("nan", "holds numbers that are not finite"),
        ("inf", "holds numbers that are not finite"),
        ("-inf", "holds numbers that are not finite"),
    ],
)
def test_a_malformed_line_is_an_error(
    folder: Path, name: str, value: str | None, message: str
) -> None:
    path = folder / name
    path.write_text(changed(path.read_text(), row=1, column=3, value=value))
    n = 784 if "2828" in name else 10
    assert error_of(folder) == f"{path}: {message.format(n=n, short=n - 1, long=n + 1)}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_an_error(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    n = 784 if "2828" in name else 10
    assert error_of(folder) == f"{folder / name}: no rows, expected {n} numbers in each row"


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("what", ["2828", "labels"])
@pytest.mark.parametrize("more", [True, False])
def test_images_and_labels_must_match_in_number(
    folder: Path, part: str, what: str, more: bool
) -> None:
    path = folder / f"ARDIS_{part}_{what}.csv"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows, rows[0]] if more else rows[:-1]))
    n, other = (len(rows) + 1, len(rows)) if more else (len(rows) - 1, len(rows))
    images, labels = (n, other) if what == "2828" else (other, n)
    assert f"got {images} {part} images and {labels} labels" in error_of(folder)


def test_a_missing_digit_is_an_error(folder: Path) -> None:
    assert "no train image has the label 5" in error_of(folder, source=5)
    assert "no test image has the label 0" in error_of(folder, source=0)


@pytest.mark.parametrize(
    "row", ["0 0 0 0 0 0 0 0 0 0", "1 0 0 0 0 0 0 1 0 0", "0 0 0 0 0 0 0 5 0 0"]
)
def test_a_line_that_is_not_one_hot_is_an_error(folder: Path, row: str) -> None:
    path = folder / "ARDIS_test_labels.csv"
    path.write_text(f"{row}\n1 0 0 0 0 0 0 0 0 0\n0 0 0 0 0 0 0 1 0 0\n")
    assert str(path) in error_of(folder, source=0)
    assert str(path) in error_of(folder, source=7)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"source": 10}, r"source must be a digit 0\.\.9 other than target=1, got 10"),
        ({"source": -1}, "got -1"),
        ({"source": 1}, "other than target=1, got 1"),
        ({"source": 3, "target": 3}, "other than target=3, got 3"),
    ],
)
def test_bad_settings_are_refused(chosen: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ardis(**chosen)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "ardis", **chosen})


def test_check_refuses_what_does_not_fit(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    Ardis(folder=str(folder)).check(MNIST)
    with pytest.raises(
        ValueError, match=r"have shape \(1, 28, 28\), but samples of cifar10 have \(3,"
    ):
        Ardis(folder=str(folder)).check(Spec("cifar10", (3, 32, 32), 10))
    with pytest.raises(ValueError, match=r"target must be a class 0\.\.9, got 10"):
        Ardis(target=10, folder=str(folder)).check(MNIST)
    with pytest.raises(UserError, match=r"none: no such file or folder, expected ardis$"):
        Ardis(folder=str(folder / "none")).check(MNIST)
    with pytest.raises(UserError, match=r"^ardis is not on this machine: put it into "):
        Ardis().check(MNIST)


def test_the_folder_is_found_in_fedbench_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ardis").mkdir()
    write(tmp_path / "ardis")
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    Ardis().check(MNIST)
    assert len(Ardis().prepare(context()).x_train) == 3


def test_contract(folder: Path) -> None:
    check_backdoor(Ardis(folder=str(folder)), [example_images(1, 28, 28)])
