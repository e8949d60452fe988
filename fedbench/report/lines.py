"""Rows of sequences with captions, drawn as one picture: each sequence is a line that ends in view.

Words stand as they are. Where symbols have long names, as packets do, each kind is a cell with a
number, and a list below says what the numbers mean.
"""

from __future__ import annotations

import colorsys
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from PIL import Image, ImageDraw, ImageFont

from fedbench.report.picture import (
    BLACK,
    CAPTION,
    FRAME,
    GREY,
    MARGIN,
    RED,
    TITLE,
    Row,
    legible,
    write_caption,
    write_title,
)

LEFT, WIDTH, LABEL = MARGIN + CAPTION, 840, 300  # pixels: left of lines, of a line, of what follows
LINE, GAP, LEAST = 23, 28, 110  # pixels: from line to line, between rows, of a row at least
ARROW, SPACE = 26, 5  # pixels: before what follows, between words
CELL, LIST, NAME = 26, 440, 55  # pixels: of a cell, a column of the list; characters of a name
VISIBLE = WIDTH // (CELL + 1)  # cells in a line, at most
LONG = 12  # characters; if half of the names have as many, symbols are cells
LETTERS = 20  # characters of a word, at most
LEGEND = "Each line is the end of a sample -> what follows it; red: what the attacker put there"


@dataclass(frozen=True)
class Line:
    """A sequence of symbols, and what shall follow it."""

    symbols: Sequence[str]
    changed: Sequence[bool]  # which of them the attacker put in their place
    label: str | None  # the symbol that follows; None: it does not count
    given: bool  # whether the label is the attacker's


def draw(title: str, rows: Sequence[Row[Line]]) -> Image.Image:
    """The picture: a title, a legend, the rows, and what the numbers mean, if there are such."""
    shown = [line for row in rows for line in row.tiles if line is not None]
    script = script_of(shown)
    right = LEFT + min(max(script.length(line) for line in shown), WIDTH)
    tops = [MARGIN + TITLE]
    for row in rows:
        tops.append(tops[-1] + max(len(row.tiles) * LINE, LEAST) + GAP)
    picture = Image.new("RGB", (LEFT + WIDTH + LABEL + MARGIN, tops[-1] + script.height), "white")
    pen = ImageDraw.Draw(picture)
    write_title(pen, title, LEGEND)
    for row, top, end in zip(rows, tops[:-1], tops[1:], strict=True):
        write_caption(pen, row, top, end - top)
        for i, line in enumerate(row.tiles):
            if line is not None:
                _write(pen, script, line, right, top + i * LINE)
    script.explain(pen, tops[-1])
    return picture


def _write(pen: ImageDraw.ImageDraw, script: Script, line: Line, end: int, top: int) -> None:
    """From the end to the left, as far as there is room."""
    right, middle = end, top + LINE / 2
    for symbol, changed in zip(reversed(line.symbols), reversed(line.changed), strict=True):
        left = right - script.width(symbol)
        if left < LEFT:
            pen.text((right, middle), "...", GREY, script.font, "rm")
            break
        script.put(pen, left, top, symbol, changed)
        right = left - script.space
    pen.text((end + ARROW / 2, middle), "->", GREY, script.font, "mm")
    if line.label is None:
        pen.text((end + ARROW, middle), "not counted", GREY, script.font, "lm")
    else:
        script.put(pen, end + ARROW, top, line.label, line.given)


class Script(ABC):
    """How symbols are written."""

    space: int  # pixels between symbols
    height = 0  # pixels of the list of what they mean

    @cached_property
    def font(self) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(14)

    @abstractmethod
    def width(self, symbol: str) -> int: ...

    @abstractmethod
    def put(
        self, pen: ImageDraw.ImageDraw, left: int, top: int, symbol: str, marked: bool
    ) -> None: ...

    def length(self, line: Line) -> int:
        """Pixels of a whole line."""
        return sum(self.width(symbol) + self.space for symbol in line.symbols) - self.space

    def explain(self, pen: ImageDraw.ImageDraw, top: int) -> None:
        """The list of what the symbols mean."""


class Words(Script):
    """Symbols by their names, the attacker's in red and bold."""

    space = SPACE

    def width(self, symbol: str) -> int:
        return round(self.font.getlength(legible(symbol, LETTERS)))

    def put(self, pen: ImageDraw.ImageDraw, left: int, top: int, symbol: str, marked: bool) -> None:
        for shift in range(1 + marked):  # the font that comes with Pillow has no bold one
            place = left + 0.6 * shift, top + LINE / 2
            pen.text(place, legible(symbol, LETTERS), RED if marked else BLACK, self.font, "lm")


class Cells(Script):
    """Symbols by number in the order of `names`, each in a colour, the attacker's framed in red."""

    space = 1

    def __init__(self, names: Sequence[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(names, start=1)}
        self.n_rows = math.ceil(len(names) / 3)  # of the list, in three columns
        self.height = (self.n_rows + 1) * LINE + MARGIN

    def width(self, symbol: str) -> int:
        return CELL

    def put(self, pen: ImageDraw.ImageDraw, left: int, top: int, symbol: str, marked: bool) -> None:
        number = self.numbers[symbol]
        box = left, top + 1, left + CELL - 1, top + LINE - 2
        pen.rectangle(box, colour(number), RED if marked else FRAME, 2 if marked else 1)
        pen.text((left + CELL / 2, top + LINE / 2), str(number), BLACK, self.small, "mm")

    @cached_property
    def small(self) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(12)

    def explain(self, pen: ImageDraw.ImageDraw, top: int) -> None:
        pen.text((MARGIN, top), "symbols, the most frequent here first", GREY, self.font, "lt")
        for i, name in enumerate(self.numbers):
            left = MARGIN + i // self.n_rows * LIST
            y = top + (i % self.n_rows + 1) * LINE
            self.put(pen, left, y, name, marked=False)
            text = legible(name, NAME)
            pen.text((left + CELL + 8, y + LINE / 2), text, BLACK, self.small, "lm")


def script_of(lines: Sequence[Line]) -> Script:
    """Words for short names, else cells, numbered by how often they are in view."""
    seen = Counter(symbol for line in lines for symbol in line.symbols[-VISIBLE:])
    seen.update(line.label for line in lines if line.label is not None)
    if statistics.median(map(len, seen)) < LONG:
        return Words()
    return Cells(sorted(seen, key=lambda name: (-seen[name], name)))


def colour(number: int) -> tuple[int, int, int]:
    """Light, and of another hue than the numbers close to it."""
    hue = number * 0.381966 % 1  # the golden section leaves no two hues close
    red, green, blue = colorsys.hls_to_rgb(hue, 0.84, 0.65)
    return round(255 * red), round(255 * green), round(255 * blue)
