"""Preview figures: where images and symbols stand, what is cut, what is red, what numbers mean."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from fedbench.report.plotting import BLACK, GRAY, MONO, RED, save_png
from fedbench.report.preview_figure import (
    CAPTION,
    CELL_COLORS,
    CHARACTER,
    LINE,
    LINE_WIDTH,
    NAME_CHARACTERS,
    TITLE,
    WORD_CHARACTERS,
    LabeledImage,
    LabeledSequence,
    PreviewRow,
    image_figure,
    image_size,
    number_symbols,
    sequence_figure,
)

CELL = 3.5 * CHARACTER
N_VISIBLE = int(LINE_WIDTH // (4 * CHARACTER))  # cells in a line
FULL = CAPTION + LINE_WIDTH - CHARACTER  # where the longest lines end


def sequence(symbols: Sequence[str], marked: int = 0, label: str | None = "end") -> LabeledSequence:
    """A sequence whose last `marked` symbols, and then the label, are the attacker's."""
    changed = [i >= len(symbols) - marked for i in range(len(symbols))]
    return LabeledSequence(symbols, changed, label, marked > 0)


def packet(i: int) -> str:
    return f"out tcp dynamic>system {i}"


def image(
    label: str = "1", poisoned: bool = False, shape: Sequence[int] = (1, 2, 2)
) -> LabeledImage:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, tuple(shape), generator=rng, dtype=torch.uint8)
    return LabeledImage(pixels, label, poisoned)


def draw(*sequences: LabeledSequence | None) -> Figure:
    return sequence_figure("title", [PreviewRow("heading", "details", sequences)])


def draw_images(*images: LabeledImage | None) -> Figure:
    return image_figure("title", [PreviewRow("heading", "details", images)])


def texts(figure: Figure) -> list[Text]:
    return [*figure.axes[0].texts]


def line(figure: Figure, i: int = 0) -> list[Text]:
    """The texts of a line of symbols, from left to right, without captions."""
    y = TITLE + 5.5 + i * LINE
    found = [
        t for t in texts(figure) if t.get_position()[1] == y and t.get_position()[0] > CAPTION / 2
    ]
    return sorted(found, key=lambda text: text.get_position()[0])


def words(figure: Figure, i: int = 0) -> list[str]:
    return [text.get_text() for text in line(figure, i)]


def cells(figure: Figure) -> list[Rectangle]:
    return [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that overlap by more than a pixel."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    return [
        (a, b)
        for i, (a, box) in enumerate(boxes)
        for b, other in boxes[:i]
        if min(box.x1, other.x1) - max(box.x0, other.x0) > 1
        and min(box.y1, other.y1) - max(box.y0, other.y0) > 1
    ]


def rendered(figure: Figure, folder: Path) -> np.ndarray[Any, Any]:
    """The PNG [H, W, 3]; its margin is white."""
    save_png(figure, folder / "a.png")
    with Image.open(folder / "a.png") as png:
        pixels = np.array(png.convert("RGB"))
    margin = pixels.copy()
    margin[20:-20, 20:-20] = 255
    assert (margin == 255).all()
    return pixels


def test_images_are_enlarged_by_whole_factors() -> None:
    """In points, two pixels each; up to 128 pixels a side."""
    assert image_size(28, 28) == (56, 56)
    assert image_size(32, 32) == (64, 64)
    assert image_size(16, 24) == (60, 40)
    assert image_size(64, 64) == (64, 64)
    assert image_size(224, 200) == (100, 112)


def test_pixels_of_images_stay_squares(tmp_path: Path) -> None:
    """In a checkerboard of 28 x 28, black squares of 4 pixels start every 8 pixels."""
    board = (torch.arange(28)[:, None] + torch.arange(28)) % 2 * 255
    figure = draw_images(LabeledImage(board[None].to(torch.uint8), "", False))
    pixels = rendered(figure, tmp_path)[..., 0].astype(int)
    rows = [row for row in pixels if (row == 0).sum() >= 13 * 4]
    assert rows
    for row in rows:
        black = np.flatnonzero(row == 0)
        starts = black[np.diff(black, prepend=-9) > 1]
        assert {*np.diff(starts)[1:]} == {8}  # the frame covers part of the first


@pytest.mark.parametrize("channels", [1, 3])
def test_images_keep_their_pixels_and_stand_in_a_grid(channels: int) -> None:
    shown = [image(str(i), shape=(channels, 8, 8)) for i in range(3)]
    rows = [PreviewRow("a", "b", shown), PreviewRow("c", "d", [None, shown[1]])]
    drawn = image_figure("title", rows).axes[0].images
    assert len(drawn) == 4
    for artist, original in zip(drawn, [*shown, shown[1]], strict=True):
        expected = original.pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()
        assert (artist.get_array() == expected).all()
        assert artist.get_interpolation() == "nearest"
    lefts, tops = zip(*((i.get_extent()[0], i.get_extent()[3]) for i in drawn), strict=True)
    assert lefts[0] < lefts[1] < lefts[2]
    assert lefts[3] == lefts[1]
    assert tops[0] == tops[1] == tops[2] < tops[3]


