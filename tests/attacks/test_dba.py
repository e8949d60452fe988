"""dba: each malicious client trains on one part of the trigger; BA uses the whole trigger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.attack import ATTACKS, Poisoning
from fedbench.backdoor import BACKDOORS
from fedbench.data import Spec
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

IMAGES = Spec("made", (1, 28, 28), 10)
Make = Callable[..., Federation]
Pixels = set[tuple[int, int]]
DBA: Any = ATTACKS.get("dba")
Bars: Any = BACKDOORS.get("bars")
Patch: Any = BACKDOORS.get("patch")
TRIGGERS: dict[str, tuple[Any, Pixels]] = {  # and their pixels in a 28 x 28 image
    "bars": (
        Bars(target=2, length=4, gap=2, margin=0),
        {(row, column) for row in (0, 3) for column in (0, 1, 2, 3, 6, 7, 8, 9)},
    ),
    "patch": (
        Patch(target=7, size=3, corner="top_right", margin=1),
        {(row, column) for row in (1, 2, 3) for column in (24, 25, 26)},
    ),
}
every_trigger = pytest.mark.parametrize("name", TRIGGERS)


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images no brighter than 200, so that only trigger pixels are 255."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 201, (n, 1, 28, 28), generator=rng, dtype=torch.uint8)
    return x, torch.randint(0, 10, (n,), generator=rng)


def poisoning(trigger: Any, slot: int, pdr: float = 1.0, seed: int = 0) -> Poisoning:
    return Poisoning(slot, [trigger], pdr, 10, torch.Generator().manual_seed(seed))


def lit(images: Tensor) -> list[Pixels]:
    """(row, column) of the trigger pixels in each image."""
    return [
        {(row, column) for row, column in (image[0] == 255).nonzero().tolist()} for image in images
    ]


def part_of(trigger: Any, slot: int, n_parts: int) -> Pixels:
    """Pixels that a client in this slot sets."""
    poisoned, _ = DBA(n_parts=n_parts).poison(*samples(3), poisoning(trigger, slot))
    first, *others = lit(poisoned)
    assert all(other == first for other in others)
    return first


def test_by_hand() -> None:
    # Four bars of 1 x 4 with gap 2: columns 0-3 and 6-9 of rows 0 and 3. Clients get one bar each,
    # left to right and top to bottom; the fifth client gets the first bar again.
    bars = [
        {(row, column) for column in range(start, start + 4)} for row in (0, 3) for start in (0, 6)
    ]
    trigger, whole = TRIGGERS["bars"]
    assert [part_of(trigger, slot, n_parts=4) for slot in range(5)] == [*bars, bars[0]]
    assert set.union(*bars) == whole


@every_trigger
@pytest.mark.parametrize("n_parts", [1, 2, 3, 4, 5, 9])
def test_parts_are_disjoint_and_add_up_to_the_trigger(name: str, n_parts: int) -> None:
    trigger, whole = TRIGGERS[name]
    parts = [part_of(trigger, slot, n_parts) for slot in range(n_parts)]
    assert sum(map(len, parts)) == len(whole), "a pixel is in two parts"
    assert set.union(*parts) == whole
    assert all(parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@every_trigger
@pytest.mark.parametrize("n_parts", [1, 3, 4])
def test_slots_take_parts_in_turn(name: str, n_parts: int) -> None:
    trigger, _ = TRIGGERS[name]
    parts = [part_of(trigger, slot, n_parts) for slot in range(n_parts)]
    for slot in range(3 * n_parts):
        assert part_of(trigger, slot, n_parts) == parts[slot % n_parts]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    pdr=st.floats(0, 1),
    slot=st.integers(0, 9),
    n_parts=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_poisoned_images_carry_one_part_and_nothing_else(
    n: int, pdr: float, slot: int, n_parts: int, seed: int
) -> None:
    trigger, _ = TRIGGERS["bars"]
    x, y = samples(n, seed)
    poisoned_x, poisoned_y = DBA(n_parts=n_parts).poison(x, y, poisoning(trigger, slot, pdr, seed))
    mine = part_of(trigger, slot, n_parts)
    poisoned = torch.tensor([bool(pixels) for pixels in lit(poisoned_x)])
    assert int(poisoned.sum()) == int(pdr * n + 0.5)
    assert all(pixels == mine for pixels in lit(poisoned_x[poisoned]))
    assert (poisoned_y[poisoned] == 2).all()
    assert torch.equal(poisoned_y[~poisoned], y[~poisoned])
    elsewhere = poisoned_x != 255  # all pixels but the trigger are unchanged
    assert torch.equal(poisoned_x[elsewhere], x[elsewhere])


def test_in_a_federation_each_client_keeps_its_part(federation: Make) -> None:
    """In two rounds, each client trains on one part; BA is measured with the whole trigger."""
    seen: dict[int, list[Pixels]] = {}

    class Watched(DBA):  # type: ignore[misc]
        def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
            dark_x, dark_y = super().poison(x.clamp(max=200), y, poisoning)
            pixels = [found for found in lit(dark_x) if found]
            assert len(pixels) == int(0.25 * len(y) + 0.5)
            seen.setdefault(poisoning.slot, []).extend(pixels)
            return dark_x, dark_y

    bars = [{"name": "bars", "target": 2, "length": 4, "gap": 2, "margin": 0}]
    attack = Watched(n_parts=3, gamma=1.0, backdoors=bars)
    made = federation(attack=attack, pmr=0.67, pdr=0.25)
    state = replace(made.initial(), next_round=0)
    for _ in range(2):
        state, record = made.round(state)
    trigger, whole = TRIGGERS["bars"]
    assert sorted(seen) == [0, 1, 2, 3]
    for slot, pixels in seen.items():
        assert {frozenset(found) for found in pixels} == {frozenset(part_of(trigger, slot, 3))}
    (evaluation,) = made.rank_context.evaluator.triggered
    assert (evaluation.expected == 2).all()
    data = made.rank_context.dataset
    assert len(evaluation.x) == int((data.y_test != 2).sum())
    rows, columns = torch.tensor(sorted(whole)).T
    assert (evaluation.x[..., rows, columns] == 255).all()
    unlit = torch.ones(28, 28, dtype=torch.bool)
    unlit[rows, columns] = False
    assert torch.equal(evaluation.x[..., unlit], data.x_test[data.y_test != 2][..., unlit])
    assert len(record["BA_by_backdoor"]) == 1


def test_works_in_miniature(after_rounds: Callable[..., Record]) -> None:
    """The whole trigger works although none of the 4 malicious clients trained on it."""
    chosen = {"backdoors": [{"name": "bars", "target": 2}]}
    benign = after_rounds(ATTACKS.build({"name": "none", **chosen}), pmr=0.67)["BA"]
    attack = DBA(n_parts=4, gamma=1.0, **chosen)
    assert after_rounds(attack, pmr=0.67)["BA"] > benign + 0.5


@pytest.mark.parametrize(
    ("backdoors", "found"),
    [
        ([{"name": "tail"}], "Tail"),
        ([{"name": "bars"}, {"name": "patch"}], "Bars, Patch"),
        ([{"name": "patch"}, {"name": "patch"}], "Patch, Patch"),
    ],
)
def test_backdoors_that_cannot_be_split_are_refused(
    backdoors: list[dict[str, Any]], found: str
) -> None:
    with pytest.raises(ValueError, match=f"one trigger to split, got {found}$"):
        DBA(n_parts=2).check([BACKDOORS.build(backdoor) for backdoor in backdoors], IMAGES)


@pytest.mark.parametrize(
    ("trigger", "n_pixels"),
    [
        ({"name": "patch", "size": 2, "corner": "bottom_right"}, 4),
        ({"name": "bars", "length": 1}, 4),
    ],
)
def test_more_parts_than_pixels_are_refused(trigger: dict[str, Any], n_pixels: int) -> None:
    built = [BACKDOORS.build(trigger)]
    DBA(n_parts=n_pixels).check(built, IMAGES)
    with pytest.raises(ValueError, match="n_parts must be at most the trigger's 4 pixels, got 5"):
        DBA(n_parts=n_pixels + 1).check(built, IMAGES)


@pytest.mark.parametrize("n_parts", [0, -2])
def test_n_parts_out_of_range_is_refused(n_parts: int) -> None:
    with pytest.raises(ValueError, match=f"n_parts must be at least 1, got {n_parts}"):
        DBA(n_parts=n_parts)
    with pytest.raises(UserError, match=f"got {n_parts}"):
        ATTACKS.build({"name": "dba", "n_parts": n_parts})
