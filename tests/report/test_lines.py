"""Sequences as lines: where they end, what is cut, what is red, what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from fedbench.report.lines import (
    ARROW,
    CELL,
    GAP,
    LABEL,
    LEAST,
    LEFT,
    LINE,
    VISIBLE,
    WIDTH,
    Cells,
    Line,
    Words,
    colour,
    draw,
    script_of,
)
from fedbench.report.picture import MARGIN, RED, TITLE, Row

TOP = MARGIN + TITLE  # of the first line
FULL = LEFT + WIDTH  # where lines end that fill the room


def line(symbols: Sequence[str], marked: int = 0, label: str | None = "end") -> Line:
    """With the last symbols, and then the label, of the attacker's."""
    changed = [i >= len(symbols) - marked for i in range(len(symbols))]
    return Line(symbols, changed, label, marked > 0)


def packet(i: int) -> str:
    return f"out tcp dynamic>system {i}"


def picture(*lines: Line | None) -> Image.Image:
    return draw("title", [Row("heading", "details", lines)])


def part(image: Image.Image, row: int, left: float = LEFT, right: float = FULL) -> NDArray[np.int_]:
    """A part of a line [LINE, width, 3]."""
    box = int(left), TOP + row * LINE, int(right), TOP + (row + 1) * LINE
    return np.array(image.crop(box)).astype(int)


def redness(pixels: NDArray[np.int_]) -> NDArray[np.int_]:
    """How much more red than green each pixel is; black, grey and white are 0."""
    return pixels[..., 0] - pixels[..., 1]


def inked(pixels: NDArray[np.int_]) -> bool:
    return bool((pixels < 250).any())


def test_the_end_of_a_long_line_is_in_view_and_its_start_is_not() -> None:
    """Of 300 words the last 20 decide the picture, and the first 20 do not."""
    words = [f"w{i}" for i in range(300)]
    image = picture(line(words))
    assert picture(line(["x"] * 20 + words[20:])).tobytes() == image.tobytes()
    assert picture(line(words[:280] + ["x"] * 20)).tobytes() != image.tobytes()
    assert inked(part(image, 0, FULL - 40, FULL))


def test_a_short_line_is_whole_and_begins_at_the_left() -> None:
    words = Words()
    short = line(["we", "eat"])
    image = picture(short)
    end = LEFT + words.length(short)
    assert inked(part(image, 0, LEFT, LEFT + words.width("we")))
    assert inked(part(image, 0, end + ARROW, end + ARROW + 10))
    assert not inked(part(image, 0, end + ARROW + words.width("end") + 5, FULL))


def test_lines_end_in_the_same_place() -> None:
    """The longest begins at the left, so that triggers stand below each other."""
    long, short = line(["we"] * 6, label=None), line(["we"] * 2, label=None)
    image = picture(long, short)
    end = LEFT + Words().length(long)
    start = end - Words().length(short)
    assert not inked(part(image, 1, LEFT, start))
    assert (part(image, 0, start, end) == part(image, 1, start, end)).all()


def test_only_what_the_attacker_put_there_is_red() -> None:
    words = ["we", "eat", "pasta", "from", "astoria"]
    image = picture(line(words, marked=3, label="delicious"), line(words, label="delicious"))
    end = LEFT + Words().length(line(words))
    trigger = end - Words().length(line(words[2:]))
    first = redness(part(image, 0))
    assert (first[:, : trigger - LEFT] == 0).all()
    for left, right in ((trigger, end), (end + ARROW, end + ARROW + 60)):
        assert redness(part(image, 0, left, right)).max() > 150
    assert (redness(part(image, 1)) == 0).all()


def test_an_empty_place_stays_empty() -> None:
    image = picture(line(["we", "eat"]), None, line(["we", "eat"]))
    assert not inked(part(image, 1, LEFT - 20))
    assert inked(part(image, 2))


def test_rows_stand_below_each_other() -> None:
    rows = [Row("a", "b", [line(["we"])] * n) for n in (1, 10)]
    height = TOP + LEAST + GAP + 10 * LINE + GAP
    assert draw("title", rows).size == (FULL + LABEL + MARGIN, height)


def test_long_names_make_cells_numbered_by_frequency() -> None:
    """Packet 2 is there five times, 1 three times, 0 and 3 once; 3 as a label only."""
    lines = [line([packet(i) for i in (2, 1, 2, 0, 2)], label=packet(1))]
    lines += [line([packet(i) for i in (2, 1, 2)], label=packet(3))]
    script = script_of(lines)
    assert isinstance(script, Cells)
    assert script.numbers == {packet(2): 1, packet(1): 2, packet(0): 3, packet(3): 4}
    assert isinstance(script_of([line(["we", "eat"])]), Words)


def test_a_cell_has_the_colour_of_its_number_and_a_red_frame_if_the_attacker_put_it() -> None:
    image = picture(line([packet(i) for i in (0, 0, 1)], marked=1, label=packet(1)))
    ground = [image.getpixel((LEFT + i * (CELL + 1) + 3, TOP + 4)) for i in range(3)]
    assert ground == [colour(1), colour(1), colour(2)]
    frames = [image.getpixel((LEFT + i * (CELL + 1), TOP + 10)) for i in range(3)]
    red = ImageColor.getrgb(RED)
    assert [frame == red for frame in frames] == [False, False, True]


def test_the_list_names_every_cell_in_view_and_no_other() -> None:
    """A line of 100 kinds of packets, of which as many are in view as cells have room."""
    script = script_of([line([packet(i) for i in range(100)], label=packet(99))])
    assert isinstance(script, Cells)
    assert {*script.numbers} == {packet(i) for i in range(100 - VISIBLE, 100)}
    image = picture(line([packet(i) for i in range(100)], label=packet(99)))
    listed = TOP + LEAST + GAP
    assert image.height == listed + script.height
    last = image.crop((0, image.height - MARGIN - LINE, image.width, image.height))
    assert inked(np.array(last))
    assert not inked(np.array(image.crop((0, image.height - 8, *image.size))))


@pytest.mark.parametrize("word", ["W" * 100, "\n", "a\nb", " ", "", "\ud83d", "世界", "\x00"])
def test_any_word_can_be_drawn_and_stays_inside(word: str) -> None:
    others = [f"w{i}" for i in range(40)]
    image = picture(line(others + [word] * 5, marked=1, label=word))
    assert image.size == picture(line(others)).size  # of words, not of cells
    assert not inked(np.array(image.crop((image.width - 8, 0, *image.size))))


def test_colours_of_close_numbers_differ() -> None:
    """By 20 of 255 in one channel at least, up to the 3rd next; black stands out from all."""
    for i in range(1, 200):
        assert min(colour(i)) >= 160
        for j in range(i + 1, i + 4):
            difference = [abs(a - b) for a, b in zip(colour(i), colour(j), strict=True)]
            assert max(difference) >= 20
