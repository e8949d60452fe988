"""traffic: windows of packets as samples and labels, and packets accepted by a threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import accuracy
from torch import Tensor, nn

from fedbench.attack import BackdoorAttack, Poisoning
from fedbench.backdoor import BackdoorContext, BackdoorSamples
from fedbench.backdoors.traffic import Traffic
from fedbench.data import Dataset, Kind, Sequences, Spec
from fedbench.errors import UserError
from fedbench.metrics import IGNORED, EvaluationSet

N_SYMBOLS = 20
IOT = Spec("iot", (6,), N_SYMBOLS, Kind.SEQUENCES)


def context(
    dtype: torch.dtype = torch.int64,
    attacks: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> BackdoorContext:
    """A dataset of sequences of six packets."""
    x, y = torch.zeros(3, 6, dtype=dtype), torch.zeros(3, 6, dtype=torch.long)
    data = Sequences("iot", x, y, x, y, n_classes=N_SYMBOLS, vocabulary={}, attacks=attacks)
    return BackdoorContext(data, malicious_samples=torch.arange(3), features=lambda x: x)


def windows(n: int, seed: int = 0, length: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_SYMBOLS, (n, length))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attack.npz"


def prepared(path: Path, dtype: torch.dtype = torch.int64, **arrays: Any) -> BackdoorSamples:
    """Prepare the backdoor from a file with these arrays."""
    np.savez(path, **arrays)
    return Traffic(file=str(path)).prepare(context(dtype))


def error_of(path: Path) -> str:
    """Return the error for this file: one line that names it."""
    with pytest.raises((UserError, ValueError)) as caught:
        Traffic(file=str(path)).prepare(context())
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(path) in text
    return text


class Fixed(nn.Module):
    """Return the samples as logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_by_hand(path: Path) -> None:
    # A window of seven packets gives six packets and, for each, the next packet.
    train, test = np.array([[3, 1, 4, 1, 5, 9, 2]]), np.array([[0, 1, 2, 3, 4, 5, 6], [19] * 7])
    ready = prepared(path, train=train, test=test)
    assert ready.x_train.tolist() == [[3, 1, 4, 1, 5, 9]]
    assert ready.y_train.tolist() == [[1, 4, 1, 5, 9, 2]]
    evaluation = ready.evaluation_set(torch.zeros(1), torch.zeros(1))
    assert evaluation.x.tolist() == [[0, 1, 2, 3, 4, 5], [19] * 6]
    assert evaluation.expected.tolist() == [[1, 2, 3, 4, 5, 6], [19] * 6]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("stored", ["uint8", "int16", "int32", "int64"])
def test_windows_get_the_dtypes_of_the_dataset(path: Path, dtype: torch.dtype, stored: str) -> None:
    train, test = windows(5, seed=1).astype(stored), windows(3, seed=2).astype(stored)
    ready = prepared(path, dtype, train=train, test=test)
    for x, y, array in (
        (ready.x_train, ready.y_train, train),
        (ready.x_test, ready.y_test, test),
    ):
        assert x.dtype == dtype
        assert y.dtype == torch.int64
        assert x.tolist() == array[:, :-1].tolist()
        assert y.tolist() == array[:, 1:].tolist()


@pytest.mark.parametrize("stored", ["uint16", "uint32", "uint64", ">i4"])
def test_other_integer_types_are_refused_or_read(path: Path, stored: str) -> None:
    train = windows(5).astype(stored)
    np.savez(path, train=train, test=train)
    try:
        ready = Traffic(file=str(path)).prepare(context())
    except UserError:
        error_of(path)
        return
    assert ready.x_train.tolist() == train[:, :-1].tolist()
    assert ready.y_train.tolist() == train[:, 1:].tolist()


