"""dataset=custom: every form of source, every kind of sample, and each bad input in one line."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch
from end_to_end import imports_undone
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedbench.backdoor import BY_KIND
from fedbench.composition import compose
from fedbench.data import DATASETS, Dataset, Features, Images, Kind, Sequences
from fedbench.datasets.custom_arrays import ArrayOptions, dataset_of
from fedbench.datasets.custom_readers import UserArrays
from fedbench.errors import UserError
from fedbench.metrics import IGNORED
from fedbench.plan import Plan
from fedbench.report.partition_figure import class_names, label_counts

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (20, 1, 4, 5), dtype=np.uint8)
LABELS = np.arange(20) % 2
OPTIONS: dict[str, Any] = {
    "kind": None,
    "pixel_range": None,
    "standardize": True,
    "test_rate": 0.2,
    "split_seed": 0,
}


def made(x: Any, y: Any, x_test: Any = None, y_test: Any = None, **rest: Any) -> Any:
    """Return the data set of these arrays; settings and optional arrays are keywords."""
    arrays = {key: rest.pop(key) for key in ("owners", "class_names") if key in rest}
    options = ArrayOptions(**OPTIONS | rest)
    return dataset_of("custom", UserArrays(x, y, x_test, y_test, **arrays), options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty working folder with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / ".cache" / project)
    with imports_undone(tmp_path):
        yield tmp_path


def load(source: str, **chosen: Any) -> Any:
    return DATASETS.build({"name": "custom", "source": source, **chosen}).load()


def error_of(source: str, **chosen: Any) -> str:
    with pytest.raises(UserError) as raised:
        load(source, **chosen)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Images


def test_bytes_stay_bytes_and_are_standardized_when_decoded() -> None:
    data = made(BYTES, LABELS, BYTES[:6], LABELS[:6])
    assert isinstance(data, Images)
    assert data.kind is Kind.IMAGES
    assert data.x_train.dtype == torch.uint8
    assert data.y_train.dtype == torch.int64
    assert torch.equal(data.x_train, torch.from_numpy(BYTES))
    assert data.mean == pytest.approx(BYTES.mean() / 255)
    assert data.std == pytest.approx(BYTES.std() / 255)
    decoded = data.decode(data.x_train)
    assert decoded.mean() == pytest.approx(0, abs=1e-5)
    assert decoded.std(correction=0) == pytest.approx(1, abs=1e-5)
    plain = made(BYTES, LABELS, BYTES, LABELS, standardize=False)
    torch.testing.assert_close(plain.decode(plain.x_train), torch.from_numpy(BYTES / 255).float())


def test_floats_from_0_to_1_keep_their_precision() -> None:
    x = RNG.random((20, 1, 4, 5))
    data = made(x, LABELS, x, LABELS, standardize=False)
    assert data.x_train.dtype == torch.float32
    torch.testing.assert_close(data.decode(data.x_train), torch.from_numpy(x).float())
    assert 0 <= data.x_train.min() <= data.x_train.max() <= 255  # the scale of triggers


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint16, ">i4"])
def test_other_integers_become_bytes(dtype: Any) -> None:
    data = made(BYTES.astype(dtype), LABELS)
    assert data.x_train.dtype == torch.uint8


def test_pixel_range_scales_to_0_to_255() -> None:
    x = np.array([-1.0, 0.0, 3.0, 1.0] * 20).reshape(20, 1, 2, 2)
    data = made(x, LABELS, x, LABELS, pixel_range=[-1, 3])
    assert data.x_train[0].flatten().tolist() == [0, 63.75, 255, 127.5]
    with pytest.raises(ValueError, match=r"in dataset.pixel_range=\[0, 3\], got -1 to 3"):
        made(x, LABELS, x, LABELS, pixel_range=[0, 3])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((20, 4, 5), (1, 4, 5)),
        ((20, 1, 4, 5), (1, 4, 5)),
        ((20, 3, 4, 5), (3, 4, 5)),
        ((20, 7, 4, 5), (7, 4, 5)),
        ((20, 6, 5, 3), (3, 6, 5)),  # channels last
        ((20, 6, 5, 1), (1, 6, 5)),
        ((20, 3, 5, 3), (3, 5, 3)),  # either: channels first
    ],
)
def test_images_of_any_size_and_channels(shape: Any, expected: Any) -> None:
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    data = made(x, LABELS, x, LABELS)
    assert data.input_shape == expected
    if shape[-1] in (1, 3) and shape[1] == 6:
        assert torch.equal(data.x_train[3, 0], torch.from_numpy(x[3, :, :, 0]))


def test_constant_images_are_not_divided_by_zero() -> None:
    data = made(np.full((20, 2, 2), 7, np.uint8), LABELS)
    assert data.decode(data.x_train).isfinite().all()


# Features


def test_features_are_standardized_by_the_training_set() -> None:
    x = RNG.normal(50, 9, (30, 4))
    x[:, 2] = 8  # constant
    data = made(x[:20], LABELS, x[20:], LABELS[:10])
    assert isinstance(data, Features)
    decoded = data.decode(data.x_train)
    assert decoded.mean(dim=0).tolist() == pytest.approx([0] * 4, abs=1e-5)
    assert decoded.std(dim=0, correction=0).tolist() == pytest.approx([1, 1, 0, 1], abs=1e-5)
    torch.testing.assert_close(
        data.decode(data.x_test)[:, 0],
        torch.from_numpy((x[20:, 0] - x[:20, 0].mean()) / x[:20, 0].std()).float(),
    )
    plain = made(x[:20], LABELS, x[20:], LABELS[:10], standardize=False)
    assert torch.equal(plain.decode(plain.x_train), plain.x_train)
    moved = data.to(torch.device("meta"))
    assert {moved.x_train.device.type, moved.mean.device.type, moved.std.device.type} == {"meta"}


def test_integers_are_features_if_the_user_says_so() -> None:
    x = RNG.integers(0, 9, (20, 4))
    assert made(x, LABELS).kind is Kind.CLASSIFIED
    assert made(x, LABELS, kind="features").kind is Kind.FEATURES
    assert made(x > 4, LABELS).kind is Kind.FEATURES  # 0 and 1


# Sequences


def test_labels_that_are_the_next_symbols() -> None:
    windows = RNG.integers(0, 9, (20, 6))
    windows[0, 0] = 11  # occurs only as input
    data = made(windows[:, :-1], windows[:, 1:], windows[:, :-1], windows[:, 1:])
    assert isinstance(data, Sequences)
    assert data.kind is Kind.SEQUENCES
    assert data.n_classes == 12
    assert torch.equal(data.y_train, torch.from_numpy(windows[:, 1:]))
    assert data.vocabulary["11"] == 11
    assert class_names(data)[11] == "11"


def test_symbols_can_have_names() -> None:
    windows = RNG.integers(0, 3, (20, 6))
    names = ["a", "b", "c", "never"]
    data = made(windows[:, :-1], windows[:, 1:], class_names=names)
    assert data.vocabulary == {"a": 0, "b": 1, "c": 2, "never": 3}
    assert data.n_classes == 4
    with pytest.raises(ValueError, match="class_names must be 3 different names, one per symbol"):
        made(windows[:, :-1], windows[:, 1:], class_names=["a", "b"])


def test_ignored_labels_stay() -> None:
    windows = RNG.integers(0, 9, (20, 6))
    y = windows[:, 1:].copy()
    y[:, ::2] = IGNORED
    assert (made(windows[:, :-1], y).y_train[:, ::2] == IGNORED).all()
    tags = np.where(windows % 2, 5, 3)
    tags[:, 0] = IGNORED
    data = made(windows, tags)
    assert data.kind is Kind.TAGGED
    assert data.n_classes == 2
    assert set(data.y_train[:, 1:].unique().tolist()) == {0, 1}
    assert (data.y_train[:, 0] == IGNORED).all()
    assert data.class_names == ("3", "5")


def test_one_label_per_sequence() -> None:
    data = made(RNG.integers(0, 9, (20, 6)), np.where(LABELS, "spam", "ham"))
    assert data.kind is Kind.CLASSIFIED
    assert class_names(data) == {0: "ham", 1: "spam"}


# Labels, owners, splits


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.one_of(
        st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6, unique=True),
        st.lists(st.text("abcXYZ é", min_size=1, max_size=5), min_size=2, max_size=6, unique=True),
    ),
    st.integers(0, 2**16),
)
def test_any_integers_or_strings_become_classes(values: list[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = np.array([*values, *rng.choice(values, 24)])
    x = rng.random((len(y), 3))
    data = made(x, y, x[::-1].copy(), y[::-1].copy())
    order = sorted(values)
    assert data.n_classes == len(values)
    assert [order[code] for code in data.y_train.tolist()] == y.tolist()
    assert [order[code] for code in data.y_test.tolist()] == y[::-1].tolist()
    numbered = order == [*range(len(order))]
    assert data.class_names == (() if numbered else tuple(map(str, order)))


@pytest.mark.parametrize(
    ("labels", "names", "codes"),
    [
        ([0, 2, 0, 2], ["a", "b", "c"], [0, 2, 0, 2]),  # positions in the list
        ([1, 3, 1, 3], ["a", "b"], [0, 1, 0, 1]),  # in ascending order
        (["b", "a", "b", "a"], ["b", "c", "a"], [0, 2, 0, 2]),  # themselves names
        ([True, False, True, False], ["no", "yes"], [1, 0, 1, 0]),
        ([1.0, 0.0, 1.0, 0.0], ["no", "yes"], [1, 0, 1, 0]),
        ([[1], [0], [1], [0]], ["no", "yes"], [1, 0, 1, 0]),
    ],
)
def test_class_names(labels: Any, names: list[str], codes: list[int]) -> None:
    x = np.zeros((4, 3))
    data = made(x, labels, x, labels, class_names=names)
    assert data.y_train.tolist() == codes
    assert data.class_names == tuple(names)
    assert data.n_classes == len(names)
    assert label_counts(data, [torch.arange(4)]).names == names


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1] * 10, dtype=torch.int32),
        torch.tensor([0, 1] * 10).bfloat16(),
        [0, 1] * 10,
        np.array(["a", "b"] * 10, dtype=object),
        np.array([b"a", b"b"] * 10),
    ],
)
def test_types_of_labels(labels: Any) -> None:
    assert made(BYTES, labels, BYTES, labels).y_train.tolist() == [0, 1] * 10


def test_owners_of_any_kind_are_numbered() -> None:
    owners = [("a", 1), "b", 7, ("a", 1)] * 5
    data = made(BYTES, LABELS, BYTES, LABELS, owners=owners)
    assert data.owners.tolist() == [0, 1, 2, 0] * 5
    assert data.spec.natural
    assert made(BYTES, LABELS, owners=torch.arange(20)).owners.tolist() == [*range(18)][:16]


def test_the_split_depends_on_its_own_seed_only() -> None:
    x = np.arange(200.0).reshape(100, 2)
    y = np.arange(100) % 5
    one, same, other = (made(x, y, split_seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.x_test, same.x_test)
    assert not torch.equal(one.x_test, other.x_test)
    assert one.y_test.bincount().tolist() == [4] * 5  # 20 % of each class
    rows = {*map(tuple, one.x_train.tolist())} | {*map(tuple, one.x_test.tolist())}
    assert len(rows) == 100


def test_a_class_of_one_sample_stays_in_the_training_set() -> None:
    y = np.array([0] * 10 + [1] * 9 + [2])
    data = made(BYTES, y)
    assert data.y_train.bincount().tolist() == [8, 7, 1]
    assert 2 not in data.y_test


# Bad arrays

NAN = np.full((20, 3), np.nan)
ONES = np.ones((20, 3))
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: made(NAN, LABELS), "x_train must be finite, got NaN or infinity"),
    (lambda: made(ONES, LABELS, NAN, LABELS), "x_test must be finite"),
    (lambda: made(ONES * 1e300, LABELS), "x_train must be finite"),
    (lambda: made(ONES, LABELS[:7]), "y_train must have 20 labels, one per sample, got 7"),
    (lambda: made(ONES, LABELS, ONES, LABELS[:7]), "y_test must have 20 labels"),
    (lambda: made(ONES, 3), "y_train must have 20 labels, one per sample, got 1"),
    (lambda: made(ONES, LABELS, ONES, LABELS + 1), "y_test has the label 2, which y_train lacks"),
    (lambda: made(ONES, LABELS, ONES, LABELS.astype(str)), "y_test has the label 0, which y_train"),
    (lambda: made(ONES, np.zeros(20)), r"y_train must have two or more classes, got \['0'\]"),
    (lambda: made(ONES, LABELS + 0.5), "y_train must be whole numbers or strings, got float64"),
    (lambda: made(ONES, [None, 1] * 10), "y_train must be whole numbers or strings, got object"),
    (lambda: made(ONES, np.eye(20)), r"y_train must be \[n\], one label per sample, got shape"),
    (lambda: made([[1], [1, 2]] * 10, LABELS), "x_train must be one array"),
    (lambda: made(np.array([{}] * 20), LABELS), "x_train must be an array of numbers, got object"),
    (lambda: made(["a"] * 20, LABELS), "x_train must be an array of numbers, got <U1"),
    (lambda: made(np.ones(20), LABELS), r"x_train must be samples \[n, ...\], got shape \(20,\)"),
    (lambda: made(np.ones((0, 3)), []), r"x_train must be samples \[n, ...\], got shape \(0, 3\)"),
    (lambda: made(np.ones((20, 2, 2, 2, 2)), LABELS), r"x_train must be images \[n, C, H, W\] or"),
    (lambda: made(torch.ones(20, 3).to_sparse(), LABELS), "x_train must be a dense array"),
    (lambda: made(ONES, LABELS, np.ones((20, 4)), LABELS), r"one shape and type, got \(3,\) float"),
    (lambda: made(BYTES, LABELS, BYTES / 255, LABELS), r"one shape and type, got .* uint8 and"),
    (lambda: made(ONES, LABELS, ONES), "has x_test but no y_test"),
    (lambda: made(ONES, LABELS, None, LABELS), "has y_test but no x_test"),
    (
        lambda: made(BYTES * 16.0, LABELS),
        r"integers 0..255 or floats 0..1, got float32 from .* set",
    ),
    (lambda: made(BYTES.astype(int) + 9, LABELS), r"got int64 from .* set 'dataset.pixel_range="),
    (
        lambda: made(BYTES, LABELS, kind="features"),
        r"features must be \[F\] per sample, got \(1, 4, 5\); fl",
    ),
    (
        lambda: made(ONES, LABELS, kind="images"),
        r"images must be \[C, H, W\] or \[H, W\] each, got \(3,\)",
    ),
    (
        lambda: made(ONES, LABELS, kind="sequences"),
        r"sequences must be \[T\] symbol ids per sample, got \(3,\) f",
    ),
    (lambda: made(-ONES.astype(int), LABELS), "symbol ids must be 0 or more, got -1"),
    (lambda: made(ONES.astype(int), np.ones((20, 2), int)), r"y_train must be \[n\] or \(20, 3\)"),
    (
        lambda: made(ONES, LABELS, owners=[1, 2]),
        "owners must be 20, one per training sample, got 2",
    ),
    (lambda: made(ONES, LABELS, owners=[[1]] * 20), "owners must be numbers or names"),
    (lambda: made(ONES, LABELS, class_names=["a", "a"]), "class_names must differ, got a, a"),
    (lambda: made(ONES, LABELS, class_names=["a"]), "class_names must name the 2 labels 0, 1, got"),
    (lambda: made(ONES, LABELS, test_rate=0.01), "dataset.test_rate=0.01 leaves no test sample of"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arrays_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# Functions and data modules

CODE = """
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

