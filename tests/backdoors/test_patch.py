"""patch: pixels of the square and its parts, poisoning, and the datasets it fits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.backdoor import BACKDOORS, BackdoorContext
from fedbench.backdoors.patch import CORNERS, Patch
from fedbench.data import Images, Spec
from fedbench.errors import UserError


def pixels(corner: str, size: int, margin: int, height: int, width: int) -> set[tuple[int, int]]:
    """(row, column) of the square, counted inward from its corner."""
    steps = range(margin, margin + size)
    rows = steps if corner.startswith("top") else [height - 1 - step for step in steps]
    columns = steps if corner.endswith("left") else [width - 1 - step for step in steps]
    return {(row, column) for row in rows for column in columns}


def test_by_hand() -> None:
    # 4 x 5 image, size 2, margin 1 at the bottom right: rows 1 and 2, columns 2 and 3.
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
def test_stamps_the_right_pixels(
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


def test_stamps_other_dtypes() -> None:
    stamped = Patch(size=1).stamp(torch.zeros(2, 1, 3, 3))
    assert stamped.dtype == torch.float32
    assert stamped[:, 0, 2, 2].tolist() == [255, 255]


def test_the_default_is_a_4_x_4_square_at_the_bottom_right() -> None:
    image = Patch().stamp(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    assert image.count_nonzero() == 16
    assert (image[0, 0, 24:, 24:] == 255).all()


@pytest.mark.parametrize(
    ("chosen", "message"),
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
def test_bad_settings_are_refused(chosen: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Patch(**chosen)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        BACKDOORS.build({"name": "patch", **chosen})


@pytest.mark.parametrize("target", [-1, 10, 99])
def test_a_target_out_of_range_is_refused(target: int) -> None:
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
    message = rf"Patch\(.*size={patch.size}.* does not fit images of shape \({shape[0]},"
    with pytest.raises(ValueError, match=message):
        patch.check(Spec("made", shape, 10))


def test_a_square_as_large_as_the_sample_fits() -> None:
    patch = Patch(size=5, margin=3)
    patch.check(Spec("made", (3, 8, 8), 10))
    assert patch.stamp(torch.zeros(1, 3, 8, 8)).count_nonzero() == 3 * 25


def test_is_built_by_name() -> None:
    built = BACKDOORS.build({"name": "patch", "target": 7, "size": 3, "corner": "top_left"})
    assert built == Patch(target=7, size=3, corner="top_left")


def drawn(image: torch.Tensor) -> list[tuple[int, int]]:
    """(row, column) of the nonzero pixels of an image [1, H, W]."""
    return [(row, column) for row, column in image[0].nonzero().tolist()]


def test_four_parts_by_hand() -> None:
    # 16 pixels split into four parts: the four rows of the square.
    x = torch.zeros(1, 1, 6, 6, dtype=torch.uint8)
    for part in range(4):
        assert drawn(Patch(value=1).stamp(x, part, 4)[0]) == [(2 + part, c) for c in (2, 3, 4, 5)]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.integers(1, 5),
    st.sampled_from(CORNERS),
    st.integers(0, 3),
    st.integers(1, 30),
)
def test_parts_share_no_pixel_and_add_up_to_the_square(
    size: int, corner: str, margin: int, n_parts: int
) -> None:
    patch = Patch(size=size, corner=corner, margin=margin)
    x = torch.zeros(1, 1, 8, 9, dtype=torch.uint8)
    parts = [drawn(patch.stamp(x, part, n_parts)[0]) for part in range(n_parts)]
    # Compare lists: a pixel in two parts would appear twice.
    assert sorted(itertools.chain(*parts)) == sorted(pixels(corner, size, margin, 8, 9))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("n_parts", [1, 3, 4, 16, 20])
def test_parts_stamped_one_after_another_are_the_whole(n_parts: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = before = torch.randint(0, 256, (3, 3, 9, 8), generator=rng, dtype=torch.uint8)
    patch = Patch(value=77, margin=1)
    for part in range(n_parts):
        x = patch.stamp(x, part, n_parts)
    assert torch.equal(x, patch.stamp(before))


@pytest.mark.parametrize("n", [0, 5])
def test_poison_stamps_and_labels_all_samples(n: int) -> None:
    x, y = torch.full((n, 1, 3, 3), 9, dtype=torch.uint8), torch.arange(n)
    patch = Patch(size=1, target=2, value=200)
    poisoned, labels = patch.poison(x, y, torch.Generator())
    assert poisoned.dtype == torch.uint8
    assert poisoned.tolist() == [[[[9, 9, 9], [9, 9, 9], [9, 9, 200]]]] * n
    assert labels.dtype == torch.int64
    assert labels.tolist() == [2] * n
    assert (x == 9).all()
    assert y.tolist() == list(range(n))


@pytest.mark.parametrize("target", range(4))
def test_evaluation_set_leaves_out_only_the_target_class(target: int) -> None:
    y = torch.tensor([3, 0, 1, 2, 1, 0, 3, 3])
    x = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1).repeat(1, 1, 2, 2)
    evaluation = Patch(size=1, corner="top_left", target=target).evaluation_set(x, y)
    others = [i for i, label in enumerate(y.tolist()) if label != target]
    assert evaluation.x.tolist() == [[[[255, i], [i, i]]] for i in others]
    assert evaluation.expected.tolist() == [target] * len(others)
    assert x[:, 0, 0, 0].tolist() == list(range(8))


def test_evaluation_set_of_target_samples_is_empty() -> None:
    evaluation = Patch(size=1).evaluation_set(
        torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.long)
    )
    assert len(evaluation.x) == len(evaluation.expected) == 0


def test_needs_no_preparation() -> None:
    x, y = torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    data = Images("made", x, y, x, y, n_classes=10, mean=0.0, std=1.0)
    patch = Patch()
    nobody = torch.zeros(0, dtype=torch.long)
    assert patch.prepare(BackdoorContext(data, nobody, features=lambda x: x)) is patch
