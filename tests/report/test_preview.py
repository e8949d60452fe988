"""The attack preview: rows, what the figure shows where, and what the command line refuses."""

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
from matplotlib.figure import Figure
from shipped import shipped
from torch import Tensor

import fedbench.preview as preview
from fedbench.attack import ATTACKS
from fedbench.backdoor import BackdoorSamples
from fedbench.backdoors.bars import Bars
from fedbench.backdoors.patch import Patch
from fedbench.backdoors.tail import Tail
from fedbench.data import DATASETS, Dataset, DataSource, Images, Sequences, Spec
from fedbench.datasets.images import FashionMnistSample
from fedbench.federation import Federation
from fedbench.metrics import IGNORED
from fedbench.preview import build_preview, main, plan_of
from fedbench.report.plotting import RED, save_png
from fedbench.report.preview_figure import LabeledSequence, PreviewRow, sequence_figure
from fedbench.results.checkpoint import load_checkpoint
from fedbench.single_run import build_rank_context

pytestmark = pytest.mark.slow

SMALL = ["n_clients=6", "pmr=0.67", "local_epochs=1", "pretrain_rounds=0"]  # 4 malicious clients
N_ROWS = {  # clean, one per backdoor, one per kind of poisoning; other attacks poison nothing
    "adaptive_baybfed": 3,
    "constrain_and_scale": 3,
    "dba": 6,
    "edge_case": 3,
    "label_flip": 2,
    "multi_backdoor": 6,
    "none": 2,
    "norm_matched": 3,
    "sacrifice": 3,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Dataset) -> Path:
    """An empty working directory; the default data set is cut to a small sample."""
    monkeypatch.setattr(FashionMnistSample, "load", lambda _: sample)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_TRACEBACK", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All figures that the command has saved, the last one last."""
    saved: list[Figure] = []

    def spy(figure: Figure, path: Path) -> None:
        saved.append(figure)
        save_png(figure, path)

    monkeypatch.setattr(preview, "save_png", spy)
    return saved


@pytest.fixture
def draw(figures: list[Figure]) -> Callable[..., Figure]:
    """Runs the command with these arguments and returns its figure."""

    def run(*arguments: str, to: str = "preview.png") -> Figure:
        assert main([*SMALL, *arguments, "--to", to]) == 0
        assert Path(to).read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return run


def rows(*overrides: str, n: int = 10) -> list[PreviewRow[Any]]:
    return build_preview(plan_of([*SMALL, *overrides])).rows(n)


def grid(figure: Figure) -> list[dict[int, Tensor]]:
    """Images [3, H, W] by row and column."""
    found: dict[float, dict[float, Tensor]] = {}
    for image in figure.axes[0].images:
        left, _, _, top = image.get_extent()
        pixels = torch.from_numpy(np.array(image.get_array())).permute(2, 0, 1)
        found.setdefault(top, {})[left] = pixels
    columns = sorted({left for row in found.values() for left in row})
    return [
        {columns.index(left): image for left, image in sorted(row.items())}
        for _, row in sorted(found.items())
    ]


def headings(figure: Figure) -> list[str]:
    """All texts in bold, from top to bottom: the title and the headings of rows."""
    bold = [text for text in figure.axes[0].texts if text.get_weight() == "bold"]
    return [text.get_text() for text in sorted(bold, key=lambda text: text.get_position()[1])]


def labels(row: PreviewRow[Any]) -> list[str | None]:
    return [sample and sample.label for sample in row.samples]


def images(row: PreviewRow[Any]) -> Tensor:
    return torch.stack([sample.pixels for sample in row.samples if sample])


def python(*arguments: str, cwd: Path) -> Ended:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


@dataclass(frozen=True)
class Photos(DataSource):
    """Training and test set of 30 random 32 x 32 RGB images each, in three classes."""

    def load(self) -> Dataset:
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(256, (60, 3, 32, 32), generator=rng, dtype=torch.uint8)
        y = torch.arange(60) % 3
        return Images("photos", x[:30], y[:30], x[30:], y[30:], 3, mean=0.5, std=0.3)


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[DataSource]], list[str]]:
    """Registers a data set and returns the overrides that select it."""

    def choose(source: type[DataSource]) -> list[str]:
        monkeypatch.setitem(DATASETS._classes, "theirs", source)
        return ["dataset.name=theirs", "model=cnn"]

    return choose