X, Y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2

def pair(n=20):
    return X[:n], Y[:n]

def four():
    return X, Y, X[:4], Y[:4]

def mapping():
    return {"x_train": X, "y_train": Y, "owners": Y, "class_names": ["a", "b"]}

def dataset():
    from fedbench.data import Features
    t, y = torch.tensor(X).float(), torch.tensor(Y)
    return Features("mine", t, y, t, y, 2, torch.zeros(2), torch.ones(2), augment=augment)

def augment(x, rng):
    return x

def random():
    return np.random.rand(20, 2), torch.randint(2, (20,))

def three():
    return X, Y, X

def nothing():
    return None

def typo():
    return {"x_train": X, "y_trian": Y}

def broken():
    raise RuntimeError("disk on fire")

class NotData:
    pass

class Module(LightningDataModule):
    class_names = ["even", "odd"]

    def __init__(self, n=20, form="pairs"):
        super().__init__()
        self.n, self.form, self.calls = n, form, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)
        self.data = TensorDataset(torch.tensor(X).float()[:self.n], torch.tensor(Y)[:self.n])

    def train_dataloader(self):
        assert self.calls == ["prepare_data", "fit"]
        if self.form == "list":
            return [DataLoader(self.data)]
        if self.form == "subset":
            return DataLoader(self.data, 3, sampler=SubsetRandomSampler([7, 2, 4, 9]))
        if self.form == "owners":
            rows = [(x, y, f"owner {i % 3}") for i, (x, y) in enumerate(self.data)]
            return DataLoader(rows, batch_size=3, shuffle=True)
        if self.form == "dict":
            return DataLoader([{"x": x} for x, _ in self.data])
        return DataLoader(self.data, batch_size=3, shuffle=True, drop_last=True)

