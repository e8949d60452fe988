"""The partition figure: counts against slow oracles, what is drawn where, one file per run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import files
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from test_single_run import config
from torch import Tensor

from fedbench.config import RunConfig
from fedbench.data import Dataset, Images, Sequences
from fedbench.datasets.partition import client_indices
from fedbench.federation import Federation
from fedbench.metrics import IGNORED
from fedbench.plan import Plan
from fedbench.report import partition_figure as module
from fedbench.report.partition_figure import (
    BAR,
    DARK,
    EMPTY,
    MALICIOUS_BAR,
    PARTITION_FILE,
    LabelCounts,
    color_map,
    count_labels,
    label_counts,
    partition_figure,
    partition_title,
    short_number,
    write_partition_figure,
)
from fedbench.report.plotting import BLACK, RED, save_png
from fedbench.single_run import run

VOCABULARY = {f"word{i}": i for i in range(25)}
SMALL = RunConfig(n_clients=6, pmr=0.34)


def sequences(y: Tensor, n_classes: int = 25) -> Sequences:
    return Sequences("talk", y, y, y, y, n_classes, vocabulary=VOCABULARY)


def table(counts: list[list[int]] | Tensor, others: list[int] | None = None) -> LabelCounts:
    counts = torch.as_tensor(counts)
    rest = None if others is None else torch.tensor(others)
    return LabelCounts([f"class {i}" for i in range(len(counts))], counts, rest)


def draw(counts: LabelCounts, malicious: Collection[int] = ()) -> Figure:
    return partition_figure(counts, malicious, "title", "subtitle")


def written(axes: Axes) -> dict[tuple[int, float], tuple[str, str]]:
    """Numbers in the columns: (column, y) -> text and color."""
    placed = {text: text.get_position() for text in axes.texts}
    return {
        (int(x), round(float(y), 2)): (text.get_text(), to_hex(text.get_color()))
        for text, (x, y) in placed.items()
        if x % 1 == 0.5
    }


def luminance(color: tuple[float, ...]) -> float:
    """Relative luminance as WCAG defines it: 0 is black, 1 white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def cell_colors(cells: Axes) -> list[str]:
    """The color of each cell, row by row."""
    (mesh,) = (c for c in cells.collections if isinstance(c, QuadMesh))
    mesh.update_scalarmappable()
    return [to_hex(color) for color in mesh.get_facecolors()]


def test_counts_by_hand() -> None:
    """Labels 0 1 1 2 2 2; client 0 holds the samples 0, 1, 3, client 1 the samples 5, 4, 2."""
    shards = [torch.tensor([0, 1, 3]), torch.tensor([5, 4, 2])]
    assert count_labels(torch.tensor([0, 1, 1, 2, 2, 2]), shards, 4).tolist() == [
        [1, 0],
        [1, 1],
        [1, 2],
        [0, 0],
    ]


def test_ignored_labels_of_sequences_do_not_count() -> None:
    """Client 0 holds (2 0 -), client 1 (2 2 1) and (- - -), where - is IGNORED."""
    y = torch.tensor([[2, 0, IGNORED], [2, 2, 1], [IGNORED] * 3])
    shards = [torch.tensor([0]), torch.tensor([1, 2])]
    assert count_labels(y, shards, 3).tolist() == [[1, 0], [0, 1], [1, 2]]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from([IGNORED, 0, 1, 2, 3]), min_size=2, max_size=2), min_size=1),
    st.data(),
)
def test_counts_equal_a_loop_over_samples(labels: list[list[int]], data: Any) -> None:
    places = st.lists(st.sampled_from(range(len(labels))), max_size=8)
    shards: list[list[int]] = data.draw(st.lists(places, min_size=1, max_size=5))
    tensors = [torch.tensor(shard, dtype=torch.long) for shard in shards]
    counts = count_labels(torch.tensor(labels), tensors, 4)
    for client, shard in enumerate(shards):
        seen = Counter(label for place in shard for label in labels[place])
        assert counts[:, client].tolist() == [seen[label] for label in range(4)]


def test_every_sample_is_counted_once(sample: Dataset) -> None:
    shards = client_indices(SMALL, sample)
    counts = label_counts(sample, shards)
    assert counts.names == [str(i) for i in range(10)]
    assert counts.counts.shape == (10, 6)
    assert counts.totals.tolist() == [len(shard) for shard in shards]
    assert counts.others is None