def test_the_defaults_from_the_command_line(folder: Path) -> None:
    done = python("-m", "fedbench.preview", cwd=folder)
    assert (done.code, done.out, done.err) == (0, ["preview.png"], [])
    assert files(folder) == ["preview.png"]
    assert (folder / "preview.png").read_bytes().startswith(b"\x89PNG")


def test_user_errors_print_before_lightning_is_imported(folder: Path) -> None:
    code = (
        "import sys; from fedbench.preview import main\n"
        "code = main(['attack=dbaa']); print(code, 'lightning' in sys.modules)"
    )
    done = python("-c", code, cwd=folder)
    assert done.out == ["1 False"]
    (line,) = done.err
    assert line.startswith("fedbench: attack=dbaa: no such attack; did you mean dba?")


@pytest.mark.parametrize("n", [1, 10, 100])
def test_rows_have_as_many_samples_as_asked_for(n: int, draw: Callable[..., Figure]) -> None:
    assert [len(row) for row in grid(draw("--samples", str(n)))] == [n] * 3


@pytest.mark.parametrize("attack", shipped(ATTACKS))
def test_every_attack_has_a_figure(attack: str, draw: Callable[..., Figure]) -> None:
    figure = draw(f"attack={attack}", "--samples", "4")
    n_rows, shown = N_ROWS.get(attack, 1), grid(figure)
    assert len(shown) == n_rows
    assert len(shown[0]) == 4
    title, *others = headings(figure)
    assert title == f"{attack} on fmnist_sample"
    assert others[0] == "clean"
    assert len(others) == n_rows


def test_triggered_images_are_the_clean_ones_above_with_the_trigger(
    draw: Callable[..., Figure],
) -> None:
    clean, triggered, trained = rows()
    assert labels(clean) == [str(label) for label in (*range(1, 10), 1)]  # other than the target
    assert labels(triggered) == [f"{label} → 0" for label in labels(clean)]
    assert labels(trained) == [f"{label} → 0" for label in range(10)]
    assert not any(image.poisoned for image in clean.samples)
    assert all(image.poisoned for row in (triggered, trained) for image in row.samples)
    shown = grid(draw())
    for column in range(10):
        first, second, third = (row[column] for row in shown)
        assert first.equal(images(clean)[column].expand(3, -1, -1))
        assert second.equal(Patch().stamp(first))
        assert third.equal(Patch().stamp(third))
        assert not first.equal(second)


def test_dba_shows_each_part_and_measures_the_whole(draw: Callable[..., Figure]) -> None:
    bright = []
    for row in grid(draw("attack=dba"))[1:]:
        always = (torch.stack([*row.values()]) == 255).all(dim=1).all(dim=0)  # [H, W]
        bright.append({tuple(place) for place in always.nonzero().tolist()})
    whole, *parts = bright
    assert len(parts) == 4
    trigger = rows("attack=dba")[1]
    bars = plan_of(["attack=dba"]).backdoors[0]
    assert isinstance(bars, Bars)
    assert whole == {*bars.pixels(28, 28)}
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole)
    assert labels(trigger)[0] == f"0 → {bars.target}"


def test_only_trigger_parts_in_use_are_shown() -> None:
    first, second = rows("attack=dba", "pmr=0.34")[2:]
    assert first.details != second.details
    assert first.details.startswith("Poisoned training samples of malicious client ")
    assert first.details.endswith(" (pdr=0.5).")


def test_clients_that_plant_different_backdoors_have_different_rows() -> None:
    backdoors = "attack.backdoors=[patch,{name:bars,target:3},patch]"
    clean, patch, bars, *trained = rows(backdoors, n=3)
    assert [patch.heading, bars.heading] == ["patch", "bars"]
    assert bars.details.endswith("target=3")
    assert labels(clean) == ["1", "2", "4"]
    assert [labels(row)[0] for row in trained] == ["0 → 0", "0 → 3"]


def test_multi_backdoor_mixes_its_backdoors_in_one_row() -> None:
    *_, trained = rows("attack=multi_backdoor", n=8)
    targets = [label.split(" → ")[1] for label in labels(trained) if label]
    assert sorted(targets) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert trained.details == "Poisoned training samples of all malicious clients (pdr=0.5)."


def test_label_flip_keeps_the_images() -> None:
    clean, trained = rows("attack=label_flip")
    assert labels(clean) == [str(label) for label in range(10)]
    assert labels(trained) == [f"{label} → {9 - label}" for label in range(10)]


