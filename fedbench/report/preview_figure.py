"""Figures of the attack preview: rows of images, or of sequences as lines of symbols.

Words are written out. Symbols with long names, such as packets, become numbered cells, and a list
below the rows names them. Lengths are in points unless stated otherwise.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from fedbench.report.plotting import BLACK, DPI, GRAY, MONO, RED, plot_style, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE, CAPTION = 44, 166  # height of the title; width of a caption, with room for an ellipsis
CAPTION_CHARACTERS, CAPTION_LINE = 29, 11.5  # characters in a line of a caption; its height
IMAGE, IMAGE_GAP, LABEL = 64, 7, 27  # longest side of enlarged images; space beside and below
LABEL_CHARACTER = 4.6  # width of a character below an image
LINE, MIN_ROW, ROW_GAP = 15, 75, 22  # height of a line of symbols, of a row; space below a row
FONT = 8.5  # size of symbols
CHARACTER = 0.602 * FONT  # width in the monospaced font
LINE_WIDTH = 113 * CHARACTER
WORD_CHARACTERS, NAME_CHARACTERS = 20, 55  # longest word in a line, longest name in the list
LONG_NAME = 12  # median length, in characters, from which on symbols become cells
FRAME = "#9a9a9a"
# Paul Tol's "light" scheme, made for black text and color-blind readers, without its reds.
CELL_COLORS = ("#77aadd", "#eedd88", "#dddddd", "#bbcc33", "#99ddff", "#44bb99", "#aaaa00")

T = TypeVar("T")


@dataclass(frozen=True)
class PreviewRow(Generic[T]):
    """Samples with a caption; None leaves a place empty."""

    heading: str
    details: str
    samples: Sequence[T | None]


@dataclass(frozen=True, eq=False)
class LabeledImage:
    """An image and the text below it."""

    pixels: Tensor  # [1 or 3, H, W] uint8
    label: str
    poisoned: bool  # whether the attacker chose the label


@dataclass(frozen=True)
class LabeledSequence:
    """A sequence of symbols and the symbol to predict after it."""

    symbols: Sequence[str]
    changed: Sequence[bool]  # which symbols the attacker put there
    label: str | None  # None: the prediction is not scored
    poisoned: bool  # whether the attacker chose the label


@plot_style()
def image_figure(title: str, rows: Sequence[PreviewRow[LabeledImage]]) -> Figure:
    """Draw the images of each row side by side, with their labels below."""
    figure, axes = _page(title, "Below each image: true label → label assigned by the attacker")
    shape = next(image.pixels.shape for row in rows for image in row.samples if image)
    width, height = image_size(*shape[1:])
    for i, row in enumerate(rows):
        top = TITLE + i * (height + LABEL)
        _write_caption(axes, row, top, height + LABEL)
        for j, image in enumerate(row.samples):
            if image is not None:
                left = CAPTION + j * (width + IMAGE_GAP)
                _draw_image(axes, image, (left, left + width, top + height, top))
    return figure


def image_size(height: int, width: int) -> tuple[float, float]:
    """Width and height on the page; an image pixel is a square of n x n pixels of the PNG."""
    n = max(IMAGE * DPI // 72 // max(height, width), 1)
    return n * width * 72 / DPI, n * height * 72 / DPI


def _draw_image(axes: Axes, image: LabeledImage, extent: tuple[float, float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    left, right, bottom, top = extent
    pixels = image.pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).numpy()
    axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", clip_on=False)
    frame = Rectangle((left, top), right - left, bottom - top, fill=False, ec=FRAME, lw=0.5)
    axes.add_patch(frame).set_clip_on(False)
    color = RED if image.poisoned else BLACK
    n = max(int((right - left + IMAGE_GAP) / LABEL_CHARACTER), 1)  # characters that fit
    lines = (
        [image.label] if len(image.label) <= n else image.label.replace(" → ", "\n→ ").split("\n")
    )
    for i, line in enumerate(lines):
        y = bottom + 11 + 9 * i
        axes.text((left + right) / 2, y, printable(line, n), size=8, color=color, ha="center")


@plot_style()
def sequence_figure(title: str, rows: Sequence[PreviewRow[LabeledSequence]]) -> Figure:
    """Draw the end of each sequence in a line, followed by the symbol to predict."""
    subtitle = "Each line: end of a sample → next symbol. Red: chosen by the attacker"
    figure, axes = _page(title, subtitle)
    shown = [sequence for row in rows for sequence in row.samples if sequence is not None]
    writer = SymbolWriter(axes, number_symbols(shown))
    end = CAPTION + min(max(sum(map(writer.advance, s.symbols)) for s in shown), LINE_WIDTH)
    top: float = TITLE
    for row in rows:
        height = max(len(row.samples) * LINE, MIN_ROW)
        _write_caption(axes, row, top, height)
        for i, sequence in enumerate(row.samples):
            if sequence is not None:
                writer.write_sequence(sequence, end, top + 5.5 + i * LINE)
        top += height + ROW_GAP
    writer.write_list(top + 8)
    return figure


@dataclass(frozen=True, eq=False)
class SymbolWriter:
    """Writes symbols as words, or as numbered cells if `numbers` is not empty."""

    axes: Axes
    numbers: Mapping[str, int]  # symbol -> number in its cell

    def advance(self, symbol: str) -> float:
        """Width of a symbol with the space after it."""
        n = 3 if self.numbers else len(printable(symbol, WORD_CHARACTERS))
        return CHARACTER * (n + 1)

    def write_sequence(self, sequence: LabeledSequence, end: float, y: float) -> None:
        """Write a sequence from right to left, as far as there is room, and what follows it."""
        left = end
        for symbol, changed in zip(sequence.symbols[::-1], sequence.changed[::-1], strict=True):
            left -= self.advance(symbol)
            if left < CAPTION - 0.1:  # tolerate rounding: the longest line fits exactly
                self._write("…", left + self.advance(symbol) - 2 * CHARACTER, y, color=GRAY)
                break
            self.write(symbol, left, y, changed)
        self._write("→", end + CHARACTER / 2, y, color=GRAY)
        if sequence.label is None:
            self._write("not scored", end + 3 * CHARACTER, y, color=GRAY)
        else:
            self.write(sequence.label, end + 3 * CHARACTER, y, sequence.poisoned)

    def write(self, symbol: str, left: float, y: float, by_attacker: bool = False) -> None:
        """Write a symbol; the attacker's words are red and bold, the cells framed in red."""
        from matplotlib.patches import Rectangle

        weight = "bold" if by_attacker else "normal"
        if not self.numbers:
            color, word = RED if by_attacker else BLACK, printable(symbol, WORD_CHARACTERS)
            self._write(word, left, y, color=color, weight=weight)
        else:
            number = self.numbers[symbol]
            self._write(str(number), left + 1.5 * CHARACTER, y, weight=weight, ha="center")
            fill = CELL_COLORS[(number - 1) % len(CELL_COLORS)], 0.6  # with opacity
            corner = left - CHARACTER / 4, y - LINE / 2 + 0.5
            edge, width = (RED, 1.5) if by_attacker else (FRAME, 0.5)
            cell = Rectangle(corner, 3.5 * CHARACTER, LINE - 1, fc=fill, ec=edge, lw=width)
            self.axes.add_patch(cell).set_clip_on(False)

    def write_list(self, top: float) -> None:
        """Name the symbols of all cells, in three columns."""
        names = [printable(symbol, NAME_CHARACTERS) for symbol in self.numbers]
        column = CHARACTER * (max(map(len, names), default=0) + 8)
        n_lines = math.ceil(len(names) / 3)
        if names:
            self.axes.text(0, top, "Symbols, most frequent first", size=10, weight="bold")
        for i, (symbol, name) in enumerate(zip(self.numbers, names, strict=True)):
            left, y = i // n_lines * column, top + (i % n_lines + 1) * LINE
            self.write(symbol, left, y)
            self._write(name, left + 5 * CHARACTER, y)

    def _write(self, text: str, left: float, y: float, **style: Any) -> None:
        self.axes.text(left, y, text, size=FONT, family=MONO, va="center_baseline", **style)