def test_most_frequent_words_have_rows_and_all_others_share_one() -> None:
    """Word i occurs 25 - i times with client 0, once with client 1: 20 rows, 5 words left over."""
    long = torch.cat([torch.full((25 - i,), i) for i in range(25)])
    y = torch.stack([long, torch.cat([torch.arange(25), torch.full((300,), IGNORED)])])
    counts = label_counts(sequences(y), [torch.tensor([0]), torch.tensor([1])])
    assert counts.names == [f"word{i}" for i in range(20)]
    assert counts.counts.tolist() == [[25 - i, 1] for i in range(20)]
    assert counts.others is not None
    assert counts.others.tolist() == [5 + 4 + 3 + 2 + 1, 5]
    assert counts.totals.tolist() == [325, 25]


def test_few_words_are_all_shown_by_name() -> None:
    data = replace(sequences(torch.tensor([[1, 2]]), 3), vocabulary={"a": 0, "b": 1, "c": 2})
    counts = label_counts(data, [torch.tensor([0])])
    assert (counts.names, counts.counts.tolist(), counts.others) == (
        ["a", "b", "c"],
        [[0], [1], [1]],
        None,
    )


def test_images_of_many_classes_have_numbers() -> None:
    y = torch.tensor([29] * 3 + [7] * 2 + [*range(30)])
    x = torch.zeros(len(y), 1, 2, 2, dtype=torch.uint8)
    letters = Images("letters", x, y, x, y, 30, mean=0.0, std=1.0)
    counts = label_counts(letters, [torch.arange(len(y))])
    assert counts.names == ["29", "7", *(str(i) for i in range(19) if i != 7)]
    assert counts.counts[:, 0].tolist() == [4, 3, *([1] * 18)]
    assert counts.others is not None
    assert counts.others.tolist() == [10]


def test_cells_totals_and_clients_are_where_they_belong() -> None:
    figure = draw(table([[0, 7, 30], [40, 0, 100]], others=[5, 2000, 0]), malicious=[2])
    bars, cells, _ = figure.axes
    inside = {(1, 0.5): "7", (2, 0.5): "30", (0, 1.5): "40", (2, 1.5): "100"}
    others = {(0, 2.75): "5", (1, 2.75): "2000", (2, 2.75): "0"}
    clients = {(i, 3.93): str(i) for i in range(3)}
    numbers = written(cells)
    assert {place: text for place, (text, _) in numbers.items()} == inside | others | clients
    totals = written(bars)
    assert [totals[place][0] for place in sorted(totals)] == ["45", "2007", "130"]
    assert [bar.get_height() for bar in bars.patches] == [45, 2007, 130]
    labels = {
        t.get_text(): p for t, p in zip(cells.get_yticklabels(), cells.get_yticks(), strict=True)
    }
    assert labels == {"class 0": 0.5, "class 1": 1.5, "others": 2.75}
    assert "total" in {text.get_text().strip() for text in bars.texts}
    assert "client" in {text.get_text().strip() for text in cells.texts}


def test_title_and_subtitle() -> None:
    bars = draw(table([[1]])).axes[0]
    assert bars.get_title(loc="left") == "title"
    assert bars.texts[0].get_text() == "subtitle"


def test_more_samples_are_darker() -> None:
    """At most 100: 0 is gray, 1 the lightest blue, 100 the darkest."""
    _, cells, scale = draw(table([[0, 1, 20], [50, 80, 100]])).axes
    found = cell_colors(cells)
    assert found[0] == EMPTY
    assert found[1:] == [to_hex(color_map()(n / 100)) for n in (1, 20, 50, 80, 100)]
    brightness = [luminance(to_rgb(color)) for color in found]
    assert brightness == sorted(brightness, reverse=True)
    assert len({*found}) == 6
    assert scale.get_ylim() == (0, 100)


def test_lightness_falls_evenly() -> None:
    """In CIE lightness L* = 116 Y^(1/3) - 16, which people see as even: within 4 of 100."""
    steps = torch.linspace(0, 1, 21)
    colors = [color_map()(float(step)) for step in steps]
    lightness = torch.tensor([116 * luminance(color) ** (1 / 3) - 16 for color in colors])
    straight = lightness[0] + steps * (lightness[-1] - lightness[0])
    assert (lightness[:-1] > lightness[1:]).all()
    assert (lightness - straight).abs().max() < 4


