"""Who holds what: a run's training samples by class and client, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedbench.config import SPLIT_BY, RunConfig
from fedbench.data import Dataset, Sequences, Spec
from fedbench.metrics import IGNORED
from fedbench.report.picture import BLACK, GREY, RED, legible
from fedbench.results.storage import write_atomically

if TYPE_CHECKING:  # it imports Lightning, which takes seconds
    from fedbench.engine.population import Population

PARTITION_FILE = "partition.png"  # in a run directory
MAX_CLIENTS, MAX_CLASSES = 100, 20  # that have a column and a row of their own
MARGIN, HEAD, BARS, ROW, FOOT = 24, 80, 56, 26, 76  # pixels; HEAD: from top to bars
WIDTH, NARROW, WIDE = 1100, 20, 60  # of all columns about, and of one at least and at most
LEGEND = 310  # its width
NAME = 40  # characters of a class's name, at most
EMPTY, BAR = (0xF2, 0xF2, 0xF2), (0xB9, 0xBF, 0xC9)
SHADES = (0xE2, 0xED, 0xF8), (0x50, 0x89, 0xC0), (0x0A, 0x2A, 0x5C)  # of few samples, .., of many
DARK = 0.55  # share of the largest count from which on numbers are white


Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, eq=False)
class Holdings:
    """Training samples by class and client; of sequences, the symbols to predict."""

    names: Sequence[str]  # of the classes
    counts: Tensor  # [classes, N]
    others: Tensor | None  # [N] of all other classes, if there are any
    malicious: Sequence[bool]  # [N]

    @property
    def totals(self) -> Tensor:
        """Each client's samples [N]."""
        total = self.counts.sum(dim=0)
        return total if self.others is None else total + self.others


def holdings(population: Population) -> Holdings:
    """What the first clients of a pool hold: of all classes, or of those most frequent there."""
    data, shards = population.dataset, population.shards[:MAX_CLIENTS]
    attackers = {*population.malicious} if population.attack.active else set()
    malicious = [client in attackers for client in range(len(shards))]
    counts = count(data.y_train, shards, data.n_classes)
    known, classes, others = names_of(data), torch.arange(data.n_classes), None
    if data.n_classes > MAX_CLASSES:
        classes = counts.sum(dim=1).argsort(descending=True, stable=True)[:MAX_CLASSES]
        others = counts.sum(dim=0) - counts[classes].sum(dim=0)
    names = [known.get(i, str(i)) for i in classes.tolist()]
    return Holdings(names, counts[classes], others, malicious)


def count(labels: Tensor, shards: Sequence[Tensor], n_classes: int) -> Tensor:
    """How often each label occurs with each client [C, N]; labels [n] or [n, T], shards indices."""
    sizes = torch.tensor([len(shard) for shard in shards])
    samples = torch.cat([*shards]).to(labels.device)
    held = labels.reshape(len(labels), -1)[samples].cpu()  # [samples, 1 or T]
    clients = torch.arange(len(shards)).repeat_interleave(sizes)[:, None].expand_as(held)
    counted = held != IGNORED
    pairs = clients[counted] * n_classes + held[counted]
    return torch.bincount(pairs, minlength=len(shards) * n_classes).view(len(shards), -1).T


def names_of(data: Dataset) -> dict[int, str]:
    """What people call the classes, other than by number: words by themselves."""
    return {i: word for word, i in data.vocabulary.items()} if isinstance(data, Sequences) else {}


def write_picture(population: Population, folder: Path) -> None:
    """Draws what the clients of a run hold, once; the same command would draw the same again."""
    path = folder / PARTITION_FILE
    if not path.exists():
        table, config = holdings(population), population.config
        spec = population.dataset.spec
        picture = Picture(table, heading(config, spec), about(config, spec))
        write_atomically(path, lambda file: picture.draw().save(file, "PNG"))


def heading(config: RunConfig, spec: Spec) -> str:
    key = SPLIT_BY.get(config.partition)
    setting = f"{key}={getattr(config, key):g}, " if key else ""
    setting += f"pool={config.pool_size}, seed={config.seed}"
    return f"{spec.name}, {config.partition}, {setting}"


def about(config: RunConfig, spec: Spec) -> str:
    what = "symbols to predict" if spec.is_sequences else "samples by class"
    line = f"Held for training by each client: {what}"
    if config.pool_size > MAX_CLIENTS:
        line += f"; the first {MAX_CLIENTS} of {config.pool_size:,} clients"
    return line