class Tested(Module):
    def test_dataloader(self):
        assert self.calls[-1] == "test"
        return DataLoader(self.data, batch_size=7)

class Validated(Module):
    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.data[:5]), batch_size=2)

def module():
    return Tested()
"""


@pytest.fixture
def code(folder: Path) -> Path:
    (folder / "mine.py").write_text(CODE)
    (folder / "package").mkdir()
    (folder / "package" / "theirs.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("source", ["mine.py:four", "mine.four", "package.theirs.four"])
def test_function_by_path(code: Path, source: str) -> None:
    data = load(source)
    assert (len(data.x_train), len(data.x_test)) == (20, 4)


def test_what_a_function_may_return(code: Path) -> None:
    assert len(load("mine.py:pair").x_test) == 4
    assert len(load("mine.py:pair", arguments={"n": 10}).x_test) == 2
    data = load("mine.py:mapping")
    assert data.class_names == ("a", "b")
    assert data.owners is not None
    data = load("mine.py:dataset")
    assert data.name == "mine"
    pickle.loads(pickle.dumps(data))  # its function `augment` reaches other processes
    assert len(load("mine.py:module").x_test) == 20


def test_random_functions_give_the_same_data_in_every_run(code: Path) -> None:
    state = torch.random.get_rng_state()
    one, same = load("mine.py:random"), load("mine.py:random")
    assert torch.equal(one.x_train, same.x_train)
    assert torch.equal(one.y_train, same.y_train)
    assert not torch.equal(one.x_train, load("mine.py:random", split_seed=1).x_train)
    assert torch.equal(state, torch.random.get_rng_state())


def test_data_modules_are_read_in_order(code: Path) -> None:
    data = load("mine.py:Tested")
    assert data.x_train[:, 0].tolist() == [*range(0, 40, 2)]
    assert data.y_train.tolist() == [0, 1] * 10
    assert len(data.x_test) == 20
    assert data.class_names == ("even", "odd")
    assert len(load("mine.py:Validated").x_test) == 5
    assert len(load("mine.py:Module").x_test) == 4  # drawn
    assert len(load("mine.py:Tested", arguments={"n": 10}).x_train) == 10
    subset = load("mine.py:Tested", arguments={"form": "subset"})
    assert subset.x_train[:, 0].tolist() == [4, 8, 14, 18]
    owned = load("mine.py:Tested", arguments={"form": "owners"})
    assert owned.owners.tolist() == ([0, 1, 2] * 7)[:20]


@pytest.mark.parametrize(
    ("source", "chosen", "message"),
    [
        ("mine.py:three", {}, r"\(x_train, y_train, x_test, y_test\) or \(x, y\), got 3 values"),
        (
            "mine.py:nothing",
            {},
            "must be a tuple of arrays or a mapping with x_train, .*, got None",
        ),
        ("mine.py:typo", {}, r"no array is called y_trian; did you mean y_train\?"),
        ("mine.py:broken", {}, r"RuntimeError: disk on fire \(.*mine.py:\d+\)"),
        ("mine.py:NotData", {}, "must be a function or a LightningDataModule, got the class NotD"),
        ("mine.py:X", {}, "must be a function or a LightningDataModule, got an object of type nd"),
        ("os.getcwd", {}, "getcwd belongs to a package, and no annotation says that it makes"),
        ("shutil.copyfile", {}, "copyfile belongs to a package, and no annotation says"),
        ("mine.py:piar", {}, r": mine.py has no piar; did you mean pair\?"),
        ("mine.piar", {}, r": mine has no piar; did you mean pair\?"),
        ("mine.py", {}, r"must name what to use, mine.py:pair \(or four, mapping, .*\)"),
        ("mien.py:pair", {}, r"no file .*/mien.py; did you mean mine.py\?"),
        ("nowhere.pair", {}, "no module nowhere in .* or installed"),
        ("nowhere", {}, "no .*/nowhere; expected path/to/file.py:load, my_package.my_module.load,"),
        ("nowhere.npz", {}, r"no .*/nowhere.npz; expected"),
        ("package/theirs.txt", {}, "must be path/to/file.py:load"),
        (
            "mine.py:Tested",
            {"arguments": {"form": "list"}},
            "train_dataloader must return one Data",
        ),
        (
            "mine.py:Tested",
            {"arguments": {"form": "dict"}},
            "train_dataloader must yield .* got dict",
        ),
        ("mine.py:Tested", {"arguments": {"n": 0}}, "ValueError: num_samples should be a positive"),
    ],
)
def test_bad_sources_are_refused(
    code: Path, source: str, chosen: dict[str, Any], message: str
) -> None:
    (code / "package" / "theirs.txt").touch()
    found = error_of(source, **chosen)
    assert found.startswith(f"dataset.source={source}: ")
    assert re.search(message, found), found


def test_bad_arguments_and_settings_are_refused_before_loading(code: Path) -> None:
    def refused(message: str, **chosen: Any) -> None:
        with pytest.raises(UserError, match=message):
            DATASETS.build({"name": "custom", "source": "mine.py:pair", **chosen})

    refused(r"dataset.arguments.m=3: pair has no such argument.* \(known: n\)", arguments={"m": 3})
    refused(
        r"dataset.arguments.m=3: nothing has no such argument \(known: none\)",
        source="mine.py:nothing",
        arguments={"m": 3},
    )
    refused("dataset custom: source must be set: path/to/file.py:load", source=None)
    refused("test_rate must be above 0 and below 1, got 1.0", test_rate=1)
    refused("split_seed must be 0 or more, got -1", split_seed=-1)
    refused("kind must be one of images, features, sequences, or null, got text", kind="text")
    refused(r"size must be \[height, width\] in pixels, up to 4096, or null, got \[3\]", size=[3])
    refused(r"pixel_range must be \[lowest, highest\], or null, got", pixel_range=[1, 1])
    np.savez(code / "a.npz", x_train=ONES, y_train=LABELS)
    refused(r"dataset.size=\[3, 3\]: resizes a folder", source="a.npz", size=[3, 3])
    refused("dataset.arguments.n=3: only a function", source="a.npz", arguments={"n": 3})


# Archives


def test_npz(folder: Path) -> None:
    np.savez(
        folder / "a.npz",
        x_train=BYTES,
        y_train=np.where(LABELS, "dog", "cat"),
        x_test=BYTES[:4],
        y_test=np.array(["dog", "cat"] * 2),
        owners=np.arange(20) % 3,
        class_names=np.array(["dog", "cat"]),
    )
    data = load("a.npz")
    assert data.y_test.tolist() == [0, 1, 0, 1]
    assert data.class_names == ("dog", "cat")
    assert data.owners.tolist() == [i % 3 for i in range(20)]
    assert torch.equal(load(str(folder / "a.npz")).x_train, data.x_train)


@pytest.mark.parametrize("suffix", ["pt", "pth"])
def test_pt(folder: Path, suffix: str) -> None:
    x, y = torch.rand(20, 5), torch.arange(20) % 2
    torch.save({"x_train": x, "y_train": y, "class_names": ["a", "b"]}, folder / f"a.{suffix}")
    assert load(f"a.{suffix}").class_names == ("a", "b")
    torch.save((x, y, x, y), folder / f"a.{suffix}")
    assert torch.equal(load(f"a.{suffix}").x_test, x)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def test_pickles_are_never_executed(folder: Path) -> None:
    np.savez(folder / "a.npz", x_train=np.array([Bomb()], dtype=object), y_train=LABELS)
    torch.save({"x_train": Bomb(), "y_train": LABELS}, folder / "a.pt")
    for source, right in (("a.npz", "arrays of numbers"), ("a.pt", "tensors")):
        assert error_of(source).endswith(
            f"it holds Python objects, which are never loaded; save {right}"
        )
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        *[
            (suffix, text)
            for suffix in ("npz", "pt")
            for text in (b"junk" * 99, b"x", b"a,b\n", b"")
        ],
        *[("npz", "npy"), ("npz", "half"), ("pt", "pickle"), ("pt", "zip"), ("pt", "half")],
    ],
)
def test_files_of_another_format_are_refused(
    folder: Path, suffix: str, content: bytes | str, recwarn: pytest.WarningsRecorder
) -> None:
    file = folder / f"a.{suffix}"
    if content == "npy":
        np.save(folder / "a.npy", ONES)
        (folder / "a.npy").rename(file)
    elif content == "pickle":
        file.write_bytes(pickle.dumps({"x_train": [[1.0]], "y_train": [0]}))
    elif content == "zip":
        np.savez(folder / "b.npz", x_train=ONES)
        (folder / "b.npz").rename(file)
    elif content == "half":
        arrays = {"x_train": torch.ones(900, 2), "y_train": torch.ones(900)}
        np.savez(file, **arrays) if suffix == "npz" else torch.save(arrays, file)
        file.write_bytes(file.read_bytes()[:900])
    else:
        assert isinstance(content, bytes)
        file.write_bytes(content)
    form = {"npz": "an .npz", "pt": "a .pt"}[suffix]
    assert error_of(file.name) == (
        f"dataset.source={file.name}: it is not {form} file, or it is damaged"
    )
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_archives_of_other_arrays_are_refused(folder: Path, suffix: str) -> None:
    arrays = {"x_train": torch.ones(3, 2), "xtest": torch.ones(3)}
    np.savez(folder / "a.npz", **arrays) if suffix == "npz" else torch.save(arrays, "a.pt")
    assert "no array is called xtest; did you mean x_test?" in error_of(f"a.{suffix}")
    arrays.pop("xtest")
    np.savez(folder / "a.npz", **arrays) if suffix == "npz" else torch.save(arrays, "a.pt")
    assert "must have y_train" in error_of(f"a.{suffix}")


# Folders of images


def picture(path: Path, mode: str = "L", size: tuple[int, int] = (5, 4), seed: int = 0) -> None:
    """Write an image of (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], *channels), dtype=np.uint8)
    Image.fromarray(pixels, mode).save(path)


