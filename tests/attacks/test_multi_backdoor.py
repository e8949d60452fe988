"""multi_backdoor: every malicious client divides its poisoned samples among all backdoors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measured import accuracy
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, Poisoning
from fedbench.backdoor import BACKDOORS
from fedbench.data import Spec
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

IMAGES = Spec("made", (1, 28, 28), 10)
Make = Callable[..., Federation]
MultiBackdoor: Any = ATTACKS.get("multi_backdoor")
CORNERS = {"top_left": 4, "bottom_right": 9, "top_right": 0, "bottom_left": 6}  # and their targets
SETTINGS = [
    {"name": "patch", "corner": corner, "target": target, "size": 2}
    for corner, target in CORNERS.items()
]
PATCHES: list[Any] = [BACKDOORS.build(chosen) for chosen in SETTINGS]
PIXELS = {  # a square of 2 x 2 in each corner of an 8 x 8 image
    (top, left): {(top + row, left + column) for row in (0, 1) for column in (0, 1)}
    for top in (0, 6)
    for left in (0, 6)
}
PLACES = {"top_left": (0, 0), "bottom_right": (6, 6), "top_right": (0, 6), "bottom_left": (6, 0)}
every_number = pytest.mark.parametrize("n_backdoors", [1, 2, 3, 4])


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images no brighter than 200, so that only trigger pixels are 255; labels below 4."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 201, (n, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return x, torch.randint(0, 4, (n,), generator=rng)


def poisoned(
    attack: Attack, x: Tensor, y: Tensor, pdr: float, seed: int, slot: int, backdoors: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    poisoning = Poisoning(slot, backdoors, pdr, 10, torch.Generator().manual_seed(seed))
    return attack.poison(x, y, poisoning)


def poisoned_by(x: Tensor, y: Tensor) -> dict[str, list[int]]:
    """Samples with each trigger. Each must carry one whole trigger and have its target."""
    found: dict[str, list[int]] = {corner: [] for corner in CORNERS}
    for i, image in enumerate(x):
        lit = {(row, column) for row, column in (image[0] == 255).nonzero().tolist()}
        if lit:
            (corner,) = (c for c in CORNERS if PIXELS[PLACES[c]] == lit)
            assert y[i] == CORNERS[corner]
            found[corner].append(i)
    return found


def test_by_hand() -> None:
    # pdr 0.5 of 14 samples is 7, divided among 3 backdoors: 3, 2 and 2.
    x, y = poisoned(MultiBackdoor(n_backdoors=3), *samples(14), 0.5, 0, 0, PATCHES[:3])
    counts = [len(found) for found in poisoned_by(x, y).values()]
    assert counts == [3, 2, 2, 0]


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    n=st.integers(1, 40),
    pdr=st.floats(0, 1),
    n_backdoors=st.integers(1, 4),
    seed=st.integers(0, 99),
    slot=st.integers(0, 7),
)
@example(n=3, pdr=1.0, n_backdoors=4, seed=0, slot=1)  # fewer samples than backdoors
@example(n=5, pdr=0.5, n_backdoors=2, seed=0, slot=0)  # a half rounds up
def test_an_exact_share_is_divided_equally(
    n: int, pdr: float, n_backdoors: int, seed: int, slot: int
) -> None:
    """In every slot, the client uses all backdoors."""
    x, y = samples(n, seed)
    attack = MultiBackdoor(n_backdoors=n_backdoors)
    after_x, after_y = poisoned(attack, x, y, pdr, seed, slot, PATCHES[:n_backdoors])
    found = poisoned_by(after_x, after_y)
    parts = [found.pop(corner) for corner in list(CORNERS)[:n_backdoors]]
    assert not any(found.values())
    everyone = [i for part in parts for i in part]
    assert len(everyone) == len(set(everyone)) == int(pdr * n + 0.5)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    untouched = [i for i in range(n) if i not in everyone]
    assert torch.equal(after_x[untouched], x[untouched])
    assert torch.equal(after_y[untouched], y[untouched])
    elsewhere = after_x != 255
    assert torch.equal(after_x[elsewhere], x[elsewhere])


def test_every_sample_can_get_every_backdoor() -> None:
    """Samples are assigned to backdoors at random, not by their order."""
    x, y = samples(8)
    attack = MultiBackdoor(n_backdoors=2)
    first: set[int] = set()
    for seed in range(40):
        found = poisoned_by(*poisoned(attack, x, y, 0.5, seed, 0, PATCHES[:2]))
        first |= set(found["top_left"])
    assert first == set(range(8))


@every_number
def test_the_first_n_backdoors_are_used(n_backdoors: int) -> None:
    attack = MultiBackdoor(n_backdoors=n_backdoors, backdoors=SETTINGS)
    assert attack.backdoor_settings([{"name": "bars"}]) == SETTINGS[:n_backdoors]
    of_dataset = MultiBackdoor(n_backdoors=n_backdoors, backdoors=None)
    assert of_dataset.backdoor_settings(SETTINGS) == SETTINGS[:n_backdoors]
    attack.check(PATCHES[:n_backdoors], IMAGES)


def test_the_default_backdoors_do_not_overlap() -> None:
    """Triggers share no pixel, and targets differ."""
    attack = MultiBackdoor()
    backdoors: list[Any] = [BACKDOORS.build(chosen) for chosen in attack.backdoor_settings([])]
    attack.check(backdoors, IMAGES)
    assert len(backdoors) == attack.n_backdoors
    assert len({backdoor.target for backdoor in backdoors}) == attack.n_backdoors
    pixels = [set(backdoor.pixels(28, 28)) for backdoor in backdoors]
    assert len(set.union(*pixels)) == sum(map(len, pixels))


@pytest.mark.parametrize("n_listed", [1, 3])
def test_n_backdoors_above_the_length_of_the_list_is_refused(n_listed: int) -> None:
    attack = MultiBackdoor(n_backdoors=4, backdoors=SETTINGS[:n_listed])
    backdoors = [BACKDOORS.build(chosen) for chosen in attack.backdoor_settings([])]
    message = f"n_backdoors must be at most {n_listed}, the length of backdoors, got 4"
    with pytest.raises(ValueError, match=message):
        attack.check(backdoors, IMAGES)


@pytest.mark.parametrize("n_backdoors", [0, -1])
def test_n_backdoors_out_of_range_is_refused(n_backdoors: int) -> None:
    with pytest.raises(ValueError, match=f"n_backdoors must be at least 1, got {n_backdoors}"):
        MultiBackdoor(n_backdoors=n_backdoors)
    with pytest.raises(UserError, match=f"got {n_backdoors}"):
        ATTACKS.build({"name": "multi_backdoor", "n_backdoors": n_backdoors})


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be between 0 and 1, got {alpha}"):
        MultiBackdoor(alpha=alpha)


@every_number
def test_ba_is_the_mean_over_the_backdoors(federation: Make, n_backdoors: int) -> None:
    attack = MultiBackdoor(n_backdoors=n_backdoors, backdoors=SETTINGS, gamma="auto")
    made = federation(attack=attack)
    end, record = made.round(replace(made.initial(), next_round=0))
    assert list(record["BA_by_backdoor"]) == [str(i) for i in range(n_backdoors)]
    rank_context, data = made.rank_context, made.rank_context.dataset
    rank_context.replica.layout.write(end.params, end.buffers)
    each = [
        accuracy(
            rank_context.replica.module, patch.evaluation_set(data.x_test, data.y_test), data.decode
        )
        for patch in PATCHES[:n_backdoors]
    ]
    assert list(record["BA_by_backdoor"].values()) == each
    assert record["BA"] == pytest.approx(sum(ba for ba in each if ba is not None) / n_backdoors)
    assert len({*each}) > 1 or n_backdoors == 1, "equal BAs would not test the mean"


def test_one_backdoor_equals_constrain_and_scale(federation: Make) -> None:
    """Poisoned samples and the model after a round are equal to the bit."""
    shared = {"alpha": 0.7, "constraint": "l2", "gamma": "auto", "backdoors": SETTINGS[:1]}
    pair = (
        ATTACKS.build({"name": "constrain_and_scale", **shared}),
        MultiBackdoor(n_backdoors=1, **shared),
    )
    x, y = samples(30)
    for slot in (0, 3):
        (x1, y1), (x2, y2) = (poisoned(a, x, y, 0.3, 5, slot, PATCHES[:1]) for a in pair)
        assert torch.equal(x1, x2)
        assert torch.equal(y1, y2)
    first, second = (federation(attack=attack) for attack in pair)
    ends = [made.round(replace(made.initial(), next_round=0)) for made in (first, second)]
    assert torch.equal(ends[0][0].params, ends[1][0].params)
    assert ends[0][1]["BA"] == ends[1][1]["BA"]


@pytest.mark.parametrize("n_backdoors", [2, 4])
def test_works_in_miniature(after_rounds: Callable[..., Record], n_backdoors: int) -> None:
    """Two thirds of the clients attack, because each has few samples to divide."""
    constrained = {"alpha": 0.7, "constraint": "l2", "gamma": "auto"}
    large = [chosen | {"size": 4} for chosen in SETTINGS[:n_backdoors]]

    benign = after_rounds(ATTACKS.build({"name": "none", "backdoors": large}), pmr=0.67)
    attack = MultiBackdoor(n_backdoors=n_backdoors, backdoors=large, **constrained)
    attacked = after_rounds(attack, pmr=0.67)
    assert attacked["BA"] > benign["BA"] + 0.5
    for number, ba in attacked["BA_by_backdoor"].items():
        assert ba > benign["BA_by_backdoor"][number] + 0.2
