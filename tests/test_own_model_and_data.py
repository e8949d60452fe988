"""docs/own-model.md and docs/own-dataset.md work as written: files, commands, processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end import (
    ROOT,
    RUN_FILES,
    fedbench_in_this_process,
    files,
    imports_undone,
    result,
    run_folder,
    run_folders,
    succeed,
)
from pages import commands, is_plain_run, run, write_titled_blocks

pytestmark = pytest.mark.slow

MODEL, DATA = ROOT / "docs" / "own-model.md", ROOT / "docs" / "own-dataset.md"
SMALL = ("rounds=1", "pretrain_rounds=1", "local_epochs=1", "tracker=none")
RUNS = [(page, command) for page in (MODEL, DATA) for command in commands(page)]
PLAIN = [(page, command) for page, command in RUNS if is_plain_run(command)]
OTHERS = [(page, command) for page, command in RUNS if not is_plain_run(command)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a working folder with the files of both pages."""
    for page in (MODEL, DATA):
        write_titled_blocks(page, tmp_path)
    assert run("save_arrays.py", tmp_path).returncode == 0
    with imports_undone(tmp_path):
        yield tmp_path


def small(command: str) -> list[str]:
    """Return the words of a command, with settings for a short run."""
    clients = () if "n_clients" in command else ("n_clients=4",)
    return [*shlex.split(command, comments=True), *SMALL, *clients]


def test_pages_have_commands_of_each_kind() -> None:
    targets = {word for _, command in RUNS for word in shlex.split(command) if "=" in word}
    assert {"model.target=nets/my_net.py:Net", "dataset.source=digits.py:load"} <= targets
    assert len(PLAIN) >= 7
    assert len(OTHERS) == 3


@pytest.mark.parametrize(("page", "command"), PLAIN, ids=[command for _, command in PLAIN])
def test_documented_run(page: Path, command: str, folder: Path) -> None:
    ended = fedbench_in_this_process(*small(command)[2:], cwd=folder)
    assert (ended.code, ended.err) == (0, []), ended
    assert " BA " in ended.out[-1]
    assert "MA -" not in ended.out[-1]
    assert set(files(run_folder(folder / "runs"))) == set(RUN_FILES)


@pytest.mark.parametrize(("page", "command"), OTHERS, ids=[command for _, command in OTHERS])
def test_documented_sweep_or_preview(page: Path, command: str, folder: Path) -> None:
    done = run(shlex.join(small(command)), folder)
    assert (done.returncode, done.stderr) == (0, "") or "preview" in command, done.stderr
    if "preview" in command:
        assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG"), done.stderr
    else:
        defenses = command.rpartition("defense=")[2].split(",")
        table = done.stdout.rpartition("seconds")[2]
        assert all(name in table for name in defenses)
        assert done.stdout.count("finished in") == len(run_folders(folder / "runs")) >= 3


def test_own_model_and_data_give_the_same_bits_on_every_number_of_processes(folder: Path) -> None:
    """One process, two forked ones and two spawned ones."""
    model = ("model=custom", "model.target=nets/my_net.py:Net")
    data = ("dataset=custom", "dataset.source=augmented.py:load", "pretrain_rounds=0")
    (folder / "augmented.py").write_text(AUGMENTED)
    spawning = {"PYTHONPATH": f"{folder / 'spawning'}:{ROOT}"}
    (folder / "spawning").mkdir()
    (folder / "spawning" / "sitecustomize.py").write_text(SPAWN)
    for name, n, env in (("one", 1, None), ("forked", 2, None), ("spawned", 2, spawning)):
        succeed(*model, *data, f"executor.devices={n}", f"out={name}", cwd=folder, env=env)
    one, forked, spawned = (
        result(run_folder(folder / name)) for name in ("one", "forked", "spawned")
    )
    assert one == forked == spawned
    assert (folder / "spawning" / "used").exists()


# A Dataset with a function of the user's, which has to reach the other processes.
AUGMENTED = """
from dataclasses import replace
import torch
from fedbench.data import DATASETS

def mirrored(x, rng):
    return torch.where(torch.rand(len(x), 1, 1, 1, generator=rng) < 0.5, x, x.flip(-1))

def load():
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    return replace(data, x_train=data.x_train[:600], y_train=data.y_train[:600], augment=mirrored)
"""
# Makes Lightning spawn processes, as on machines with GPUs.
SPAWN = """
import pathlib
import fedbench.engine.launch

def never(*_):
    pathlib.Path(__file__).with_name("used").touch()
    return False

fedbench.engine.launch._can_fork = never
"""


def test_user_errors_of_a_sweep_appear_before_its_runs(folder: Path) -> None:
    words = "-m dataset=custom dataset.source=digits.py:load,digits.py:laod defense=fedavg,krum"
    done = run(f"-m fedbench {words}", folder)
    assert done.returncode == 1
    assert done.stderr == (
        "fedbench: dataset.source=digits.py:laod: digits.py has no laod; did you mean load?\n"
    )
    assert not (folder / "runs").exists()


def draw(*overrides: str) -> int:
    from fedbench.preview import main

    return main(["dataset=custom", "n_clients=4", "pretrain_rounds=0", *overrides])


@pytest.mark.parametrize(
    "source", ["digits.py:load", "my_data.py:Digits", "text.py:load", "color.npz"]
)
def test_preview_draws_images_and_sequences(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    colors = np.random.default_rng(0).integers(0, 256, (60, 3, 9, 7), dtype=np.uint8)
    np.savez("color.npz", x_train=colors, y_train=np.arange(60) % 3)
    sequences = ("model=gru", "partition=iid", "attack=label_flip") if "text" in source else ()
    assert draw(f"dataset.source={source}", *sequences) == 0
    assert Path("preview.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("source", ["wine.npz", "many.npz"])
def test_preview_refuses_what_it_cannot_draw(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    np.savez("many.npz", x_train=np.zeros((9, 5, 4, 4), np.uint8), y_train=np.arange(9) % 2)
    assert draw(f"dataset.source={source}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedbench: preview draws images of shape (1 or 3, height, width) and")


def test_run_errors_are_one_line(folder: Path) -> None:
    ended = fedbench_in_this_process(
        "dataset=custom", "dataset.source=wine.npz", "model=cnn", "tracker=none", cwd=folder
    )
    assert ended.code == 1
    assert ended.err == [
        "fedbench: model cnn: needs images, but custom has feature vectors of shape (13,); use mlp"
    ]