def number_symbols(sequences: Sequence[LabeledSequence]) -> dict[str, int]:
    """Number the visible symbols by frequency, from 1 on; empty if most names are short."""
    n_visible = int(LINE_WIDTH // (4 * CHARACTER))
    seen = Counter(symbol for sequence in sequences for symbol in sequence.symbols[-n_visible:])
    seen.update(sequence.label for sequence in sequences if sequence.label is not None)
    if statistics.median(map(len, seen)) < LONG_NAME:
        return {}
    ordered = sorted(seen, key=lambda name: (-seen[name], name))
    return {name: number for number, name in enumerate(ordered, start=1)}


def _page(title: str, subtitle: str) -> tuple[Figure, Axes]:
    """Make a figure to draw on in points, from the top left; save_png fits the page to it."""
    from matplotlib.figure import Figure

    figure = Figure((1, 1))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 72), ylim=(72, 0))
    axes.set_axis_off()
    axes.text(0, 8, printable(title), size=13, weight="bold")
    axes.text(0, 24, subtitle, size=8.5, color=GRAY)
    return figure, axes


def _write_caption(axes: Axes, row: PreviewRow[T], top: float, height: float) -> None:
    """Write a caption on the left of a row, cut to its height."""
    n_lines = max(int((height - 14) // CAPTION_LINE), 1)
    details = printable(row.details)
    lines = textwrap.wrap(details, CAPTION_CHARACTERS, max_lines=n_lines, placeholder=" …")
    axes.text(0, top + 8, printable(row.heading), size=10, weight="bold")
    for i, line in enumerate(lines):
        axes.text(0, top + 22 + i * CAPTION_LINE, line, size=8, color=GRAY)