class Picture:
    """A heat map: rows are classes, columns clients; above each column a bar, all that it holds."""

    def __init__(self, table: Holdings, title: str, subtitle: str) -> None:
        self.table, self.title, self.subtitle = table, title, subtitle
        self.names = [legible(name, NAME) for name in table.names]
        self.names += [] if table.others is None else ["others"]
        self.large, self.medium, self.small = map(ImageFont.load_default, (20, 13, 11))
        self.most = max(int(table.counts.max()), 1)

    @cached_property
    def left(self) -> int:
        """Where the cells begin: beside the longest name."""
        longest = max(self.medium.getlength(name) for name in [*self.names, "client"])
        return MARGIN + int(longest) + 10

    @cached_property
    def column(self) -> int:
        return min(max(WIDTH // self.table.counts.shape[1], NARROW), WIDE)

    @cached_property
    def size(self) -> tuple[int, int]:
        right = self.cell(0, self.table.counts.shape[1])[0]
        title = MARGIN + int(self.large.getlength(self.title))
        subtitle = MARGIN + int(self.medium.getlength(self.subtitle))
        bottom = self.cell(len(self.names), 0)[1]
        return max(right, title, subtitle, self.left + LEGEND) + MARGIN, bottom + FOOT

    def cell(self, row: int, column: int) -> tuple[int, int, int, int]:
        """The box of a cell: left, top, right, bottom, all of them inside."""
        left, top = self.left + column * self.column, HEAD + BARS + 4 + row * ROW
        if row >= len(self.table.names):
            top += 6  # the other classes stand apart
        return left, top, left + self.column - 2, top + ROW - 2

    def draw(self) -> Image.Image:
        picture = Image.new("RGB", self.size, "white")
        pen = ImageDraw.Draw(picture)
        pen.text((MARGIN, MARGIN + 14), self.title, BLACK, self.large, "ls")
        pen.text((MARGIN, MARGIN + 36), self.subtitle, GREY, self.medium, "ls")
        for row, name in enumerate(self.names):
            middle = self.cell(row, 0)[1] + ROW / 2
            pen.text((self.left - 8, middle), name, BLACK, self.medium, "rm")
        self._bars(pen)
        self._cells(pen)
        self._clients(pen)
        self._legend(pen)
        return picture

    def _bars(self, pen: ImageDraw.ImageDraw) -> None:
        totals: list[int] = self.table.totals.tolist()
        bottom, font = HEAD + BARS, self._font(totals)
        pen.text((self.left - 8, bottom), "total", GREY, self.medium, "rs")
        for column, total in enumerate(totals):
            left, _, right, _ = self.cell(0, column)
            top = bottom - (BARS - 16) * total / max(*totals, 1)
            pen.rectangle((left, top, right, bottom), BAR)
            self._number(pen, total, (left, top - 15, right, top - 1), GREY, font)

    def _cells(self, pen: ImageDraw.ImageDraw) -> None:
        counts: list[list[int]] = self.table.counts.tolist()
        font = self._font([n for row in counts for n in row])
        for row, held in enumerate(counts):
            for column, n in enumerate(held):
                box, share = self.cell(row, column), n / self.most
                pen.rectangle(box, shade(share) if n else EMPTY)
                if n:
                    self._number(pen, n, box, "white" if share > DARK else BLACK, font)
        if self.table.others is not None:
            # Without a shade: all others together would leave none to the classes above.
            others: list[int] = self.table.others.tolist()
            font = self._font(others)
            for column, n in enumerate(others):
                self._number(pen, n, self.cell(len(counts), column), GREY, font)

    def _clients(self, pen: ImageDraw.ImageDraw) -> None:
        top = self.cell(len(self.names), 0)[1] + 2
        pen.text((self.left - 8, top + 8), "client", GREY, self.medium, "rm")
        for client, malicious in enumerate(self.table.malicious):
            left, _, right, _ = self.cell(0, client)
            if malicious:
                pen.rectangle((left, top, right, top + 16), RED)
            colour = "white" if malicious else BLACK
            pen.text(((left + right + 1) / 2, top + 8), str(client), colour, self.small, "mm")

    def _legend(self, pen: ImageDraw.ImageDraw) -> None:
        x, y = self.left, self.size[1] - MARGIN - 12
        scale = [shade(i / 119) for i in range(120)]
        for label, colours in (("0", [EMPTY] * 14), ("1", scale)):
            pen.text((x, y + 6), label, GREY, self.small, "lm")
            x += int(self.small.getlength(label)) + 5
            for i, colour in enumerate(colours):
                pen.line((x + i, y, x + i, y + 12), colour)
            x += len(colours) + 5
        pen.text((x, y + 6), str(self.most), GREY, self.small, "lm")
        if any(self.table.malicious):
            x += int(self.small.getlength(str(self.most))) + 16
            pen.rectangle((x, y, x + 14, y + 12), RED)
            pen.text((x + 20, y + 6), "malicious", GREY, self.small, "lm")

    def _font(self, numbers: Sequence[int]) -> Font:
        """The largest font in which all numbers fit into a cell, or the smallest."""
        fonts = [ImageFont.load_default(size) for size in (13, 11, 10, 9)]
        longest = "8" * len(str(max(numbers)))
        fit = (font for font in fonts if font.getlength(longest) <= self.column - 2)
        return next(fit, fonts[-1])

    def _number(
        self,
        pen: ImageDraw.ImageDraw,
        n: int,
        box: tuple[float, float, float, float],
        colour: str,
        font: Font,
    ) -> None:
        """A number in the middle of a box, if there is room for it, rounded if need be."""
        left, top, right, bottom = box
        text = str(n)
        if font.getlength(text) > self.column - 2:
            text = rounded(n)
        if font.getlength(text) <= self.column - 1:
            pen.text(((left + right + 1) / 2, (top + bottom + 1) / 2), text, colour, font, "mm")


def shade(share: float) -> tuple[int, int, int]:
    """The colour of a share 0..1 of the largest count: the darker the more."""
    low, middle, high = SHADES
    start, end = (low, middle) if share < 0.5 else (middle, high)
    part = 2 * share - (share >= 0.5)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
    return red, green, blue


def rounded(n: int) -> str:
    """A number from 1000 on in three or four characters: 1234 as 1.2k, 56789 as 57k."""
    value, unit = (n / 1e3, "k") if n < 999_500 else (n / 1e6, "M")
    return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