def test_attacks_that_poison_nothing_say_so() -> None:
    for attack in ("alie", "gaussian", "ipm", "min_max", "sign_flip"):
        (clean,) = rows(f"attack={attack}", n=1)
        assert clean.details == f"Test samples. {attack} changes updates, not samples."
    for benign in ("attack=none", "pmr=0"):
        clean, triggered = rows(benign, n=1)
        assert clean.details == "Test samples. No client attacks."
        assert triggered.heading == "patch"


def test_a_place_is_empty_where_its_sample_is_not_measured(
    draw: Callable[..., Figure],
) -> None:
    """If every class is a target, no sample suits all backdoors."""
    backdoors = ",".join(f"{{name:patch,target:{target}}}" for target in range(10))
    override = f"attack.backdoors=[{backdoors}]"
    clean, *triggered = rows(override, n=5)
    assert labels(clean) == ["0", "1", "2", "3", "4"]
    for target, row in enumerate(triggered[:10]):
        wanted = [None if label == target else f"{label} → {target}" for label in range(5)]
        assert labels(row) == wanted
    shown = grid(draw(override, "--samples", "5"))
    assert len(shown) == 15  # clean, ten backdoors, four clients
    assert [*shown[1]] == [1, 2, 3, 4]


def test_the_same_seed_draws_the_same_bytes(folder: Path, draw: Callable[..., Figure]) -> None:
    for name, seed in (("a.png", 0), ("b.png", 0), ("c.png", 1)):
        draw(f"seed={seed}", to=name)
    a, b, c = ((folder / name).read_bytes() for name in ("a.png", "b.png", "c.png"))
    assert a == b != c


def test_photographs_keep_their_colors_and_images_from_files_have_no_true_label(
    folder: Path,
    dataset: Callable[[type[DataSource]], list[str]],
    draw: Callable[..., Figure],
) -> None:
    chosen = dataset(Photos)
    rng = np.random.default_rng(0)
    planes = {k: rng.integers(256, size=(7, 32, 32, 3), dtype=np.uint8) for k in ("train", "test")}
    np.savez(folder / "planes.npz", **planes)
    backdoor = "attack.backdoors=[{name:southwest,file:planes.npz,target:2},{name:patch,target:1}]"
    found = rows(*chosen, backdoor)
    clean, southwest, patch, trained, _ = found
    assert labels(clean) == ["0", "2"] * 5
    assert labels(southwest) == ["→ 2"] * 7 == labels(trained)[:7]
    assert labels(patch) == ["0 → 1", "2 → 1"] * 5
    shown = grid(draw(*chosen, backdoor))
    assert [len(row) for row in shown] == [10, 7, 10, 10, 10]
    assert shown[0][3].equal(images(clean)[3])
    assert shown[1][4].equal(torch.from_numpy(planes["test"][4]).permute(2, 0, 1))
    assert shown[2][3].equal(Patch().stamp(images(clean)[3]))


def test_triggers_of_pixels_need_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "pretrained", None)
    for attack in ("constrain_and_scale", "dba", "multi_backdoor", "none"):
        assert len(rows(f"attack={attack}", "pretrain_rounds=5", n=1)) > 1


def test_the_tail_equals_that_of_a_run_and_pretraining_is_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, "attack=edge_case", "pretrain_rounds=1"]
    plan = plan_of(overrides)
    built: list[Any] = []

    def spy(*arguments: Any) -> Any:
        built.append(build_rank_context(*arguments))
        return built[-1]

    monkeypatch.setattr(preview, "build_rank_context", spy)
    shown = build_preview(plan)
    cached = folder / "runs" / ".pretrained" / f"{plan.pretrain_id}.pt"
    before = load_checkpoint(cached, torch.device("cpu"), "delete it")
    assert capsys.readouterr().out == ""
    (tail,), (backdoor,) = shown.backdoors, plan.backdoors
    context = built[0].backdoor_context(before.initial_params, before.initial_buffers)
    again = backdoor.prepare(context)
    assert isinstance(tail, BackdoorSamples)
    assert isinstance(again, BackdoorSamples)
    assert tail.x_test.equal(again.x_test)
    assert tail.x_train.equal(again.x_train)

    monkeypatch.setattr(Federation, "pretrain", None)  # from the cache
    assert main(overrides) == 0
    assert capsys.readouterr().out == "preview.png\n"
    assert isinstance(backdoor, Tail)
    for row in shown.rows(5)[1:]:
        assert {*labels(row)} == {f"{backdoor.source} → {backdoor.target}"}


