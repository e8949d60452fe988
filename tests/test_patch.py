"""patch: which pixels the square takes, and which data sets it fits."""

from __future__ import annotations

import pytest
import torch

from fedbench.backdoor import BACKDOORS
from fedbench.backdoors.patch import CORNERS, Patch
from fedbench.data import Spec
from fedbench.errors import UserError


def pixels(corner: str, size: int, margin: int, height: int, width: int) -> set[tuple[int, int]]:
    """(row, column) of the square, counted from its corner's border inwards."""
    steps = range(margin, margin + size)
    rows = steps if corner.startswith("top") else [height - 1 - step for step in steps]
    columns = steps if corner.endswith("left") else [width - 1 - step for step in steps]
    return {(row, column) for row in rows for column in columns}


def test_by_hand() -> None:
    # 4 x 5 pixels, a square of 2, 1 from the bottom and from the right: rows 1 2, columns 2 3.
    image = Patch(size=2, margin=1, value=9).stamp(torch.zeros(1, 1, 4, 5, dtype=torch.uint8))
    assert image[0, 0].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 9, 9, 0],
        [0, 0, 9, 9, 0],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 3, 8, 11), (0, 1, 8, 8)])
def test_stamps_the_named_pixels(
    corner: str, margin: int, size: int, shape: tuple[int, ...]
) -> None:
    patch = Patch(size=size, corner=corner, margin=margin, value=250)
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, shape, generator=rng, dtype=torch.uint8)
    expected = x.clone()
    for row, column in pixels(corner, size, margin, shape[-2], shape[-1]):
        expected[:, :, row, column] = 250
    before = x.clone()
    stamped = patch.stamp(x)
    assert torch.equal(stamped, expected)
    assert stamped.dtype == torch.uint8
    assert torch.equal(x, before)
    assert torch.equal(patch.stamp(stamped), stamped)


def test_stamps_other_types_of_numbers() -> None:
    stamped = Patch(size=1).stamp(torch.zeros(2, 1, 3, 3))
    assert stamped.dtype == torch.float32
    assert stamped[:, 0, 2, 2].tolist() == [255, 255]


def test_the_default_is_the_papers_square() -> None:
    image = Patch().stamp(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    assert image.count_nonzero() == 16
    assert (image[0, 0, 24:, 24:] == 255).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be >= 1, margin >= 0, got 0, 0"),
        ({"size": -2}, "got -2, 0"),
        ({"margin": -1}, "got 4, -1"),
        ({"corner": "middle"}, "corner must be one of top_left, .*, got 'middle'"),
        ({"corner": "left"}, "got 'left'"),
        ({"value": -1}, r"value must be in 0\.\.255, got -1"),
        ({"value": 256}, "got 256"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Patch(**settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "patch", **settings})


@pytest.mark.parametrize("target", [-1, 10, 99])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    with pytest.raises(ValueError, match=rf"target must be a class 0\.\.9, got {target}"):
        Patch(target=target).check(Spec("made", (1, 28, 28), 10))


@pytest.mark.parametrize("target", [0, 9])
def test_the_first_and_the_last_class_can_be_targets(target: int) -> None:
    Patch(target=target).check(Spec("made", (1, 28, 28), 10))


@pytest.mark.parametrize(
    ("patch", "shape"),
    [
        (Patch(size=9), (1, 8, 20)),
        (Patch(size=9), (1, 20, 8)),
        (Patch(size=6, margin=3), (1, 8, 8)),
        (Patch(), (28, 28)),
        (Patch(), (1, 1, 28, 28)),
        (Patch(), (64,)),
    ],
)
def test_samples_it_does_not_fit_are_refused(patch: Patch, shape: tuple[int, ...]) -> None:
    message = rf"Patch\(.*size={patch.size}.* does not fit samples of shape \({shape[0]},"
    with pytest.raises(ValueError, match=message):
        patch.check(Spec("made", shape, 10))


def test_a_square_as_large_as_the_sample_fits() -> None:
    patch = Patch(size=5, margin=3)
    patch.check(Spec("made", (3, 8, 8), 10))
    assert patch.stamp(torch.zeros(1, 3, 8, 8)).count_nonzero() == 3 * 25


def test_is_built_by_name() -> None:
    built = BACKDOORS.build({"name": "patch", "target": 7, "size": 3, "corner": "top_left"})
    assert built == Patch(target=7, size=3, corner="top_left")
