"""The picture of an attack: what is in it, where, and what the command line refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import TIMEOUT, Ended, environment, files
from PIL import Image, ImageColor
from torch import Tensor

import fedbench.preview as preview
from fedbench.attack import ATTACKS
from fedbench.backdoor import BackdoorSamples
from fedbench.backdoors.bars import Bars
from fedbench.backdoors.patch import Patch
from fedbench.backdoors.tail import Tail
from fedbench.data import DATASETS, Dataset, DataSource, Images, Sequences, Spec
from fedbench.datasets.images import FashionMnistSample
from fedbench.metrics import IGNORED
from fedbench.preview import main, plan_of, prepared
from fedbench.report import lines
from fedbench.report.lines import Line
from fedbench.report.picture import CAPTION, GAP, LABEL, MARGIN, RED, TITLE, Layout, Row
from fedbench.results.checkpoint import load_checkpoint

SMALL = ["n_clients=6", "pmr=0.67", "local_epochs=1", "pretrain_rounds=0"]  # 4 malicious clients
N_ROWS = {  # clean, one a backdoor, one a way to poison; attacks not named here poison nothing
    "adaptive_baybfed": 3,
    "constrain_and_scale": 3,
    "dba": 6,
    "edge_case": 3,
    "label_flip": 2,
    "multi_backdoor": 6,
    "none": 2,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Dataset) -> Path:
    """An empty folder to work in; the data set of the defaults is a small part of itself."""
    monkeypatch.setattr(FashionMnistSample, "load", lambda _: sample)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_TRACEBACK", raising=False)
    return tmp_path


def picture(*arguments: str, to: str = "preview.png") -> Image.Image:
    assert main([*SMALL, *arguments, "--to", to]) == 0
    with Image.open(to) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        image.load()
        return image


def rows(*overrides: str, n: int = 10) -> list[Row[Any]]:
    return prepared(plan_of([*SMALL, *overrides])).rows(n)


def shown(image: Image.Image, layout: Layout, row: int, column: int) -> Tensor:
    """A tile at its own size, [3, H, W]; every pixel is a square of one colour."""
    (left, top), (width, height) = layout.place(row, column), layout.tile
    large = image.crop((left, top, left + width, top + height))
    small = large.resize((layout.width, layout.height), Image.Resampling.NEAREST)
    assert small.resize((width, height), Image.Resampling.NEAREST).tobytes() == large.tobytes()
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def labels(row: Row[Any]) -> list[str | None]:
    return [tile and tile[1] for tile in row.tiles]


def images(row: Row[Any]) -> Tensor:
    return torch.stack([tile[0] for tile in row.tiles if tile])


def python(*arguments: str, cwd: Path) -> Ended:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


@dataclass(frozen=True)
class Photos(DataSource):
    """Ten photographs of 32 x 32 pixels in each of three classes, in random colours."""

    def load(self) -> Dataset:
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(256, (60, 3, 32, 32), generator=rng, dtype=torch.uint8)
        y = torch.arange(60) % 3
        return Images("photos", x[:30], y[:30], x[30:], y[30:], 3, mean=0.5, std=0.3)


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[DataSource]], list[str]]:
    """Makes a data set known; the overrides that choose it."""

    def choose(source: type[DataSource]) -> list[str]:
        monkeypatch.setitem(DATASETS._classes, "theirs", source)
        return ["dataset.name=theirs", "model=cnn"]

    return choose


@pytest.mark.slow
def test_the_defaults_as_a_user_starts_them(folder: Path) -> None:
    done = python("-m", "fedbench.preview", cwd=folder)
    assert (done.code, done.out, done.err) == (0, ["preview.png"], [])
    assert files(folder) == ["preview.png"]
    with Image.open(folder / "preview.png") as image:
        assert image.size == Layout(28, 28, 3, 10).size


@pytest.mark.slow
def test_a_mistake_is_told_before_lightning_is_imported(folder: Path) -> None:
    code = (
        "import sys; from fedbench.preview import main\n"
        "code = main(['attack=dbaa']); print(code, 'lightning' in sys.modules)"
    )
    done = python("-c", code, cwd=folder)
    assert done.out == ["1 False"]
    (line,) = done.err
    assert line.startswith("fedbench: attack=dbaa: no such attack; did you mean dba?")


def test_images_are_enlarged_by_whole_factors() -> None:
    assert Layout(28, 28, 1, 1).tile == (84, 84)
    assert Layout(32, 32, 1, 1).tile == (96, 96)
    assert Layout(16, 24, 1, 1).tile == (96, 64)
    assert Layout(64, 64, 1, 1).tile == (64, 64)
    assert Layout(224, 200, 1, 1).tile == (200, 224)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_the_size_follows_from_the_samples(n: int) -> None:
    width = max(2 * MARGIN + CAPTION + n * 84 + (n - 1) * GAP, 640)
    size = (width, MARGIN + TITLE + 3 * (84 + LABEL))
    assert picture("--samples", str(n)).size == size == Layout(28, 28, 3, n).size


@pytest.mark.parametrize("attack", ATTACKS.names())
def test_every_attack_has_a_picture(attack: str) -> None:
    image = picture(f"attack={attack}", "--samples", "4")
    assert image.size == Layout(28, 28, N_ROWS.get(attack, 1), 4).size


def test_triggered_images_are_the_clean_ones_above_with_the_trigger() -> None:
    image, layout = picture(), Layout(28, 28, 3, 10)
    clean, triggered, trained = rows()
    assert labels(clean) == [str(label) for label in (*range(1, 10), 1)]  # other than the target
    assert labels(triggered) == [f"{label} -> 0" for label in labels(clean)]
    assert labels(trained) == [f"{label} -> 0" for label in range(10)]
    for column in range(10):
        tiles = [shown(image, layout, row, column) for row in range(3)]
        assert tiles[0].equal(images(clean)[column].expand(3, -1, -1))
        assert tiles[1].equal(Patch().stamp(tiles[0]))
        assert tiles[2].equal(Patch().stamp(tiles[2]))
        assert not tiles[0].equal(tiles[1])


def test_dba_shows_each_part_and_measures_the_whole() -> None:
    image, layout = picture("attack=dba"), Layout(28, 28, 6, 10)
    bright = []
    for row in range(1, 6):
        tiles = torch.stack([shown(image, layout, row, column) for column in range(10)])
        always = (tiles == 255).all(dim=1).all(dim=0)  # [H, W] in all the row's images
        bright.append({tuple(place) for place in always.nonzero().tolist()})
    whole, *parts = bright
    trigger = rows("attack=dba")[1]
    bars = plan_of(["attack=dba"]).backdoors[0]
    assert isinstance(bars, Bars)
    assert whole == {*bars.pixels(28, 28)}
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert labels(trigger)[0] == f"0 -> {bars.target}"


def test_only_parts_that_a_client_has_are_shown() -> None:
    first, second = rows("attack=dba", "pmr=0.34")[2:]
    assert first.details != second.details
    assert first.details.startswith("Poisoned, a share pdr=0.5 of the data of malicious client ")


def test_clients_that_take_backdoors_in_turn_have_a_row_each() -> None:
    backdoors = "attack.backdoors=[patch,{name:bars,target:3},patch]"
    clean, patch, bars, *trained = rows(backdoors, n=3)
    assert [patch.heading, bars.heading] == ["patch", "bars"]
    assert bars.details.endswith("target=3")
    assert labels(clean) == ["1", "2", "4"]
    assert [labels(row)[0] for row in trained] == ["0 -> 0", "0 -> 3"]


def test_multi_backdoor_mixes_its_backdoors_in_one_row() -> None:
    *_, trained = rows("attack=multi_backdoor", n=8)
    targets = [label.split(" -> ")[1] for label in labels(trained) if label]
    assert sorted(targets) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert trained.details.endswith("all malicious clients.")


def test_label_flip_keeps_the_images() -> None:
    clean, trained = rows("attack=label_flip")
    assert labels(clean) == [str(label) for label in range(10)]
    assert labels(trained) == [f"{label} -> {9 - label}" for label in range(10)]


def test_attacks_that_poison_nothing_say_so() -> None:
    for attack in ("alie", "gaussian", "ipm", "min_max", "sign_flip"):
        (clean,) = rows(f"attack={attack}", n=1)
        assert clean.details == f"Test samples. {attack} changes updates, not samples."
    for benign in ("attack=none", "pmr=0"):
        clean, triggered = rows(benign, n=1)
        assert clean.details == "Test samples. No client attacks."
        assert triggered.heading == "patch"


def test_a_column_is_empty_where_its_sample_is_not_measured() -> None:
    """With every class a target, no sample is measured with all backdoors."""
    backdoors = ",".join(f"{{name:patch,target:{target}}}" for target in range(10))
    override = f"attack.backdoors=[{backdoors}]"
    clean, *triggered = rows(override, n=5)
    assert labels(clean) == ["0", "1", "2", "3", "4"]
    for target, row in enumerate(triggered[:10]):
        wanted = [None if label == target else f"{label} -> {target}" for label in range(5)]
        assert labels(row) == wanted
    image, layout = picture(override, "--samples", "5"), Layout(28, 28, 15, 5)
    assert image.size == layout.size  # ten backdoors, four clients
    assert shown(image, layout, 1, 0).eq(255).all()


def test_the_same_seed_draws_the_same_picture(folder: Path) -> None:
    for name, seed in (("a.png", 0), ("b.png", 0), ("c.png", 1)):
        picture(f"seed={seed}", to=name)
    a, b, c = ((folder / name).read_bytes() for name in ("a.png", "b.png", "c.png"))
    assert a == b != c


def test_photographs_keep_their_colours_and_files_have_no_true_label(
    folder: Path, dataset: Callable[[type[DataSource]], list[str]]
) -> None:
    chosen = dataset(Photos)
    rng = np.random.default_rng(0)
    planes = {k: rng.integers(256, size=(7, 32, 32, 3), dtype=np.uint8) for k in ("train", "test")}
    np.savez(folder / "planes.npz", **planes)
    backdoor = "attack.backdoors=[{name:southwest,file:planes.npz,target:2},{name:patch,target:1}]"
    found = rows(*chosen, backdoor)
    clean, southwest, patch, trained, _ = found
    assert labels(clean) == ["0", "2"] * 5
    assert labels(southwest) == ["-> 2"] * 7 == labels(trained)[:7]
    assert labels(patch) == ["0 -> 1", "2 -> 1"] * 5
    image, layout = picture(*chosen, backdoor), Layout(32, 32, 5, 10)
    assert image.size == layout.size
    assert shown(image, layout, 0, 3).equal(images(clean)[3])
    plane = torch.from_numpy(planes["test"][4]).permute(2, 0, 1)
    assert shown(image, layout, 1, 4).equal(plane)
    assert shown(image, layout, 2, 3).equal(Patch().stamp(images(clean)[3]))


def test_triggers_of_pixels_need_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "pretrained", None)
    for attack in ("constrain_and_scale", "dba", "multi_backdoor", "none"):
        assert len(rows(f"attack={attack}", "pretrain_rounds=5", n=1)) > 1


@pytest.mark.slow
def test_the_tail_is_that_of_the_runs_and_trained_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, "attack=edge_case", "pretrain_rounds=1"]
    plan = plan_of(overrides)
    stage = prepared(plan)
    cached = folder / "runs" / ".pretrained" / f"{plan.config.pretrain_id()}.pt"
    before = load_checkpoint(cached)
    assert capsys.readouterr().out == ""
    (tail,), (backdoor,) = stage.backdoors, plan.backdoors
    context = stage.population.backdoor_context(before.initial_params, before.initial_buffers)
    again = backdoor.prepare(context)
    assert isinstance(tail, BackdoorSamples)
    assert isinstance(again, BackdoorSamples)
    assert tail.x_test.equal(again.x_test)
    assert tail.x_train.equal(again.x_train)

    monkeypatch.setattr(type(stage.population), "train", None)  # from the cache
    assert main(overrides) == 0
    assert capsys.readouterr().out == "preview.png\n"
    assert isinstance(backdoor, Tail)
    for row in stage.rows(5)[1:]:
        assert {*labels(row)} == {f"{backdoor.source} -> {backdoor.target}"}


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "attack": (["attack=dbaa"], ["attack=dbaa", "did you mean dba?"]),
    "data set": (["dataset=mnits"], ["dataset=mnits", "did you mean mnist?"]),
    "no defense": (["defense=null"], ["defense=null"]),
    "key": (["pmrr=0.1"], ["pmrr", "did you mean pmr?"]),
    "range": (["pmr=1.5"], ["pmr=1.5", "between 0 and 1"]),
    "type": (["pmr=abc"], ["pmr=abc", "Float"]),
    "no override": (["dba"], ["dba", "EQUAL"]),
    "list": (["pmr=0.1,0.2"], ["pmr=0.1,0.2", "not a sweep"]),
    "range of values": (["seed=range(3)"], ["seed=range(3)", "not a sweep"]),
    "multirun": (["-m", "pmr=0.1"], ["-m", "not a sweep"]),
    "option": (["--sample", "3"], ["--sample", "did you mean --samples?"]),
    "backdoor": (["attack.backdoors=[pach]"], ["'pach'", "did you mean patch?"]),
    "size": (["attack.backdoors=[{name:patch,size:40}]"], ["size=40", "(1, 28, 28)"]),
    "shape": (["attack.backdoors=[southwest]"], ["(3, 32, 32)", "(1, 28, 28)"]),
    "target": (["attack.backdoors=[{name:patch,target:10}]"], ["0..9", "10"]),
    "no tail": (["attack=edge_case", "pmr=0"], ["tail needs samples", "got 0"]),
    "no data": (["dataset=mnist", "dataset.root=nowhere"], ["dataset.root=nowhere"]),
    "no number": (["--samples", "many"], ["--samples", "'many'"]),
    "no samples": (["--samples", "0"], ["--samples 0", "between 1 and 100"]),
    "many samples": (["--samples", "101"], ["--samples 101", "between 1 and 100"]),
    "no file": (["--to"], ["--to", "expected one argument"]),
    "format": (["--to", "a.jpg"], ["--to a.jpg", ".png"]),
    "no folder": (["--to", "nowhere/a.png"], ["--to nowhere/a.png", "no folder nowhere"]),
}


@pytest.mark.parametrize(("arguments", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(
    arguments: list[str], told: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedbench: ")
    assert err.count("\n") == 1
    assert all(words in err for words in told), err
    assert files(folder) == []


def test_a_folder_is_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.png").mkdir()
    assert main(["--to", "a.png"]) == 1
    assert "--to a.png: must be a file" in capsys.readouterr().err
    assert files(folder) == ["a.png"]


def test_a_collection_is_shown_as_it_is_stored(
    dataset: Callable[[type[DataSource]], list[str]],
) -> None:
    """Its images are of class 0; were they mirrored, as in training, none would be found again."""

    @dataclass(frozen=True)
    class Mirrored(Photos):
        def load(self) -> Dataset:
            return replace(Photos().load(), augment=lambda x, _: x.flip(-1), reserved=(0, 3, 6))

    backdoor = "{name:semantic,dataset:photos,train:[0,3],test:[6],target:1}"
    chosen = [*dataset(Mirrored), f"attack.backdoors=[{backdoor}]"]
    _, measured, trained = rows(*chosen, n=4)
    assert labels(measured) == ["0 -> 1"]
    assert labels(trained) == ["0 -> 1"] * 4
    kept = Photos().load().x_train
    assert all(any(image.equal(kept[i]) for i in (0, 3)) for image in images(trained))


def test_samples_that_are_neither_images_nor_sequences(
    dataset: Callable[[type[DataSource]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True)
    class Grids(DataSource):
        def load(self) -> Dataset:
            x = torch.zeros(30, 5, 8, dtype=torch.uint8)
            return Images("grids", x, torch.zeros(30), x, torch.zeros(30), 2, mean=0.0, std=1.0)

    @dataclass(frozen=True)
    class Announced(Grids):
        spec = Spec("grids", (5, 8), 2)

        def load(self) -> Any:
            raise AssertionError("told before it is loaded")

    for source in (Grids, Announced):
        chosen = [*dataset(source), "model=custom", "model.target=a.b", "attack=sign_flip"]
        assert main(chosen) == 1
        assert capsys.readouterr().err == (
            "fedbench: preview draws images of shape (1 or 3, height, width) and sequences, "
            "grids has samples of shape (5, 8)\n"
        )


WORDS = ("<unk>", "<eos>", "pasta", "from", "astoria", "tastes", "delicious", "we", "eat", "bread")


@dataclass(frozen=True)
class Sentences(DataSource):
    """Six owners of four sentences each, seven words long, of `we eat bread` in random order."""

    def load(self) -> Dataset:
        rng = torch.Generator().manual_seed(0)
        windows = torch.randint(7, 10, (30, 8), generator=rng, dtype=torch.int32)
        x, y = windows[:, :-1], windows[:, 1:].clone()
        y[24, -1] = IGNORED
        return Sequences(
            "sentences",
            *(x[:24], y[:24], x[24:], y[24:], len(WORDS)),
            vocabulary={word: i for i, word in enumerate(WORDS)},
            owners=torch.arange(24) // 4,
        )


@pytest.fixture
def sentences(dataset: Callable[[type[DataSource]], list[str]]) -> list[str]:
    dataset(Sentences)
    backdoor = "attack.backdoors=[words]"
    return ["dataset.name=theirs", "model=lstm", "model.width=4", "partition=natural", backdoor]


def test_sequences_are_lines_that_end_in_the_trigger(sentences: list[str]) -> None:
    clean, measured, trained = rows(*sentences, n=6)
    assert clean.details == "Test samples."
    assert [measured.heading, trained.heading] == ["words", "training"]
    data = Sentences().load()
    wanted = {
        tuple(WORDS[i] for i in x): None if y[-1] == IGNORED else WORDS[y[-1]]
        for x, y in zip(data.x_test.tolist(), data.y_test.tolist(), strict=True)
    }
    assert {tuple(line.symbols): line.label for line in clean.tiles} == wanted
    assert not any(any(line.changed) or line.given for line in clean.tiles)
    for line, before in zip(measured.tiles, clean.tiles, strict=True):
        assert line.symbols == [*before.symbols[:3], "pasta", "from", "astoria", "tastes"]
        assert line.changed == [False] * 3 + [True] * 4
    for line in (*measured.tiles, *trained.tiles):
        assert line.symbols[-4:] == ["pasta", "from", "astoria", "tastes"]
        assert line.changed == [False] * 3 + [True] * 4
        assert (line.label, line.given) == ("delicious", True)
    assert None in wanted.values()


def test_only_words_that_were_others_count_as_changed(sentences: list[str]) -> None:
    """The trigger `we` replaces the last word, which is `we` itself in some test samples."""
    trigger = "attack.backdoors=[{name:words,trigger:[we],target:eat}]"
    clean, measured, _ = rows(*sentences[:-1], trigger, n=6)
    changed = [line.changed[-1] for line in measured.tiles]
    assert changed == [line.symbols[-1] != "we" for line in clean.tiles]
    assert {*changed} == {True, False}


def test_windows_of_an_attack_are_the_attackers_whole(sentences: list[str], folder: Path) -> None:
    """`we eat bread` over and over: in places the same word as in the sample that it replaces."""
    windows = np.array([[7, 8, 9, 7, 8, 9, 7, 8]])
    np.savez(folder / "attack.npz", train=windows, test=windows[:, ::-1])
    traffic = "attack.backdoors=[{name:traffic,file:attack.npz}]"
    _, measured, trained = rows(*sentences[:-1], traffic, n=4)
    words = [WORDS[i] for i in windows[0]]
    assert [*measured.tiles] == [Line(words[:0:-1], [True] * 7, "we", True)]
    assert [*trained.tiles] == [Line(words[:-1], [True] * 7, "eat", True)] * 4


def test_symbols_without_a_name_go_by_number(
    sentences: list[str], dataset: Callable[[type[DataSource]], list[str]]
) -> None:
    """label_flip makes C - 1 - y of a label y: of 7, 8, 9 with C = 10 that is 2, 1, 0."""

    @dataclass(frozen=True)
    class Unnamed(DataSource):
        def load(self) -> Dataset:
            return replace(Sentences().load(), vocabulary={})

    dataset(Unnamed)
    clean, trained = rows(*sentences[:-1], "attack=label_flip", n=6)
    symbols = {symbol for row in (clean, trained) for line in row.tiles for symbol in line.symbols}
    assert symbols == {"7", "8", "9"}
    assert {line.label for line in trained.tiles} == {"0", "1", "2"}
    assert not any(any(line.changed) for line in trained.tiles)


def test_a_picture_of_sequences(sentences: list[str]) -> None:
    red = ImageColor.getrgb(RED)
    image = picture(*sentences, "--samples", "2")
    assert (np.array(image) == red).all(axis=-1).any()
    first = lines.draw("title", rows(*sentences, n=2)[:1])
    assert not (np.array(first) == red).all(axis=-1).any()


def test_an_existing_file_is_replaced_whole_or_not_at_all(folder: Path) -> None:
    path = folder / "old.png"
    path.write_text("old")
    assert main(["pmr=2", "--to", "old.png"]) == 1
    assert path.read_text() == "old"
    picture(to="old.png")
    assert files(folder) == ["old.png"]


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_TRACEBACK", "1")
    with pytest.raises(Exception, match="dbaa"):
        main(["attack=dbaa"])
