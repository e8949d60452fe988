"""label_flip: y becomes C - 1 - y for exactly a share pdr of a malicious client's samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from untargeted import Make, Spy, sent_updates

from fedbench.attack import ATTACKS, Poisoning
from fedbench.metrics import IGNORED
from fedbench.results.run_dir import Record

LabelFlip: Any = ATTACKS.get("label_flip")


def poisoning(pdr: float, n_classes: int = 10, seed: int = 0) -> Poisoning:
    return Poisoning(0, (), pdr, n_classes, torch.Generator().manual_seed(seed))


def images(n: int) -> Tensor:
    return torch.arange(n * 4, dtype=torch.uint8).view(n, 1, 2, 2)


def flipped(y: Tensor, given: Poisoning) -> Tensor:
    poisoned: Tensor = LabelFlip().poison(images(len(y)), y, given)[1]
    return poisoned


def test_by_hand() -> None:
    # C = 10: 0 <-> 9, 1 <-> 8, 4 <-> 5. C = 3: 0 <-> 2, and 1, in the middle, stays.
    assert flipped(torch.tensor([0, 1, 4, 5, 9, 9]), poisoning(1.0)).tolist() == [9, 8, 5, 4, 0, 0]
    assert flipped(torch.tensor([0, 1, 2, 0]), poisoning(1.0, n_classes=3)).tolist() == [2, 1, 0, 2]
    # pdr = 0.5 of five samples of class 2 is 2.5, rounded up: three become class 7.
    assert sorted(flipped(torch.full((5,), 2), poisoning(0.5)).tolist()) == [2, 2, 7, 7, 7]


def test_ignored_labels_stay() -> None:
    """In a sequence, all other labels are flipped: with 5 words, 4 becomes 0."""
    y = torch.tensor([[4, IGNORED, 1], [IGNORED, 0, 2]], dtype=torch.int32)
    got = LabelFlip().poison(torch.zeros_like(y), y, poisoning(1.0, n_classes=5))[1]
    assert got.tolist() == [[0, IGNORED, 3], [IGNORED, 4, 2]]
    assert got.dtype == y.dtype


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    labels=st.lists(st.integers(0, 2**20), min_size=1, max_size=40),
    n_classes=st.integers(2, 50_000),
    pdr=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
@example(labels=[0] * 7, n_classes=10, pdr=0.0, seed=0)
@example(labels=[9] * 7, n_classes=10, pdr=1.0, seed=0)
@example(labels=[1, 1, 1], n_classes=2, pdr=0.5, seed=0)  # a half rounds up
@example(labels=[0], n_classes=10, pdr=0.4999, seed=0)
def test_by_definition(labels: list[int], n_classes: int, pdr: float, seed: int) -> None:
    # Avoid the middle class of an odd C, which a flip does not change.
    before = [2 * label % n_classes for label in labels]
    before = [label if 2 * label != n_classes - 1 else 0 for label in before]
    x, y = images(len(labels)), torch.tensor(before)
    poisoned_x, poisoned_y = LabelFlip().poison(x, y, poisoning(pdr, n_classes, seed))
    assert torch.equal(x, images(len(labels)))
    assert y.tolist() == before
    assert torch.equal(poisoned_x, x)
    assert poisoned_y.dtype == y.dtype
    changes = [
        (old, new) for old, new in zip(before, poisoned_y.tolist(), strict=True) if old != new
    ]
    assert len(changes) == int(pdr * len(labels) + 0.5)
    assert all(new == n_classes - 1 - old for old, new in changes)


@pytest.mark.parametrize("n_classes", [2, 3, 10, 11])
def test_flipping_twice_restores_the_labels(n_classes: int) -> None:
    y = torch.arange(50) % n_classes
    once = flipped(y, poisoning(1.0, n_classes, seed=1))
    assert once.min() == 0
    assert once.max() == n_classes - 1
    assert torch.equal(flipped(once, poisoning(1.0, n_classes, seed=2)), y)


def test_every_sample_is_equally_likely() -> None:
    """400 draws of 5 in 20: each sample 100 times, with standard deviation 8.7."""
    y = torch.zeros(20, dtype=torch.long)
    times = sum((flipped(y, poisoning(0.25, seed=seed)) == 9).long() for seed in range(400))
    assert isinstance(times, Tensor)
    assert int(times.sum()) == 2000
    assert times.min() > 60
    assert times.max() < 140


def test_the_choice_depends_only_on_the_generator() -> None:
    y = torch.zeros(200, dtype=torch.long)
    torch.manual_seed(1)
    first = flipped(y, poisoning(0.5, seed=4))
    torch.manual_seed(2)
    assert torch.equal(flipped(y, poisoning(0.5, seed=4)), first)
    assert not torch.equal(flipped(y, poisoning(0.5, seed=5)), first)


def test_all_labels_of_a_sequence_are_flipped_together() -> None:
    y = torch.arange(24).view(6, 4) % 10
    poisoned = flipped(y, poisoning(0.5))
    kept = (poisoned == y).all(dim=1)
    assert int(kept.sum()) == 3
    assert torch.equal(poisoned[~kept], 9 - y[~kept])


def test_a_client_trains_on_the_flipped_labels(federation: Make) -> None:
    """Its update has the same bits as honest training on a dataset with flipped labels."""
    attacked = sent_updates(federation, LabelFlip(), pdr=1.0)
    mislabeled = federation(Spy(), ATTACKS.build({"name": "none"}))
    data = mislabeled.rank_context.data
    y = data.dataset.y_train.clone()
    for client in data.malicious:
        y[data.shards[client]] = 9 - y[data.shards[client]]
    data.dataset = replace(data.dataset, y_train=y)
    end, record = mislabeled.round(replace(mislabeled.initial(), next_round=0))
    ids = [client["id"] for client in record["clients"]]
    places = [ids.index(client) for client in sorted(data.malicious)]
    assert torch.equal(attacked.sent, end.defense_state[places])
    assert not torch.equal(attacked.sent, attacked.clean)


def test_with_pdr_0_a_client_is_honest(federation: Make) -> None:
    attacked = sent_updates(federation, LabelFlip(), pdr=0.0)
    assert torch.equal(attacked.sent, attacked.clean)


def test_the_choice_differs_between_clients_and_rounds(
    federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[bool]] = []
    usual = LabelFlip.poison

    def spying(self: Any, x: Tensor, y: Tensor, given: Poisoning) -> tuple[Tensor, Tensor]:
        poisoned: tuple[Tensor, Tensor] = usual(self, x, y, given)
        chosen.append((poisoned[1] != y).tolist())
        return poisoned

    monkeypatch.setattr(LabelFlip, "poison", spying)
    for index in range(2):
        sent_updates(federation, LabelFlip(), index, pdr=0.3)
    assert len(chosen) == 4  # two malicious clients in two rounds
    assert [sum(flips) for flips in chosen] == [int(0.3 * len(flips) + 0.5) for flips in chosen]
    assert len({tuple(flips) for flips in chosen}) == 4


def test_every_client_malicious(federation: Make) -> None:
    attacked = sent_updates(federation, LabelFlip(), pmr=1.0, pdr=1.0)
    assert attacked.sent.isfinite().all()
    assert len(attacked.sent) == 6
    assert not any(torch.equal(a, b) for a, b in zip(attacked.sent, attacked.clean, strict=True))


def test_ma_falls_with_the_share_of_flipped_labels(after_rounds: Callable[..., Record]) -> None:
    """If 4 of 6 clients flip every label, the majority trains on wrong classes."""
    untouched, some, most = (
        after_rounds(LabelFlip(), pmr=pmr, pdr=pdr)["MA"]
        for pmr, pdr in ((0.67, 0.0), (0.34, 1.0), (0.67, 1.0))
    )
    assert untouched == after_rounds(ATTACKS.build({"name": "none"}))["MA"]
    assert untouched > 0.55
    assert most < 0.2
    assert most < some < untouched
