"""Who holds what: the table, its picture, and that every run draws it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor
from test_run import config
from torch import Tensor

from fedbench.attack import ATTACKS
from fedbench.data import Images, Sequences
from fedbench.engine.population import Population
from fedbench.federation import Federation
from fedbench.metrics import IGNORED
from fedbench.plan import Plan
from fedbench.report.partition_figure import (
    DARK,
    EMPTY,
    PARTITION_FILE,
    Holdings,
    Picture,
    count,
    holdings,
    rounded,
    shade,
    write_picture,
)
from fedbench.report.picture import BLACK, RED, legible
from fedbench.run import run

VOCABULARY = {f"word{i}": i for i in range(25)}


def sequences(y: Tensor, n_classes: int = 25) -> Sequences:
    return Sequences("talk", y, y, y, y, n_classes, vocabulary=VOCABULARY)


def luminance(colour: tuple[int, ...]) -> float:
    """As WCAG has it: 0 is black, 1 white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in scaled(colour)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def scaled(colour: tuple[int, ...]) -> list[float]:
    return [c / 255 for c in colour]


def corner(image: Image.Image, picture: Picture, row: int, column: int) -> tuple[int, ...]:
    """The colour of a cell, where no number is written over it."""
    left, top, right, bottom = picture.cell(row, column)
    pixels = [image.getpixel(place) for place in ((left, top), (right, bottom), (left, bottom))]
    assert len({*pixels}) == 1
    assert isinstance(pixels[0], tuple)
    return pixels[0]


@pytest.fixture
def population(federation: Callable[..., Federation]) -> Population:
    return federation().population


def test_a_table_by_hand() -> None:
    """Labels 0 1 1 2 2 2; client 0 holds the samples 0, 1, 3, client 1 the samples 5, 4, 2."""
    shards = [torch.tensor([0, 1, 3]), torch.tensor([5, 4, 2])]
    assert count(torch.tensor([0, 1, 1, 2, 2, 2]), shards, 4).tolist() == [
        [1, 0],
        [1, 1],
        [1, 2],
        [0, 0],
    ]


def test_ignored_labels_of_sequences_do_not_count() -> None:
    """Client 0 holds (2 0 -), client 1 (2 2 1) and (- - -), where - is IGNORED."""
    y = torch.tensor([[2, 0, IGNORED], [2, 2, 1], [IGNORED] * 3])
    shards = [torch.tensor([0]), torch.tensor([1, 2])]
    assert count(y, shards, 3).tolist() == [[1, 0], [0, 1], [1, 2]]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from([IGNORED, 0, 1, 2, 3]), min_size=2, max_size=2), min_size=1),
    st.data(),
)
def test_counts_are_those_of_a_loop_over_samples(labels: list[list[int]], data: Any) -> None:
    places = st.lists(st.sampled_from(range(len(labels))), max_size=8)
    shards: list[list[int]] = data.draw(st.lists(places, min_size=1, max_size=5))
    counts = count(torch.tensor(labels), [torch.tensor(s, dtype=torch.long) for s in shards], 4)
    for client, shard in enumerate(shards):
        seen = Counter(label for place in shard for label in labels[place])
        assert counts[:, client].tolist() == [seen[label] for label in range(4)]


def test_every_sample_is_counted_once(population: Population) -> None:
    table = holdings(population)
    assert table.names == [str(i) for i in range(10)]
    assert table.counts.shape == (10, 6)
    assert table.totals.tolist() == [len(shard) for shard in population.shards]
    assert [i for i, bad in enumerate(table.malicious) if bad] == sorted(population.malicious)
    assert len(population.malicious) == 2
    assert table.others is None


def test_it_is_the_run_s_own_split_whatever_the_benign_rounds_had(
    federation: Callable[..., Federation],
) -> None:
    plain, other = (
        holdings(federation(non_iid=1.0, pretrain_non_iid=share).population) for share in (None, 0)
    )
    assert torch.equal(plain.counts, other.counts)


def test_nobody_is_malicious_without_an_attack(federation: Callable[..., Federation]) -> None:
    benign = federation(attack=ATTACKS.build({"name": "none"})).population
    assert not any(holdings(benign).malicious)


def test_the_most_frequent_words_have_rows_and_all_others_one(population: Population) -> None:
    """Word i occurs 25 - i times with client 0, once with client 1: 20 rows, 5 words left over."""
    long = torch.cat([torch.full((25 - i,), i) for i in range(25)])
    y = torch.stack([long, torch.cat([torch.arange(25), torch.full((300,), IGNORED)])])
    population.dataset = sequences(y)
    population.shards = [torch.tensor([0]), torch.tensor([1])]
    table = holdings(population)
    assert table.names == [f"word{i}" for i in range(20)]
    assert table.counts.tolist() == [[25 - i, 1] for i in range(20)]
    assert table.others is not None
    assert table.others.tolist() == [5 + 4 + 3 + 2 + 1, 5]
    assert table.totals.tolist() == [325, 25]