def test_labels_of_poisoned_images_are_red_and_below_them() -> None:
    figure = draw_images(image("7"), image("7 → 0", poisoned=True))
    labels = {text.get_text(): text for text in texts(figure)}
    assert labels["7"].get_color() == BLACK
    assert labels["7 → 0"].get_color() == RED
    for text, artist in zip(("7", "7 → 0"), figure.axes[0].images, strict=True):
        left, right, bottom, _ = artist.get_extent()
        x, y = labels[text].get_position()
        assert x == (left + right) / 2
        assert y > bottom


def test_titles_and_captions() -> None:
    for figure in (draw(sequence(["we"])), draw_images(image())):
        shown = {text.get_text(): text for text in texts(figure)}
        assert {"title", "heading", "details"} <= {*shown}
        assert shown["title"].get_weight() == shown["heading"].get_weight() == "bold"
        assert shown["details"].get_color() == GRAY
        assert any("attacker" in text for text in shown)


def test_long_captions_are_wrapped_and_cut() -> None:
    row = PreviewRow("heading", "some words " * 60, [image("x", shape=(1, 28, 28))] * 2)
    figure = image_figure("title", [row, row])
    assert not overlapping(figure)
    lines = [text.get_text() for text in texts(figure) if "words" in text.get_text()]
    assert max(map(len, lines)) <= 31
    assert [text.endswith("…") for text in lines].count(True) == 2


@pytest.mark.parametrize("n", [1, 10, 40])
def test_nothing_is_cropped_whatever_the_number_of_samples(n: int, tmp_path: Path) -> None:
    images = [image("3 → 4", shape=(1, 28, 28))] * n
    figure = draw_images(*images)
    assert not overlapping(figure)
    pixels = rendered(figure, tmp_path)
    assert pixels.shape[1] >= 2 * (CAPTION + n * 56)
    lines = draw(*[sequence(["we", "eat"])] * n)
    assert not overlapping(lines)
    assert rendered(lines, tmp_path).shape[0] >= 2 * (TITLE + n * LINE)


def test_the_end_of_a_long_line_is_visible_and_its_start_is_not() -> None:
    """The first symbol that does not fit is replaced by an ellipsis."""
    figure = draw(sequence([f"w{i}" for i in range(300)]))
    ellipsis, *shown = words(figure)
    n = len(shown) - 2
    assert ellipsis == "…"
    assert shown == [*(f"w{i}" for i in range(300 - n, 300)), "→", "end"]
    assert n == LINE_WIDTH // (5 * CHARACTER)
    assert line(figure)[1].get_position()[0] >= CAPTION
    assert line(figure)[-3].get_position()[0] + 4 * CHARACTER == pytest.approx(FULL)


def test_a_short_line_is_whole_and_starts_at_the_left() -> None:
    figure = draw(sequence(["we", "eat"]))
    assert words(figure) == ["we", "eat", "→", "end"]
    positions = [text.get_position()[0] for text in line(figure)]
    assert positions[:2] == pytest.approx([CAPTION, CAPTION + 3 * CHARACTER])


def test_lines_end_in_the_same_place() -> None:
    """So that triggers stand below each other."""
    figure = draw(sequence(["we"] * 6), sequence(["we"] * 2))
    ends = [[text.get_position()[0] for text in line(figure, i)][-4:] for i in range(2)]
    assert ends[0] == ends[1]
    assert line(figure, 0)[0].get_position()[0] == pytest.approx(CAPTION)


def test_words_do_not_overlap() -> None:
    """The font's characters are as wide as assumed, in bold too."""
    figure = draw(sequence(["Wallabies", "eat", "mmmmm", "$x$", "i"], marked=4, label="W" * 20))
    assert not overlapping(figure)
    for text in line(figure):
        if len(text.get_text()) > 2:
            assert text.get_window_extent().width <= len(text.get_text()) * CHARACTER * 100 / 72 + 1


def test_only_the_attacker_s_words_are_red_and_bold() -> None:
    symbols = ["we", "eat", "pasta", "from", "astoria"]
    figure = draw(sequence(symbols, marked=3, label="delicious"), sequence(symbols, label="bread"))
    red = [text.get_text() for text in texts(figure) if text.get_color() == RED]
    assert red == ["astoria", "from", "pasta", "delicious"]
    assert all(text.get_weight() == "bold" for text in line(figure) if text.get_color() == RED)
    plain = {"we", "eat", *symbols, "bread"}
    for i in range(2):
        for text in line(figure, i):
            if text.get_text() in plain and text.get_color() != RED:
                assert (text.get_color(), text.get_weight()) == (BLACK, "normal")


def test_an_empty_place_stays_empty() -> None:
    figure = draw(sequence(["we", "eat"]), None, sequence(["we", "eat"]))
    assert [words(figure, i) for i in range(3)] == [words(figure), [], words(figure)]
    assert words(figure)