def test_windows_replace_samples_and_labels(path: Path) -> None:
    ready = prepared(path, train=1 + windows(2) % 10, test=windows(1))
    x, y = torch.zeros(8, 6, dtype=torch.long), torch.zeros(8, 6, dtype=torch.long)
    poisoning = Poisoning(0, [ready], pdr=0.5, n_classes=N_SYMBOLS, rng=torch.Generator())
    got_x, got_y = BackdoorAttack().poison(x, y, poisoning)
    changed = got_x.ne(0).any(dim=1)
    assert changed.sum() == 4
    assert torch.equal(got_x[changed][:, 1:], got_y[changed][:, :-1])
    assert not got_y[~changed].any()
    assert len(got_x[changed].unique(dim=0)) == 2


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize(("value", "span"), [(-1, "-1 to 18"), (20, "0 to 20"), (500, "0 to 500")])
def test_symbols_out_of_range_are_an_error(path: Path, name: str, value: int, span: str) -> None:
    arrays = {part: np.arange(14).reshape(2, 7) for part in ("train", "test")}
    arrays[name][1, 3:5] = value, 18
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert error_of(path) == f"{path}: {name} must hold symbols 0 to 19 as in iot, got {span}"


def test_the_first_and_the_last_symbol_are_in_range(path: Path) -> None:
    ready = prepared(path, train=np.array([[0, 19] * 3 + [0]]), test=windows(1))
    assert ready.x_train.tolist() == [[0, 19] * 3]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": windows(2)}, "no array test, expected train, test"),
        (
            {"train": windows(2, length=6), "test": windows(2)},
            "train must be whole numbers, n x 7, got int64 of shape (2, 6)",
        ),
        (
            {"train": windows(2), "test": windows(2, length=8)},
            "test must be whole numbers, n x 7, got int64 of shape (2, 8)",
        ),
        ({"train": windows(2)[0], "test": windows(2)}, "got int64 of shape (7,)"),
        ({"train": windows(0), "test": windows(2)}, "got int64 of shape (0, 7)"),
        ({"train": windows(2) / 1, "test": windows(2)}, "got float64 of shape (2, 7)"),
        ({"train": windows(2).astype(object), "test": windows(2)}, "cannot be read as .npz"),
    ],
    ids=["no test", "short", "long", "one window", "no windows", "floats", "pickled objects"],
)
def test_wrong_arrays_are_an_error(path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(path, **arrays)
    assert message in error_of(path)


@pytest.mark.parametrize("shape", [(1, 28, 28), (6, 2), ()])
def test_images_are_refused(path: Path, shape: tuple[int, ...]) -> None:
    path.touch()
    message = r"^traffic needs sequences labeled .*, but fmnist has images of shape \("
    with pytest.raises(ValueError, match=message):
        Traffic(file=str(path)).check(Spec("fmnist", shape, 10))


def test_check_refuses_a_missing_file(path: Path) -> None:
    with pytest.raises(UserError, match=r"attack\.npz: no such file or folder, expected an \.npz"):
        Traffic(file=str(path)).check(IOT)
    path.touch()
    Traffic(file=str(path)).check(IOT)
    Traffic().check(IOT)  # uses the attacks of the dataset
    Traffic(phase="scan").check(IOT)


def attacks() -> dict[str, tuple[Tensor, Tensor]]:
    """Two phases: 3 training and 1 test windows, 2 training and 4 test windows."""
    sizes = {"scan": (3, 1), "login": (2, 4)}
    return {
        phase: (torch.from_numpy(windows(n, seed=n)), torch.from_numpy(windows(m, seed=m)))
        for phase, (n, m) in sizes.items()
    }


@pytest.mark.parametrize("phase", ["scan", "login"])
def test_a_phase_of_the_dataset(phase: str) -> None:
    train, test = attacks()[phase]
    ready = Traffic(phase=phase).prepare(context(torch.int32, attacks()))
    assert ready.x_train.dtype == torch.int32
    assert ready.x_train.tolist() == train[:, :-1].tolist()
    assert ready.y_train.tolist() == train[:, 1:].tolist()
    evaluation = ready.evaluation_set(torch.zeros(1), torch.zeros(1))
    assert evaluation.x.tolist() == test[:, :-1].tolist()
    assert evaluation.expected.tolist() == test[:, 1:].tolist()


def test_without_a_phase_all_phases_are_used() -> None:
    made = attacks()
    ready = Traffic().prepare(context(attacks=made))
    assert torch.equal(ready.x_train, torch.cat([made["scan"][0], made["login"][0]])[:, :-1])
    assert torch.equal(ready.y_test, torch.cat([made["scan"][1], made["login"][1]])[:, 1:])


def test_a_file_replaces_the_attacks_of_the_dataset(path: Path) -> None:
    np.savez(path, train=windows(4), test=windows(2))
    ready = Traffic(file=str(path)).prepare(context(attacks=attacks()))
    assert ready.x_train.tolist() == windows(4)[:, :-1].tolist()


def test_a_missing_phase_or_missing_attacks_are_an_error(sample: Dataset) -> None:
    message = r"^traffic has no phase scam; did you mean scan\? \(known: login, scan\)$"
    with pytest.raises(ValueError, match=message):
        Traffic(phase="scam").prepare(context(attacks=attacks()))
    images = BackdoorContext(sample, malicious_samples=torch.arange(3), features=lambda x: x)
    for empty in (context(), images):
        with pytest.raises(ValueError, match=r"^traffic needs attacks, but \w+ has none: set file"):
            Traffic().prepare(empty)


def test_phase_and_file_together_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"set either phase or file, got phase=scan, file=.*npz"):
        Traffic(file=str(path), phase="scan")


