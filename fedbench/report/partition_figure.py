"""Figure of a run's partition: training labels per class and client."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbench.config import RunConfig
from fedbench.data import Dataset, Kind, Sequences
from fedbench.datasets.partition import PARTITIONS
from fedbench.metrics import IGNORED
from fedbench.report.plotting import BLACK, GRAY, RED, plot_style, printable, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PARTITION_FILE = "partition.png"  # in a run directory
MAX_CLIENTS, MAX_CLASSES = 100, 20  # columns and rows of the heat map
MAX_NAME = 48  # characters of a class name
WIDTH, NARROWEST, WIDEST = 10.5, 0.17, 0.8  # inches: all columns, one column at least and at most
ROW, BARS, GAP = 0.24, 0.45, 0.05  # inches: height of a row, of the bars, and between them
DIGIT, LARGEST = 0.64, 9  # width of a digit in em; largest font size of numbers, in points
MAX_NUMBERS = 400  # cells with numbers; more are unreadable, and slow to draw
SHADES = "#e2edf8", "#5089c0", "#0a2a5c"  # few to many labels, evenly spaced in lightness
EMPTY, BAR, MALICIOUS_BAR = "#f2f2f2", "#b9bfc9", "#e08a97"
DARK = 0.55  # fraction of the largest count above which numbers are white


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """Training labels per class and client; for sequences, the symbols to predict."""

    names: Sequence[str]  # [R] classes shown
    counts: Tensor  # [R, N]
    others: Tensor | None  # [N] labels of all other classes; None if every class is shown

    @property
    def totals(self) -> Tensor:
        """Labels per client [N]."""
        total = self.counts.sum(dim=0)
        return total if self.others is None else total + self.others


def label_counts(dataset: Dataset, shards: Sequence[Tensor]) -> LabelCounts:
    """Count the labels of the first clients, for all classes or the most frequent ones."""
    counts = count_labels(dataset.y_train, shards[:MAX_CLIENTS], dataset.n_classes)
    known, classes, others = class_names(dataset), torch.arange(dataset.n_classes), None
    if dataset.n_classes > MAX_CLASSES:
        classes = counts.sum(dim=1).argsort(descending=True, stable=True)[:MAX_CLASSES]
        others = counts.sum(dim=0) - counts[classes].sum(dim=0)
    return LabelCounts([known.get(i, str(i)) for i in classes.tolist()], counts[classes], others)


def count_labels(labels: Tensor, shards: Sequence[Tensor], n_classes: int) -> Tensor:
    """Count each label per client [C, N]; labels are [n] or [n, T], shards index them."""
    held = [labels[shard.to(labels.device)].flatten().cpu() for shard in shards]
    counts = [own[own != IGNORED].bincount(minlength=n_classes) for own in held]
    return torch.stack(counts, dim=1)


def class_names(dataset: Dataset) -> dict[int, str]:
    """Map class numbers to names; empty if classes have numbers only."""
    if dataset.class_names:
        return dict(enumerate(dataset.class_names))
    return symbol_names(dataset) if dataset.kind is Kind.SEQUENCES else {}


def symbol_names(dataset: Dataset) -> dict[int, str]:
    """Map symbol ids to names; empty for samples other than sequences."""
    symbols = dataset.vocabulary if isinstance(dataset, Sequences) else {}
    return {number: symbol for symbol, number in symbols.items()}


def write_partition_figure(
    path: Path,
    config: RunConfig,
    dataset: Dataset,
    shards: Sequence[Tensor],
    malicious: Collection[int],
) -> None:
    """Draw the partition unless the file exists: a resumed run would draw the same."""
    if not path.exists():
        subtitle = "Training samples" if dataset.kind.has_one_label else "Symbols to predict"
        subtitle += " per class and client"
        if len(shards) > MAX_CLIENTS:
            subtitle += f"; the first {MAX_CLIENTS} of {len(shards):,} clients"
        figure = partition_figure(
            label_counts(dataset, shards), malicious, partition_title(config, dataset), subtitle
        )
        save_png(figure, path)


def partition_title(config: RunConfig, dataset: Dataset) -> str:
    """Name the data set and the settings that decide the partition."""
    key = PARTITIONS[config.partition].setting
    setting = f"{key}={getattr(config, key):g}, " if key else ""
    return (
        f"{dataset.name}, {config.partition}, {setting}pool={config.pool_size}, seed={config.seed}"
    )


@plot_style()
def partition_figure(
    table: LabelCounts, malicious: Collection[int], title: str, subtitle: str
) -> Figure:
    """Draw classes x clients as a heat map, with each client's total as a bar above."""
    from matplotlib.figure import Figure

    n_rows, n = table.counts.shape
    n_below = 1.3 if table.others is None else 2.5  # rows below the heat map
    width, height = n * _column_width(n), BARS + GAP + (n_rows + n_below) * ROW  # inches
    top, bottom = 1 - (BARS + GAP) / height, n_below * ROW / height  # of the heat map
    figure = Figure((width, height))  # axes only: save_png adds the text around them
    bars = figure.add_axes((0, 1 - BARS / height, 1, BARS / height), xlim=(0, n))
    cells = figure.add_axes((0, 0, 1, top), xlim=(0, n), ylim=(n_rows + n_below, 0))
    scale = figure.add_axes((1 + 0.2 / width, bottom, 0.13 / width, top - bottom))
    bars.set_title(printable(title), loc="left", size=13, weight="bold", pad=36)
    bars.text(0, 1 + 0.3 / BARS, printable(subtitle), color=GRAY, transform=bars.transAxes)
    _draw_totals(bars, table.totals.tolist(), malicious)
    _draw_counts(cells, table, scale)
    _draw_clients(cells, n_rows + n_below - 1, n, malicious)
    return figure