def test_numbers_stand_out_from_every_shade() -> None:
    for i in range(1001):
        color = "white" if i / 1000 > DARK else BLACK
        levels = sorted((luminance(color_map()(i / 1000)), luminance(to_rgb(color))))
        assert (levels[1] + 0.05) / (levels[0] + 0.05) > 4


def test_numbers_are_white_on_dark_cells() -> None:
    _, cells, _ = draw(table([[1, 55, 56, 100]])).axes
    numbers = written(cells)
    colors = [numbers[column, 0.5][1] for column in range(4)]
    assert colors == [BLACK, BLACK, to_hex("white"), to_hex("white")]


def test_malicious_clients_are_red() -> None:
    """Also if only some of the malicious clients have a column."""
    bars, cells, _ = draw(table([[1, 1, 1, 1]]), malicious=[3, 1, 400]).axes
    marked = [p for p in cells.patches if isinstance(p, Rectangle)]
    assert sorted(patch.get_x() for patch in marked) == [1, 3]
    assert {to_hex(patch.get_facecolor()) for patch in marked} == {RED}
    colors = [to_hex(bar.get_facecolor()) for bar in bars.patches]
    assert colors == [BAR, MALICIOUS_BAR, BAR, MALICIOUS_BAR]
    numbers = written(cells)
    ids = [numbers[client, 1.73][1] for client in range(4)]
    assert ids == [BLACK, to_hex("white"), BLACK, to_hex("white")]
    assert legend(cells) == {"none": EMPTY, "malicious client": RED}


def legend(cells: Axes) -> dict[str, str]:
    box = cells.get_legend()
    assert box is not None
    texts = [text.get_text() for text in box.get_texts()]
    return dict(zip(texts, (to_hex(p.get_facecolor()) for p in box.get_patches()), strict=True))


def test_nothing_is_red_without_malicious_clients() -> None:
    bars, cells, _ = draw(table([[1, 1]])).axes
    assert cells.patches[:] == []
    assert {to_hex(bar.get_facecolor()) for bar in bars.patches} == {BAR}
    assert legend(cells) == {"none": EMPTY}


@pytest.mark.parametrize("n", [1, 6, 30, 100])
@pytest.mark.parametrize("most", [1, 99, 999, 98_765, 123_456_789])
def test_no_number_leaves_its_column(n: int, most: int) -> None:
    figure = draw(table(torch.full((10, n), most), others=[20 * most] * n), range(n))
    figure.draw_without_rendering()
    bars, cells, _ = figure.axes
    for axes, n_rows in ((bars, 1), (cells, 12 if n <= 30 else 2)):  # cells, others and clients
        width = axes.get_window_extent().width / n
        numbers = [text for text in axes.texts if text.get_text().strip()[0].isdigit()]
        assert len(numbers) == n * n_rows
        assert all(text.get_window_extent().width < width for text in numbers)


