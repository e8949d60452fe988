"""Edited code and files give new results; `rerun=true` gives them in any case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from end_to_end import (
    Ended,
    checkpoint,
    fedbench,
    fedbench_in_this_process,
    fingerprint,
    run_folder,
    run_folders,
    succeed,
    summary,
)
from handmade_runs import seal

MINE = '''
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense, mean_of
from fedbench.defenses._kept import KEPT


@DEFENSES.register("mine")
@dataclass(frozen=True)
class Mine(Defense):
    """Keep some."""

    def aggregate(self, updates, state, view):
        return mean_of(updates, view.client_ids < KEPT), state
'''
NET = """
from torch import nn
from width import WIDTH


def build(sample_shape, n_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
"""
DATA = """
import torch


def load():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(200, 1, 8, 8, generator=rng) * 1.0, torch.arange(200) % 4
"""


def write(folder: Path, **files: str) -> None:
    """Write Python files; `__` in a name separates folders."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def was_skipped(ended: Ended) -> bool:
    assert ended.code == 0, ended
    return "already finished, skipped" in ended.out[-1]


@pytest.mark.slow
def test_an_edited_defense_is_run_again(tmp_path: Path) -> None:
    write(tmp_path, defenses__mine=MINE, defenses___kept="KEPT = 1\n")
    assert not was_skipped(succeed("defense=mine", cwd=tmp_path))
    write(tmp_path, defenses__mine=MINE.replace("Keep some.", "Keep the first.") + "# end\n")
    assert was_skipped(succeed("defense=mine", cwd=tmp_path))
    write(tmp_path, defenses___kept="KEPT = 2\n")
    assert not was_skipped(succeed("defense=mine", cwd=tmp_path))
    rates = {summary(folder)["TNR"] for folder in run_folders(tmp_path / "runs")}
    assert len(rates) == 2
    assert len([*(tmp_path / "runs" / ".pretrained").glob("*.pt")]) == 1  # a defense has no part


@pytest.mark.slow
def test_an_edited_network_and_data_set_are_pretrained_again(tmp_path: Path) -> None:
    write(tmp_path, net=NET, width="WIDTH = 4\n", data=DATA)
    shipped = ["model=custom", "model.target=net.py:build"]
    own = ["dataset=custom", "dataset.source=data.py:load"]
    for command, edited in (
        (shipped, {"width": "WIDTH = 5\n"}),
        (own, {"data": DATA.replace("1.0", "0.5")}),
    ):
        before = {*(tmp_path / "runs" / ".pretrained").glob("*.pt")}
        assert not was_skipped(succeed(*command, cwd=tmp_path))
        assert was_skipped(succeed(*command, cwd=tmp_path))
        write(tmp_path, **edited)
        assert not was_skipped(succeed(*command, cwd=tmp_path))
        assert len({*(tmp_path / "runs" / ".pretrained").glob("*.pt")} - before) == 2


def test_another_file_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    import numpy as np

    for i, (seed, skipped) in enumerate(((0, False), (0, True), (1, False))):
        rng = np.random.default_rng(seed)
        np.savez(
            tmp_path / "own.npz", x_train=rng.random((80, 3), np.float32), y_train=np.arange(80) % 4
        )
        ended = fedbench_in_this_process(
            "dataset=custom", "dataset.source=own.npz", "model.hidden=[4]", cwd=tmp_path
        )
        assert was_skipped(ended) == skipped, i


def test_rerun_does_a_finished_run_and_its_pretraining_again(tmp_path: Path) -> None:
    run = ["model.hidden=[4]", "rounds=1"]
    fedbench_in_this_process(*run, cwd=tmp_path)
    folder = run_folder(tmp_path / "runs")
    (pretrained,) = (tmp_path / "runs" / ".pretrained").glob("*.pt")
    files = [folder / "summary.json", folder / "config.yaml", folder / "checkpoint.pt", pretrained]
    before = [path.stat().st_mtime_ns for path in files]
    same = fingerprint(checkpoint(folder / "checkpoint.pt"))
    assert not was_skipped(fedbench_in_this_process(*run, "rerun=true", cwd=tmp_path))
    assert run_folder(tmp_path / "runs") == folder
    assert all(p.stat().st_mtime_ns > b for p, b in zip(files, before, strict=True))
    assert fingerprint(checkpoint(folder / "checkpoint.pt")) == same
    assert "rerun" not in (folder / "config.yaml").read_text()
    assert was_skipped(fedbench_in_this_process(*run, cwd=tmp_path))


@pytest.mark.slow
def test_a_sweep_with_rerun_pretrains_once(tmp_path: Path) -> None:
    sweep = ["-m", "defense=fedavg,median,krum", "model.hidden=[4]"]
    succeed(*sweep, cwd=tmp_path)
    ended = succeed(*sweep, "rerun=true", cwd=tmp_path)
    text = "\n".join(ended.out)
    assert "skipped" not in text
    assert len(re.findall(r"pretrain 1/1", text)) <= 1
    assert len(run_folders(tmp_path / "runs")) == 3


@pytest.mark.slow
def test_rerun_ignores_a_shorter_run(tmp_path: Path) -> None:
    fedbench("rounds=1", cwd=tmp_path)
    ended = succeed("rounds=2", "rerun=true", cwd=tmp_path)
    assert not any("continues" in line for line in ended.out)


def test_a_skipped_run_says_if_fedbench_itself_has_changed(tmp_path: Path) -> None:
    run = ["model.hidden=[4]", "rounds=1"]
    sweep = ["-m", "hydra/launcher=basic", "pmr=0.2,0.4", *run]
    fedbench_in_this_process(*sweep, cwd=tmp_path)
    for folder in run_folders(tmp_path / "runs"):
        text = (folder / "summary.json").read_text()
        (folder / "summary.json").write_text(
            text.replace('"fedbench_code": "', '"fedbench_code": "0')
        )
        seal(folder)
    note = "fedbench has changed since"
    (line,) = (s for s in fedbench_in_this_process(*run, cwd=tmp_path).out if note in s)
    assert line.endswith("  fedbench has changed since; rerun=true runs it again")
    ended = fedbench_in_this_process(*sweep, cwd=tmp_path)
    assert [s for s in ended.out if note in s] == [f"{note} 2 of them; rerun=true runs them again"]
    fedbench_in_this_process(*run, "rerun=true", cwd=tmp_path)
    assert not any(note in s for s in fedbench_in_this_process(*run, cwd=tmp_path).out)