USER_ERRORS: dict[str, tuple[list[str], list[str]]] = {
    "attack": (["attack=dbaa"], ["attack=dbaa", "did you mean dba?"]),
    "data set": (["dataset=mnits"], ["dataset=mnits", "did you mean mnist?"]),
    "no defense": (["defense=null"], ["defense=null"]),
    "key": (["pmrr=0.1"], ["pmrr", "did you mean pmr?"]),
    "range": (["pmr=1.5"], ["pmr=1.5", "between 0 and 1"]),
    "type": (["pmr=abc"], ["pmr=abc", "a number"]),
    "no override": (["dba"], ["dba", "EQUAL"]),
    "list": (["pmr=0.1,0.2"], ["pmr=0.1,0.2", "not a sweep"]),
    "range of values": (["seed=range(3)"], ["seed=range(3)", "not a sweep"]),
    "multirun": (["-m", "pmr=0.1"], ["-m", "not a sweep"]),
    "option": (["--sample", "3"], ["--sample", "did you mean --samples?"]),
    "backdoor": (["attack.backdoors=[pach]"], ["'pach'", "did you mean patch?"]),
    "size": (["attack.backdoors=[{name:patch,size:40}]"], ["size=40", "(1, 28, 28)"]),
    "shape": (["attack.backdoors=[southwest]"], ["(3, 32, 32)", "(1, 28, 28)"]),
    "target": (["attack.backdoors=[{name:patch,target:10}]"], ["0..9", "10"]),
    "no tail": (["attack=edge_case", "pmr=0"], ["tail needs at least 2 training samples", "got 0"]),
    "no data": (["dataset=mnist", "dataset.root=nowhere"], ["dataset.root=nowhere"]),
    "no number": (["--samples", "many"], ["--samples", "'many'"]),
    "no samples": (["--samples", "0"], ["--samples 0", "between 1 and 100"]),
    "many samples": (["--samples", "101"], ["--samples 101", "between 1 and 100"]),
    "no file": (["--to"], ["--to", "expected one argument"]),
    "format": (["--to", "a.jpg"], ["--to a.jpg", ".png"]),
    "no folder": (["--to", "nowhere/a.png"], ["--to nowhere/a.png", "no folder nowhere"]),
}


