"""bars: pixels of the four bars, whole and split, and the images they fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.backdoor import BACKDOORS
from fedbench.backdoors.bars import Bars
from fedbench.data import Spec
from fedbench.errors import UserError


def drawing(image: Tensor) -> list[str]:
    """Draw an image [1, H, W] with # for nonzero pixels."""
    return ["".join("#" if pixel else "." for pixel in row) for row in image[0].tolist()]


def blank(height: int, width: int) -> Tensor:
    return torch.zeros(1, 1, height, width, dtype=torch.uint8)


def test_by_hand() -> None:
    # The paper's bars on MNIST: 1 x 4 pixels with gap 2, from the top left corner.
    assert drawing(Bars().stamp(blank(6, 12))[0]) == [
        "####..####..",
        "............",
        "............",
        "####..####..",
        "............",
        "............",
    ]


def test_the_papers_bars_on_cifar10_by_hand() -> None:
    assert drawing(Bars(length=6, gap=3).stamp(blank(6, 16))[0]) == [
        "######...######.",
        "................",
        "................",
        "................",
        "######...######.",
        "................",
    ]


def test_margin_and_value_by_hand() -> None:
    image = Bars(length=1, gap=1, margin=1, value=7).stamp(blank(4, 5))[0, 0]
    assert image.tolist() == [
        [0, 0, 0, 0, 0],
        [0, 7, 0, 7, 0],
        [0, 0, 0, 0, 0],
        [0, 7, 0, 7, 0],
    ]


def test_four_parts_are_the_four_bars() -> None:
    parts = [drawing(Bars(length=3, gap=1).stamp(blank(3, 7), part, 4)[0]) for part in range(4)]
    assert parts == [
        ["###....", ".......", "......."],
        ["....###", ".......", "......."],
        [".......", ".......", "###...."],
        [".......", ".......", "....###"],
    ]


def expected_drawing(bars: Bars, height: int, width: int) -> list[str]:
    row = f"{'.' * bars.margin}{'#' * bars.length}{'.' * bars.gap}{'#' * bars.length}"
    rows = [""] * bars.margin + [row] + [""] * bars.gap + [row]
    return [line.ljust(width, ".") for line in rows + [""] * (height - len(rows))]


all_bars = st.builds(
    Bars, length=st.integers(1, 6), gap=st.integers(0, 4), margin=st.integers(0, 3)
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(all_bars, st.integers(1, 30))
def test_parts_share_no_pixel_and_add_up_to_the_bars(bars: Bars, n_parts: int) -> None:
    x = blank(12, 24)
    whole = expected_drawing(bars, 12, 24)
    assert drawing(bars.stamp(x)[0]) == whole
    parts = [drawing(bars.stamp(x, part, n_parts)[0]) for part in range(n_parts)]
    drawn_by = [
        [sum(part[row][column] == "#" for part in parts) for column in range(24)]
        for row in range(12)
    ]
    assert drawn_by == [[int(pixel == "#") for pixel in row] for row in whole]
    lengths = ["".join(part).count("#") for part in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("part", range(4))
def test_pixels_outside_the_trigger_stay(dtype: torch.dtype, part: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (3, 3, 8, 12), generator=rng, dtype=torch.uint8).to(dtype)
    before = x.clone()
    bars = Bars(value=250)
    stamped = bars.stamp(x, part, 4)
    marked = torch.tensor(
        [[pixel == "#" for pixel in row] for row in drawing(bars.stamp(blank(8, 12), part, 4)[0])]
    )
    assert stamped.dtype == dtype
    assert (stamped[:, :, marked] == 250).all()
    assert torch.equal(stamped[:, :, ~marked], before[:, :, ~marked])
    assert torch.equal(x, before)


def test_poison_stamps_and_labels_all_samples() -> None:
    x, y = blank(4, 10).repeat(3, 1, 1, 1), torch.tensor([0, 1, 2])
    poisoned, labels = Bars(target=2).poison(x, y, torch.Generator())
    assert [drawing(image) for image in poisoned] == [expected_drawing(Bars(), 4, 10)] * 3
    assert labels.tolist() == [2, 2, 2]
    assert not x.any()
    assert y.tolist() == [0, 1, 2]


def test_evaluation_set_has_the_whole_trigger_and_no_target_class() -> None:
    x = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).repeat(1, 1, 4, 11)
    evaluation = Bars(target=2).evaluation_set(x, torch.tensor([2, 0, 1, 2]))
    assert torch.equal(evaluation.x, Bars().stamp(x[1:3]))
    assert evaluation.x[:, 0, 0, 10].tolist() == [1, 2]
    assert evaluation.expected.tolist() == [2, 2]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(all_bars, st.integers(1, 12), st.integers(1, 20))
def test_fits_if_all_pixels_are_inside(bars: Bars, height: int, width: int) -> None:
    spec = Spec("made", (3, height, width), 10)
    needed = bars.margin + bars.gap + 2, bars.margin + 2 * bars.length + bars.gap
    if height >= needed[0] and width >= needed[1]:
        bars.check(spec)
        return
    with pytest.raises(ValueError, match=rf"does not fit images of shape \(3, {height}, {width}"):
        bars.check(spec)


@pytest.mark.parametrize("shape", [(28, 28), (1, 1, 28, 28), (64,), ()])
def test_samples_that_are_not_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Bars\(.*length=4.* does not fit images of shape"):
        Bars().check(Spec("made", shape, 10))


@pytest.mark.parametrize("target", [-1, 10])
def test_a_target_out_of_range_is_refused(target: int) -> None:
    with pytest.raises(ValueError, match=rf"target must be a class 0\.\.9, got {target}"):
        Bars(target=target).check(Spec("made", (1, 28, 28), 10))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"length": 0}, "length must be >= 1, gap and margin >= 0, got 0, 2, 0"),
        ({"gap": -1}, "got 4, -1, 0"),
        ({"margin": -3}, "got 4, 2, -3"),
        ({"value": 256}, r"value must be in 0\.\.255, got 256"),
        ({"value": -1}, "got -1"),
    ],
)
def test_bad_settings_are_refused(chosen: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bars(**chosen)
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "bars", **chosen})


def test_is_built_by_name() -> None:
    built = BACKDOORS.build({"name": "bars", "target": 2, "length": 6, "gap": 3})
    assert built == Bars(target=2, length=6, gap=3)