@pytest.fixture
def photos(folder: Path) -> Path:
    for part, n in (("train", 4), ("test", 2)):
        for name in ("dog", "cat"):
            for i in range(n):
                picture(folder / "photos" / part / name / f"{i}.png", seed=i)
    return folder / "photos"


def test_folder_with_train_and_test(photos: Path) -> None:
    data = load("photos")
    assert data.input_shape == (1, 4, 5)
    assert data.class_names == ("cat", "dog")
    assert data.y_train.tolist() == [0] * 4 + [1] * 4
    assert data.y_test.tolist() == [0] * 2 + [1] * 2
    expected = np.asarray(Image.open(photos / "train" / "cat" / "2.png"))
    assert torch.equal(data.x_train[2, 0], torch.tensor(expected))


def test_folder_without_test_set(photos: Path) -> None:
    data = load("photos/train", test_rate=0.25)
    assert (len(data.x_train), len(data.x_test)) == (6, 2)
    (photos / "test").rename(photos.parent / "elsewhere")
    assert torch.equal(load("photos", test_rate=0.25).x_test, data.x_test)


def test_gray_images_become_color_beside_color_images(photos: Path) -> None:
    picture(photos / "train" / "dog" / "9.png", mode="RGB")
    picture(photos / "train" / "dog" / "sub" / "8.jpg", mode="RGB")
    picture(photos / "train" / "dog" / "7.PNG", mode="RGBA")
    (photos / "train" / "dog" / "notes.txt").write_text("not an image")
    data = load("photos")
    assert data.input_shape == (3, 4, 5)
    assert len(data.x_train) == 11
    assert torch.equal(data.x_train[0, 0], data.x_train[0, 2])