@pytest.mark.parametrize(("arguments", "parts"), USER_ERRORS.values(), ids=USER_ERRORS)
def test_user_errors_print_one_line_and_write_nothing(
    arguments: list[str], parts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedbench: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err
    assert files(folder) == []


def test_a_folder_is_not_a_valid_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.png").mkdir()
    assert main(["--to", "a.png"]) == 1
    assert "--to a.png: must be a file" in capsys.readouterr().err
    assert files(folder) == ["a.png"]


def test_backdoor_samples_are_shown_as_stored(
    dataset: Callable[[type[DataSource]], list[str]],
) -> None:
    """Not augmented: mirrored images would not be found in the data set, nor their labels."""

    @dataclass(frozen=True)
    class Mirrored(Photos):
        def load(self) -> Dataset:
            return replace(Photos().load(), augment=lambda x, _: x.flip(-1), reserved=(0, 3, 6))

    backdoor = "{name:semantic,dataset:photos,train:[0,3],test:[6],target:1}"
    chosen = [*dataset(Mirrored), f"attack.backdoors=[{backdoor}]"]
    _, measured, trained = rows(*chosen, n=4)
    assert labels(measured) == ["0 → 1"]
    assert labels(trained) == ["0 → 1"] * 4
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
            raise AssertionError("must fail before loading")

    for source in (Grids, Announced):
        model = ["model=custom", "model.target=torch.nn.Identity"]
        chosen = [*dataset(source), *model, "attack=sign_flip"]
        assert main(chosen) == 1
        assert capsys.readouterr().err == (
            "fedbench: preview draws images of shape (1 or 3, height, width) and sequences, "
            "grids has images of shape (5, 8)\n"
        )


WORDS = ("<unk>", "<eos>", "pasta", "from", "astoria", "tastes", "delicious", "we", "eat", "bread")


@dataclass(frozen=True)
class Sentences(DataSource):
    """Six owners with four sentences each: seven random words out of `we`, `eat`, `bread`."""

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


def test_poisoned_sequences_end_in_the_trigger(sentences: list[str]) -> None:
    clean, measured, trained = rows(*sentences, n=6)
    assert clean.details == "Test samples."
    assert [measured.heading, trained.heading] == ["words", "training"]
    data = Sentences().load()
    wanted = {
        tuple(WORDS[i] for i in x): None if y[-1] == IGNORED else WORDS[y[-1]]
        for x, y in zip(data.x_test.tolist(), data.y_test.tolist(), strict=True)
    }
    assert {tuple(line.symbols): line.label for line in clean.samples} == wanted
    assert not any(any(line.changed) or line.poisoned for line in clean.samples)
    for line, before in zip(measured.samples, clean.samples, strict=True):
        assert line.symbols == [*before.symbols[:3], "pasta", "from", "astoria", "tastes"]
        assert line.changed == [False] * 3 + [True] * 4
    for line in (*measured.samples, *trained.samples):
        assert line.symbols[-4:] == ["pasta", "from", "astoria", "tastes"]
        assert line.changed == [False] * 3 + [True] * 4
        assert (line.label, line.poisoned) == ("delicious", True)
    assert None in wanted.values()


def test_only_words_that_differ_count_as_changed(sentences: list[str]) -> None:
    """The trigger `we` replaces the last word, which already is `we` in some test samples."""
    trigger = "attack.backdoors=[{name:words,trigger:[we],target:eat}]"
    clean, measured, _ = rows(*sentences[:-1], trigger, n=6)
    changed = [line.changed[-1] for line in measured.samples]
    assert changed == [line.symbols[-1] != "we" for line in clean.samples]
    assert {*changed} == {True, False}


def test_all_symbols_of_attack_windows_count_as_changed(sentences: list[str], folder: Path) -> None:
    """Even where a window has the same word as the sample that it replaces."""
    windows = np.array([[7, 8, 9, 7, 8, 9, 7, 8]])
    np.savez(folder / "attack.npz", train=windows, test=windows[:, ::-1])
    traffic = "attack.backdoors=[{name:traffic,file:attack.npz}]"
    _, measured, trained = rows(*sentences[:-1], traffic, n=4)
    words = [WORDS[i] for i in windows[0]]
    assert [*measured.samples] == [LabeledSequence(words[:0:-1], [True] * 7, "we", True)]
    assert [*trained.samples] == [LabeledSequence(words[:-1], [True] * 7, "eat", True)] * 4


def test_symbols_without_a_name_show_their_number(
    sentences: list[str], dataset: Callable[[type[DataSource]], list[str]]
) -> None:
    """label_flip maps y to C - 1 - y: with C = 10, 7, 8, 9 become 2, 1, 0."""

    @dataclass(frozen=True)
    class Unnamed(DataSource):
        def load(self) -> Dataset:
            return replace(Sentences().load(), vocabulary={})

    dataset(Unnamed)
    clean, trained = rows(*sentences[:-1], "attack=label_flip", n=6)
    symbols = {
        symbol for row in (clean, trained) for line in row.samples for symbol in line.symbols
    }
    assert symbols == {"7", "8", "9"}
    assert {line.label for line in trained.samples} == {"0", "1", "2"}
    assert not any(any(line.changed) for line in trained.samples)


def test_a_figure_of_sequences(sentences: list[str], draw: Callable[..., Figure]) -> None:
    figure = draw(*sentences, "--samples", "2")
    red = [text.get_text() for text in figure.axes[0].texts if text.get_color() == RED]
    trigger = ["tastes", "astoria", "from", "pasta", "delicious"]
    assert red == trigger * 4  # two samples that BA is measured on, two of training
    clean = sequence_figure("title", rows(*sentences, n=2)[:1])
    assert not [text for text in clean.axes[0].texts if text.get_color() == RED]


def test_an_existing_file_is_replaced_whole_or_not_at_all(
    folder: Path, draw: Callable[..., Figure]
) -> None:
    path = folder / "old.png"
    path.write_text("old")
    assert main(["pmr=2", "--to", "old.png"]) == 1
    assert path.read_text() == "old"
    draw(to="old.png")
    assert files(folder) == ["old.png"]


def test_a_traceback_is_printed_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDBENCH_TRACEBACK", "1")
    assert main(["attack=dbaa"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "dbaa" in err