def _draw_totals(axes: Axes, totals: Sequence[int], malicious: Collection[int]) -> None:
    clients, most = range(len(totals)), max(*totals, 1)
    colors = [MALICIOUS_BAR if client in malicious else BAR for client in clients]
    axes.bar(clients, totals, 1, align="edge", color=colors, ec="white")
    _write_numbers(axes, totals, clients, [n + 0.19 * most for n in totals], [GRAY] * len(totals))
    axes.set_ylim(0, most)
    axes.set_axis_off()
    axes.text(0, 0, "total ", color=GRAY, ha="right")


def _draw_counts(axes: Axes, table: LabelCounts, scale: Axes) -> None:
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    counts, most = table.counts.numpy(), max(int(table.counts.max()), 1)
    n_rows, n = counts.shape
    present = np.ma.masked_equal(counts, 0)
    mesh = axes.pcolormesh(present, cmap=color_map(), vmin=0, vmax=most, edgecolors="white")
    bar = scale.figure.colorbar(mesh, scale, ticks=MaxNLocator(5, integer=True))
    bar.outline.set_visible(False)
    if counts.size <= MAX_NUMBERS:
        rows, clients = counts.nonzero()
        numbers = counts[rows, clients].tolist()
        colors = ["white" if number > DARK * most else BLACK for number in numbers]
        _write_numbers(axes, numbers, clients.tolist(), (rows + 0.5).tolist(), colors)
    names = {row + 0.5: printable(name, MAX_NAME) for row, name in enumerate(table.names)}
    if table.others is not None:
        # Not shaded: the sum of all other classes would dwarf the classes above.
        names[n_rows + 0.75] = "others"
        _write_numbers(axes, table.others.tolist(), range(n), [n_rows + 0.75] * n, [GRAY] * n)
    axes.set_yticks([*names], [*names.values()])


def _draw_clients(axes: Axes, top: float, n: int, malicious: Collection[int]) -> None:
    """Write client numbers, in white on red for malicious clients, and the legend."""
    from matplotlib.patches import Patch, Rectangle

    colors = ["white" if client in malicious else BLACK for client in range(n)]
    for client in sorted({*malicious} & {*range(n)}):
        axes.add_patch(Rectangle((client, top), 1, 0.86, fc=RED, ec="white"))
    _write_numbers(axes, range(n), range(n), [top + 0.43] * n, colors)
    axes.text(0, top + 0.43, "client ", color=GRAY, ha="right", va="center")
    handles = [Patch(color=EMPTY, label="none")]
    if "white" in colors:
        handles.append(Patch(color=RED, label="malicious client"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=2)


def _write_numbers(
    axes: Axes,
    numbers: Sequence[int],
    columns: Sequence[int],
    y: Sequence[float],
    colors: Sequence[str],
) -> None:
    """Write numbers in the middle of columns, all in the largest size in which they fit."""
    texts = [short_number(number) for number in numbers]
    width = 72 * _column_width(int(axes.get_xlim()[1])) - 2.5  # points
    size = min(width / (DIGIT * max(map(len, texts), default=1)), LARGEST)
    for column, row, text, color in zip(columns, y, texts, colors, strict=True):
        axes.text(column + 0.5, row, text, size=size, color=color, ha="center", va="center")


def _column_width(n: int) -> float:
    return min(max(WIDTH / n, NARROWEST), WIDEST)


def color_map() -> Colormap:
    """Colors from few to many labels; masked cells have none."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("labels", SHADES).with_extremes(bad=EMPTY)


def short_number(number: int) -> str:
    """Format a number in at most 4 characters: 1234 as it is, 56789 as 57k."""
    if number < 10_000:
        return str(number)
    value, unit = (number / 1e3, "k") if number < 999_500 else (number / 1e6, "M")
    return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