def test_a_label_that_is_not_scored_says_so() -> None:
    *_, label = line(draw(sequence(["we", "eat"], label=None)))
    assert (label.get_text(), label.get_color()) == ("not scored", GRAY)


def test_long_names_become_cells_numbered_by_frequency() -> None:
    """Packet 2 is there five times, 1 three times, 0 and 3 once; 3 as a label only."""
    shown = [sequence([packet(i) for i in (2, 1, 2, 0, 2)], label=packet(1))]
    shown += [sequence([packet(i) for i in (2, 1, 2)], label=packet(3))]
    assert number_symbols(shown) == {packet(2): 1, packet(1): 2, packet(0): 3, packet(3): 4}
    assert number_symbols([sequence(["we", "eat"])]) == {}
    figure = draw(*shown)
    assert words(figure, 0) == ["1", "2", "1", "3", "1", "→", "2"]
    assert words(figure, 1) == ["1", "2", "1", "→", "4"]


def test_cells_have_a_color_per_number_and_a_red_frame_if_the_attacker_s() -> None:
    figure = draw(sequence([packet(i) for i in (0, 0, 1)], marked=1, label=packet(2)))
    in_line = [cell for cell in cells(figure) if cell.get_x() > CAPTION - 9 and cell.get_y() < 60]
    in_line.sort(key=Rectangle.get_x)
    assert [to_hex(cell.get_facecolor()) for cell in in_line] == [
        CELL_COLORS[i] for i in (0, 0, 1, 2)
    ]
    assert [to_hex(cell.get_edgecolor()) == RED for cell in in_line] == [False, False, True, True]
    widths = [cell.get_linewidth() for cell in in_line]
    assert widths[0] == widths[1] < widths[2] == widths[3]  # visible without color
    numbers = {text.get_text(): text.get_weight() for text in line(figure)}
    assert (numbers["1"], numbers["2"], numbers["3"]) == ("normal", "bold", "bold")


def test_cells_do_not_overlap() -> None:
    figure = draw(*[sequence([packet(i) for i in range(100)], label=packet(3))] * 3)
    boxes = sorted((cell.get_y(), cell.get_x()) for cell in cells(figure))
    for (y, x), (next_y, next_x) in pairwise(boxes):
        assert next_y > y or next_x >= x + CELL
    assert not overlapping(figure)


def test_the_list_names_every_visible_cell_and_no_other() -> None:
    """A line of 100 kinds of packets, more than fit."""
    figure = draw(sequence([packet(i) for i in range(100)], label=packet(99)))
    names = [text.get_text() for text in texts(figure) if text.get_text().startswith("out tcp")]
    assert {*names} == {packet(i) for i in range(100 - N_VISIBLE, 100)}
    assert len(names) == N_VISIBLE
    assert words(figure)[0] == "…"
    assert len(words(figure)) == N_VISIBLE + 3  # with the ellipsis, the arrow and the label


def test_listed_cells_show_the_number_of_their_name() -> None:
    figure = draw(sequence([packet(i) for i in (2, 2, 1)], label=packet(2)))
    places = {text.get_text(): text.get_position() for text in texts(figure)}
    listed = {
        text.get_text(): text.get_position()[1]
        for text in texts(figure)
        if text.get_position()[0] < CAPTION and text.get_text().isdigit()
    }
    assert places[packet(2)][1] == listed["1"]
    assert "2" not in listed or places[packet(1)][1] == listed["2"]


def test_words_have_no_list() -> None:
    assert not any("Symbols" in text.get_text() for text in texts(draw(sequence(["we"]))))


@pytest.mark.parametrize(
    "word", ["W" * 100, "\n", "a\nb", " ", "", "\ud83d", "世界", "\x00", "😀", "$a$", "$\\frac$"]
)
def test_any_word_can_be_drawn(word: str, tmp_path: Path) -> None:
    others = [f"w{i}" for i in range(40)]
    figure = draw(sequence(others + [word] * 5, marked=1, label=word))
    assert not cells(figure)
    assert not overlapping(figure)
    assert max(len(text.get_text()) for text in line(figure)) <= WORD_CHARACTERS
    rendered(figure, tmp_path)


def test_any_long_name_can_be_listed(tmp_path: Path) -> None:
    names = ["😀" * 20, "$\\frac$ in a long name", "W" * 100, "a\nb in a long name"]
    figure = draw(sequence(names, label=names[0]))
    assert cells(figure)
    assert not overlapping(figure)
    assert max(len(text.get_text()) for text in texts(figure) if text.get_family() == [MONO]) == (
        NAME_CHARACTERS
    )
    rendered(figure, tmp_path)


def test_black_text_stands_out_from_cells_and_close_numbers_differ() -> None:
    rgb = [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in CELL_COLORS]
    for i, color in enumerate(rgb):
        assert max(color) >= 160
        for step in (1, 2, 3):
            other = rgb[(i + step) % len(rgb)]
            assert max(abs(a - b) for a, b in zip(color, other, strict=True)) >= 20