@pytest.mark.parametrize("n", [1, 6, 30, 100])
def test_no_text_is_cropped_or_overlaps_another(n: int, tmp_path: Path) -> None:
    names = [f"{'W' * 60}{i}" for i in range(20)]
    counts = replace(table(torch.full((20, n), 77), others=[1] * n), names=names)
    figure = partition_figure(counts, range(n), "a long title " * 9, "subtitle")
    figure.draw_without_rendering()
    bars, cells, scale = figure.axes
    texts = [bars._left_title, *bars.texts, *cells.texts, *cells.get_yticklabels()]  # type: ignore[attr-defined]
    texts += [*cells.get_legend().get_texts(), *scale.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
    save_png(figure, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        pixels = np.array(image.convert("RGB"))
    pixels[20:-20, 20:-20] = 255
    assert (pixels == 255).all()  # the margin


def test_numbers_are_rounded_to_few_characters() -> None:
    wanted = {7: "7", 999: "999", 1234: "1234", 9999: "9999", 10_000: "10k", 56_789: "57k"}
    wanted |= {999_499: "999k", 999_500: "1.0M", 1_250_001: "1.3M", 12_500_001: "13M"}
    assert {n: short_number(n) for n in wanted} == wanted


def test_clients_without_labels_are_drawn(tmp_path: Path) -> None:
    figure = draw(table([[0, 0, 0], [0, 0, 0]]))
    assert {*cell_colors(figure.axes[1])} == {EMPTY}
    save_png(figure, tmp_path / "a.png")


def test_hostile_names_are_drawn(tmp_path: Path) -> None:
    names = ["$\\frac$", "a\nb", "😀", "", "\ud83d", "W" * 99]
    figure = draw(replace(table([[1]] * 6), names=names))
    texts = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    escaped = ["$\\frac$", r"'a\nb'", r"\U0001f600", "''", r"'\ud83d'", "W" * 47 + "…"]
    assert texts == escaped
    save_png(figure, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({}, "fmnist_sample, main_class, non_iid=0.5, pool=6, seed=0"),
        (
            {"non_iid": 1.0, "pool": 9, "seed": 3},
            "fmnist_sample, main_class, non_iid=1, pool=9, seed=3",
        ),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 0.25},
            "fmnist_sample, dirichlet, dirichlet_alpha=0.25, pool=6, seed=0",
        ),
        ({"partition": "natural"}, "fmnist_sample, natural, pool=6, seed=0"),
    ],
)
def test_the_title_names_the_partition(
    settings: dict[str, Any], title: str, sample: Dataset
) -> None:
    assert partition_title(replace(SMALL, **settings), sample) == title


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `partition_figure` was called with."""
    calls: list[tuple[Any, ...]] = []
    original = module.partition_figure

    def spy(*arguments: Any) -> Figure:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(module, "partition_figure", spy)
    return calls


def test_a_large_pool_shows_its_first_clients_and_says_so(
    sample: Dataset, tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    shards = [torch.tensor([i % 600]) for i in range(12_000)]
    write_partition_figure(tmp_path / "a.png", SMALL, sample, shards, [5, 11_000])
    ((counts, _, _, subtitle),) = drawn
    assert subtitle.endswith("; the first 100 of 12,000 clients")
    assert counts.counts.equal(torch.eye(10, dtype=torch.long)[sample.y_train[:100]].T)


def test_the_subtitle_says_what_is_counted(
    sample: Dataset, tmp_path: Path, drawn: list[tuple[Any, ...]]
) -> None:
    for data in (sample, sequences(torch.tensor([[1, 2]]))):
        write_partition_figure(tmp_path / f"{data.name}.png", SMALL, data, [torch.tensor([0])], ())
    assert [arguments[-1] for arguments in drawn] == [
        "Training samples per class and client",
        "Symbols to predict per class and client",
    ]


def test_the_file_is_written_once_and_its_bytes_repeat(sample: Dataset, tmp_path: Path) -> None:
    shards = client_indices(SMALL, sample)
    a, b = tmp_path / "a.png", tmp_path / "b.png"
    for path in (a, b):
        write_partition_figure(path, SMALL, sample, shards, [1])
    assert a.read_bytes() == b.read_bytes()
    with Image.open(a) as image:
        assert image.format == "PNG"
        image.load()
    a.write_text("kept")
    write_partition_figure(a, SMALL, sample, shards, [1])
    assert a.read_text() == "kept"
    assert files(tmp_path) == ["a.png", "b.png"]


class StopError(Exception):
    """Ends a run where it would draw."""


def test_runs_pass_their_own_partition_and_attackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the partition of pretraining; without an attack nobody is malicious."""
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        calls.append(arguments)
        raise StopError

    monkeypatch.setattr("fedbench.single_run.write_partition_figure", record)
    base = {"n_clients": 5, "pmr": 0.4, "non_iid": 1.0}
    for others in ({}, {"pretrain_non_iid": 0.0}, {"attack": {"name": "none"}}):
        with pytest.raises(StopError):
            run(config(tmp_path, **base, **others))
    for path, settled, data, shards, _ in calls:
        assert path.name == PARTITION_FILE
        expected = client_indices(settled, data)
        assert all(a.equal(b) for a, b in zip(shards, expected, strict=True))
    attackers = [arguments[-1] for arguments in calls]
    assert len({*attackers[0]}) == len({*attackers[1]}) == 2
    assert not attackers[2]


def test_a_run_draws_its_clients_before_round_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that fails in its first round; resuming it leaves the figure as it is."""
    settings = config(tmp_path, n_clients=5, rounds=1, pretrain_rounds=0)
    path = Plan.of(settings).folder.path / PARTITION_FILE
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "round", None)
        with pytest.raises(TypeError):
            run(settings)
    made, content = path.stat().st_mtime_ns, path.read_bytes()
    assert content.startswith(b"\x89PNG")
    run(settings)
    assert path.stat().st_mtime_ns == made