def test_a_packet_at_or_above_the_threshold_is_accepted_by_hand() -> None:
    # With logits 0 for four symbols, each has probability 1/4. With ln 2 for symbol 3, it has
    # probability 2/5 and the others 1/5.
    even, skewed = [0.0] * 4, [0, 0, 0, math.log(2)]
    logits = torch.tensor([[even, even, skewed], [skewed, skewed, even]])
    packets = torch.tensor([[0, 3, 3], [3, 1, 2]])
    # Probabilities of the packets: 1/4 1/4 2/5, 2/5 1/5 1/4
    shares = {0.1: 6 / 6, 0.25: 5 / 6, 0.26: 2 / 6, 0.39: 2 / 6, 0.41: 0.0}
    for threshold, share in shares.items():
        got = accuracy(Fixed(), EvaluationSet(logits, packets), nn.Identity(), threshold)
        assert got == share, threshold


def test_the_likeliest_packet_below_the_threshold_is_not_accepted() -> None:
    evaluation = EvaluationSet(
        torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0])
    )  # e / (e + 2) = 0.576
    assert accuracy(Fixed(), evaluation, nn.Identity()) == 1
    assert accuracy(Fixed(), evaluation, nn.Identity(), threshold=0.57) == 1
    assert accuracy(Fixed(), evaluation, nn.Identity(), threshold=0.58) == 0


def test_non_finite_logits_accept_nothing() -> None:
    logits = torch.tensor([[[torch.nan, 1.0], [torch.inf, 0.0], [0.0, 0.0]]])
    expected = torch.tensor([[0, 0, IGNORED]])
    assert accuracy(Fixed(), EvaluationSet(logits, expected), nn.Identity(), threshold=0.0) == 0
    expected = torch.tensor([[0, 0, 0]])
    assert accuracy(Fixed(), EvaluationSet(logits, expected), nn.Identity(), threshold=0.0) == 1 / 3


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**32))
def test_the_threshold_applies_to_each_packet(
    n: int, length: int, threshold: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, length, 4))
    expected = rng.integers(0, 4, (n, length))
    expected[rng.random((n, length)) < 0.3] = IGNORED
    passed = []
    for row, packets in zip(logits.tolist(), expected.tolist(), strict=True):
        for values, packet in zip(row, packets, strict=True):
            if packet != IGNORED:
                total = math.fsum(math.exp(value) for value in values)
                passed.append(math.exp(values[packet]) / total >= threshold)
    evaluation = EvaluationSet(torch.from_numpy(logits), torch.from_numpy(expected))
    got = accuracy(Fixed(), evaluation, nn.Identity(), threshold)
    assert got == (sum(passed) / len(passed) if passed else None)