def test_few_words_are_all_shown_by_name(population: Population) -> None:
    population.dataset = replace(
        sequences(torch.tensor([[1, 2]]), 3), vocabulary={"a": 0, "b": 1, "c": 2}
    )
    population.shards = [torch.tensor([0])]
    table = holdings(population)
    assert (table.names, table.counts.tolist(), table.others) == (
        ["a", "b", "c"],
        [[0], [1], [1]],
        None,
    )


def test_images_of_many_classes_go_by_number(population: Population) -> None:
    y = torch.tensor([29] * 3 + [7] * 2 + [*range(30)])
    x = torch.zeros(len(y), 1, 2, 2, dtype=torch.uint8)
    population.dataset = Images("letters", x, y, x, y, 30, mean=0.0, std=1.0)
    population.shards = [torch.arange(len(y))]
    table = holdings(population)
    assert table.names == ["29", "7", *(str(i) for i in range(19) if i != 7)]
    assert table.counts[:, 0].tolist() == [4, 3, *([1] * 18)]
    assert table.others is not None
    assert table.others.tolist() == [10]


def test_a_large_pool_shows_its_first_clients_and_says_so(
    population: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population.config.pool = 12_000
    population.shards = [torch.tensor([i % 600]) for i in range(12_000)]
    said: list[str] = []
    draw = Picture.draw
    monkeypatch.setattr(Picture, "draw", lambda self: said.append(self.subtitle) or draw(self))
    write_picture(population, tmp_path)
    assert said[0].endswith("; the first 100 of 12,000 clients")
    labels = population.dataset.y_train[:100]
    assert holdings(population).counts.equal(torch.eye(10, dtype=torch.long)[labels].T)


def test_the_more_samples_the_darker() -> None:
    """Of 100 at most: 0 is grey, 1 the lightest blue, then ever darker; 100 the darkest."""
    counts = torch.tensor([[0, 1, 20], [50, 80, 100]])
    picture = Picture(Holdings(["a", "b"], counts, None, [False] * 3), "title", "about")
    image = picture.draw()
    found = [corner(image, picture, row, column) for row in range(2) for column in range(3)]
    assert found[0] == EMPTY
    assert found[1:] == [shade(n / 100) for n in (1, 20, 50, 80, 100)]
    brightness = [luminance(colour) for colour in found]
    assert brightness == sorted(brightness, reverse=True)
    assert len({*found}) == 6


def test_a_shade_per_step_is_as_much_darker_as_any_other() -> None:
    """In CIE lightness L* = 116 Y^(1/3) - 16, which people see as even: within 4 of 100."""
    steps = torch.linspace(0, 1, 21)
    lightness = torch.tensor([116 * luminance(shade(float(s))) ** (1 / 3) - 16 for s in steps])
    straight = lightness[0] + steps * (lightness[-1] - lightness[0])
    assert (lightness[:-1] > lightness[1:]).all()
    assert (lightness - straight).abs().max() < 4


def test_numbers_stand_out_from_every_shade() -> None:
    for i in range(1001):
        colour = "white" if i / 1000 > DARK else BLACK
        levels = sorted((luminance(shade(i / 1000)), luminance(ImageColor.getrgb(colour))))
        assert (levels[1] + 0.05) / (levels[0] + 0.05) > 4


def test_malicious_clients_are_red() -> None:
    malicious = [False, True, False, True]
    table = Holdings(["0"], torch.ones(1, 4, dtype=torch.long), None, malicious)
    picture = Picture(table, "title", "about")
    image = picture.draw()
    below = picture.cell(1, 0)[1] + 3
    for client, bad in enumerate(malicious):
        pixel = image.getpixel((picture.cell(0, client)[0], below))
        assert pixel == (ImageColor.getrgb(RED) if bad else (255, 255, 255))
    benign = Picture(replace(table, malicious=[False] * 4), "title", "about").draw()
    reds = [sum(p == ImageColor.getrgb(RED) for p in pixels(i)) for i in (image, benign)]
    assert reds[0] > 0 == reds[1]


def pixels(image: Image.Image) -> list[tuple[int, ...]]:
    data = image.tobytes()
    return [tuple(data[i : i + 3]) for i in range(0, len(data), 3)]


@pytest.mark.parametrize("n", [1, 6, 30, 100])
@pytest.mark.parametrize("most", [1, 99, 999, 98_765, 123_456_789])
def test_nothing_leaves_the_picture_and_no_number_its_cell(n: int, most: int) -> None:
    """The margin stays white, and so does what is between the columns, for all sizes."""
    counts = torch.full((20, n), most)
    counts[0, 0] = 1
    names = [f"{'w' * 60}{i}" for i in range(20)]
    picture = Picture(Holdings(names, counts, counts[0], [True] * n), "t" * 30, "u" * 30)
    image = picture.draw()
    width, height = image.size
    inside = image.crop((8, 8, width - 8, height - 8))
    frame = Image.new("RGB", image.size, "white")
    frame.paste(inside, (8, 8))
    assert frame.tobytes() == image.tobytes()
    for column in range(n):
        _, top, right, _ = picture.cell(0, column)
        bottom = picture.cell(20, column)[3]
        gap = image.crop((right + 1, top, right + 2, bottom))
        assert {*pixels(gap)} == {(255, 255, 255)}


@pytest.mark.parametrize(("n", "written"), [(7, True), (98_765, True), (123_456, False)])
def test_numbers_are_written_where_there_is_room(n: int, written: bool) -> None:
    """In cells of 20 pixels 98,765 is 99k, which fits, and 123k does not."""
    table = Holdings(["0"], torch.full((1, 100), n), None, [False] * 100)
    picture = Picture(table, "title", "about")
    left, top, right, bottom = picture.cell(0, 50)
    cell = picture.draw().crop((left, top, right + 1, bottom + 1))
    assert (len({*pixels(cell)}) > 1) == written


def test_a_long_title_fits() -> None:
    table = Holdings(["0"], torch.ones(1, 1, dtype=torch.long), None, [False])
    image = Picture(table, "a long title " * 9, "about").draw()
    assert image.crop((image.width - 20, 0, *image.size)).getcolors() == [
        (20 * image.height, (255, 255, 255))
    ]


def test_clients_without_any_label_have_a_picture() -> None:
    none = torch.zeros(2, 3, dtype=torch.long)
    picture = Picture(Holdings(["a", "b"], none, None, [False] * 3), "title", "about")
    assert corner(picture.draw(), picture, 1, 2) == EMPTY


def test_numbers_are_rounded_to_few_characters() -> None:
    wanted = {1000: "1.0k", 1234: "1.2k", 9949: "9.9k", 9951: "10k", 56_789: "57k"}
    wanted |= {999_499: "999k", 999_500: "1.0M", 1_250_001: "1.3M", 12_500_001: "13M"}
    assert {n: rounded(n) for n in wanted} == wanted


def test_names_that_cannot_be_printed_are_escaped() -> None:
    assert legible("the", 9) == "the"
    assert legible("a\nb", 9) == r"'a\nb'"
    assert legible(" ", 9) == "' '"
    assert legible("", 9) == "''"
    assert legible("\ud83d", 9) == r"'\ud83d'"
    assert legible("0123456789", 10) == "0123456789"
    assert legible("0123456789a", 10) == "0123456..."


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({}, "fmnist_sample, main_class, non_iid=0.5, pool=6, seed=0"),
        ({"non_iid": 1.0, "pool": 9, "seed": 3}, "main_class, non_iid=1, pool=9, seed=3"),
        (
            {"partition": "dirichlet", "dirichlet_alpha": 0.25},
            "fmnist_sample, dirichlet, dirichlet_alpha=0.25, pool=6, seed=0",
        ),
    ],
)
def test_the_title_says_how_samples_were_dealt(
    settings: dict[str, Any],
    title: str,
    federation: Callable[..., Federation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    titles: list[str] = []
    draw = Picture.draw
    monkeypatch.setattr(Picture, "draw", lambda self: titles.append(self.title) or draw(self))
    write_picture(federation(**settings).population, tmp_path)
    assert titles[0].endswith(title)


def test_the_file_is_whole_and_written_once(population: Population, tmp_path: Path) -> None:
    write_picture(population, tmp_path)
    path = tmp_path / PARTITION_FILE
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        image.load()
    path.write_text("kept")
    write_picture(population, tmp_path)
    assert path.read_text() == "kept"
    assert [*tmp_path.iterdir()] == [path]


def test_a_run_draws_its_clients_before_round_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails in its first round; going on with it leaves the picture as it is."""
    settings = config(tmp_path, n_clients=5, rounds=1, pretrain_rounds=0)
    folder = Plan.of(settings).folder.path
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "round", None)
        with pytest.raises(TypeError):
            run(settings)
    path = folder / PARTITION_FILE
    made = path.stat().st_mtime_ns
    with Image.open(path) as image:
        drawn = image.copy()
    run(settings)
    assert path.stat().st_mtime_ns == made
    assert drawn.width > 300
    assert drawn.getpixel((2, 2)) == (255, 255, 255)
