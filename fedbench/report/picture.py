"""Rows of images with captions, drawn as one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TILE = 96  # pixels a side up to which images are enlarged
MARGIN, GAP, TITLE, CAPTION, LABEL = 28, 10, 48, 220, 38  # pixels; LABEL: from image to image
LINE, CHARACTERS = 17, 30  # of a caption: a line's pixels, and what it holds at most
MIN_WIDTH = 640  # pixels: room for the title
BLACK, GREY, FRAME, RED = "#181818", "#686868", "#9a9a9a", "#c8102e"
LEGEND = "Below each image: its true label -> the label that the attacker gives it"

Tile = tuple[Tensor, str]  # an image [C, H, W] uint8, and what is written below it
T = TypeVar("T")


@dataclass(frozen=True)
class Row(Generic[T]):
    """Images or the like with a caption; None leaves a place empty."""

    heading: str
    details: str
    tiles: Sequence[T | None]


@dataclass(frozen=True)
class Layout:
    """Where images of height x width are in a picture, in pixels from its left top corner."""

    height: int
    width: int
    n_rows: int
    n_columns: int

    @property
    def tile(self) -> tuple[int, int]:
        """An image's width and height, enlarged by a whole factor: its pixels are squares."""
        factor = max(TILE // max(self.height, self.width), 1)
        return factor * self.width, factor * self.height

    @property
    def size(self) -> tuple[int, int]:
        right, bottom = self.place(self.n_rows, self.n_columns)
        return max(right - GAP + MARGIN, MIN_WIDTH), bottom

    def place(self, row: int, column: int) -> tuple[int, int]:
        """The left top corner of an image."""
        left, top = MARGIN + CAPTION, MARGIN + TITLE
        return left + column * (self.tile[0] + GAP), top + row * (self.tile[1] + LABEL)


def draw(title: str, rows: Sequence[Row[Tile]]) -> Image.Image:
    """The picture: a title, a legend, the rows; the first row has no empty place."""
    height, width = next(tile[0].shape[-2:] for tile in rows[0].tiles if tile)
    layout = Layout(height, width, len(rows), max(len(row.tiles) for row in rows))
    picture = Image.new("RGB", layout.size, "white")
    pen = ImageDraw.Draw(picture)
    write_title(pen, title, LEGEND)
    width, height = layout.tile
    small = ImageFont.load_default(13)
    for i, row in enumerate(rows):
        top = layout.place(i, 0)[1]
        write_caption(pen, row, top, height + LABEL)
        for j, tile in enumerate(row.tiles):
            if tile is not None:
                left = layout.place(i, j)[0]
                pen.rectangle((left - 1, top - 1, left + width, top + height), outline=FRAME)
                picture.paste(_enlarged(tile[0], layout.tile), (left, top))
                pen.text((left + width / 2, top + height + 16), tile[1], BLACK, small, "ms")
    return picture


def write_title(pen: ImageDraw.ImageDraw, title: str, legend: str) -> None:
    pen.text((MARGIN, MARGIN + 6), title, BLACK, ImageFont.load_default(21), "ls")
    pen.text((MARGIN, MARGIN + 26), legend, GREY, ImageFont.load_default(13), "ls")


def write_caption(pen: ImageDraw.ImageDraw, row: Row[T], top: int, height: int) -> None:
    """What a row is, to its left; cut where it is longer than the row is high."""
    pen.text((MARGIN, top), row.heading, BLACK, ImageFont.load_default(15), "lt")
    n_lines, small = max(height // LINE - 2, 1), ImageFont.load_default(13)
    lines = textwrap.wrap(row.details, CHARACTERS, max_lines=n_lines, placeholder=" ...")
    for k, line in enumerate(lines):
        pen.text((MARGIN, top + 18 + LINE * (k + 1)), line, GREY, small, "ls")


def _enlarged(image: Tensor, size: tuple[int, int]) -> Image.Image:
    pixels = image.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def legible(name: str, limit: int) -> str:
    """A name in one line of at most `limit` characters; what cannot be printed is escaped."""
    printed = name if name.isprintable() and name.strip() else repr(name)
    return printed if len(printed) <= limit else f"{printed[: limit - 3]}..."