def test_size_resizes_all_images(photos: Path) -> None:
    picture(photos / "train" / "dog" / "9.png", size=(8, 8))
    message = "images differ in size, .*; set 'dataset.size=.height,width.' to resize all"
    assert re.search(message, error_of("photos"))
    assert load("photos", size=[6, 7]).input_shape == (1, 6, 7)


def test_a_changed_folder_is_read_again(photos: Path) -> None:
    assert len(load("photos").x_train) == 8
    assert len([*photos.parent.glob(".cache/fedbench/custom/*.pt")]) == 1
    picture(photos / "train" / "dog" / "9.png", seed=5)
    assert len(load("photos").x_train) == 9


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "train" / "emu").mkdir(), "no images in .*/train/emu"),
        (lambda p: picture(p / "test" / "emu" / "1.png"), "test has the class emu, train does not"),
        (
            lambda p: (p / "train" / "cat" / "x.png").write_bytes(b"no"),
            r"cannot read the image .*x",
        ),
        (lambda p: truncate(p / "train" / "cat" / "1.png"), r"cannot read the image .*1.png"),
        (lambda p: deep(p / "train" / "cat" / "1.png"), "mode I(;16)? is not 8 bits per channel"),
        (
            lambda p: (p / "train" / "cat").rename(p / "cat"),
            "must have a folder of images per class",
        ),
    ],
)
def test_bad_folders_are_refused(photos: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(photos)
    found = error_of("photos")
    assert found.startswith("dataset.source")
    assert re.search(message, found), found


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def deep(path: Path) -> None:
    Image.fromarray(np.full((4, 5), 60_000, np.uint16)).save(path)


# The plan of a run


def plan_of(*overrides: str) -> Plan:
    return Plan.of(compose(["dataset=custom", *overrides]))


KINDS: dict[Kind, tuple[Any, Any]] = {
    Kind.IMAGES: (BYTES.repeat(5, axis=2), LABELS),
    Kind.FEATURES: (ONES, LABELS),
    Kind.SEQUENCES: (np.arange(60).reshape(20, 3), np.arange(1, 61).reshape(20, 3)),
    Kind.TAGGED: (np.ones((20, 3), int), np.arange(60).reshape(20, 3) % 2),
    Kind.CLASSIFIED: (np.ones((20, 3), int), LABELS),
}


@pytest.mark.parametrize("kind", Kind)
def test_the_backdoor_fits_the_kind(folder: Path, kind: Kind) -> None:
    x, y = KINDS[kind]
    np.savez(folder / "a.npz", x_train=x, y_train=y, owners=np.arange(20))
    shape = ["model=custom", "model.target=torch.nn.Identity", "partition=natural", "pool=30"]
    for attack, targeted in (("none", False), ("constrain_and_scale", True)):
        plan = plan_of("dataset.source=a.npz", f"attack={attack}", *shape)
        data = plan.source.load()
        assert data.kind is kind
        if targeted and kind not in BY_KIND:
            with pytest.raises(
                UserError, match=r"backdoors must be one or more, got none; (use|write) "
            ):
                plan.fitted(data.spec)
            continue
        fitted = plan.fitted(data.spec)
        assert [*fitted.backdoor_settings] == [{"name": BY_KIND.get(kind)}] * (kind in BY_KIND)
        assert fitted.folder.path == plan.folder.path  # the run id is known before loading


def test_named_backdoors_win(folder: Path) -> None:
    np.savez(folder / "a.npz", x_train=BYTES.repeat(5, axis=2), y_train=LABELS)
    own = plan_of("dataset.source=a.npz", "dataset.backdoors=[{name:patch,size:2}]")
    assert own.fitted(own.source.load().spec).backdoor_settings == ({"name": "patch", "size": 2},)
    attack = plan_of("dataset.source=a.npz", "attack.backdoors=[{name:patch,size:3}]")
    assert attack.fitted(own.source.load().spec).backdoor_settings[0]["size"] == 3
    ids = {plan.folder.path for plan in (own, attack, plan_of("dataset.source=a.npz"))}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            Kind.FEATURES,
            ["attack=dba"],
            r"needs images, .*; use 'attack.backdoors=\[features\]",
        ),
        (
            Kind.FEATURES,
            ["model=cnn"],
            r"model cnn: needs images, but .* feature vectors .*; use mlp",
        ),
        (Kind.FEATURES, ["partition=natural"], "partition=natural: .* have no owners"),
        (Kind.IMAGES, ["attack.backdoors=[features]"], r"features needs feature vectors, but"),
        (Kind.IMAGES, ["model=lstm"], "model lstm: needs sequences labeled with the next symbol"),
        (Kind.SEQUENCES, [], "partition=main_class: splits samples by label, .* use partition=iid"),
        (Kind.CLASSIFIED, ["model=gru"], "model gru: needs .* with one label .*; use custom"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, kind: Kind, overrides: list[str], message: str
) -> None:
    x, y = KINDS[kind]
    np.savez(folder / "a.npz", x_train=x, y_train=y)
    plan = plan_of("dataset.source=a.npz", *overrides)
    with pytest.raises(UserError, match=message):
        plan.fitted(plan.source.load().spec)


def test_settings_reach_the_source(folder: Path) -> None:
    (folder / "mine.py").write_text(CODE)
    config = compose(["dataset=custom", "dataset.source=mine.py:pair", "dataset.arguments.n=8"])
    assert config.dataset["arguments"] == {"n": 8}
    assert config.model["name"] == "mlp"
    data: Dataset = Plan.of(config).source.load()
    assert len(data.x_train) + len(data.x_test) == 8
    assert isinstance(data.y_train, Tensor)
