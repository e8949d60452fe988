"""The command that starts a run of a sweep again gives the same settings."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from handmade_runs import seal
from sweep_folders import add_sweep

from fedbench.composition import compose
from fedbench.config import RunConfig
from fedbench.report.comparison import compare
from fedbench.report.single_command import single_command
from fedbench.results.origin import Origin
from fedbench.results.run_reader import RunResult, read_runs
from fedbench.run_ids import run_id

SWEEPS = [
    ["defense=krum,flame", "seed=3", "pmr=0.3"],
    ["defense=krum", "defense.m=3,5", "defense.f=2,null", "attack=dba"],
    ["defense=baybfed_literal", "dataset=fmnist,mnist", "model=cnn"],
    ["scenario=converged", "model.hidden=[8,4],[]", "attack=multi_backdoor"],
    ["n_clients=[4,9],12", "pool=20", "attack_rounds=[3,5],null", "attack_start=1"],
    ["pdr=1.0", "pdr_step=0.01", "clip_grad=1e-3,null,2", "executor=sequential"],
    ["attack=dba", "attack.backdoors=[{name:bars,target:3},{name:patch,target:1}]", "lr=1e-5"],
    ["partition=natural", "pretrain_rounds=0", "dataset=fmnist", "defense=dp", "tuned=mnist_dp"],
    ["tracker=none", "out='/tmp/a b/$HOME','C:\\\\x'", "name='it\\'s ☃ \"x\" `y` $z; !w'"],
    ["dataset=mnist", "dataset.root=../data,'~/my data'", "tracker.project='1'"],
    ["name='1e5','null','a=b','[1,2'", "pretrained='x,y.pt'"],
    ["executor.devices=2", "executor.precision=bf16-mixed", "executor.threads=4"],
    ["dataset=custom", "dataset.source=mine.py:load", "+dataset.arguments.n=5,'5'", "model=custom"],
]


def overrides(command: str) -> list[str]:
    """Split a command as a shell does; return what follows the program."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "fedbench"]
    return words[3:]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: " ".join(sweep))
def test_it_gives_the_same_settings(tmp_path: Path, sweep: list[str]) -> None:
    folders = add_sweep(tmp_path, *sweep)
    runs = {run.folder: run for run in read_runs([tmp_path])}
    for folder in folders:
        command = single_command(runs[folder])
        again = asdict(compose(overrides(command)))
        del again["rerun"]  # of a command, not of a run
        assert again == yaml.safe_load((folder / "config.yaml").read_text()), command
        assert " -m " not in command.removeprefix("python -m fedbench")
        config = RunConfig(**again)
        first = RunConfig(**yaml.safe_load((folder / "config.yaml").read_text()))
        assert run_id(config, {}) == run_id(first, {})


def test_it_is_short(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum,fedavg", "seed=0,1", "tracker=none", "out=/tmp/my-runs")
    commands = {single_command(run) for run in read_runs([tmp_path])}
    assert commands == {
        f"python -m fedbench {defense}tracker=none seed={seed} out=/tmp/my-runs"
        for defense in ("defense=krum ", "")
        for seed in (0, 1)
    }


@pytest.mark.parametrize("defense", ["krum", "flame"])
def test_without_origin_the_defaults_are_compared(tmp_path: Path, defense: str) -> None:
    sweep = ["attack=dba", "lr=0.2", "model.hidden=[8]", "tracker=none"]
    (folder,) = add_sweep(tmp_path, f"defense={defense}", *sweep)
    (folder / "origin.json").unlink()
    (row,) = compare(read_runs([tmp_path])).rows
    command = single_command(row.runs[0])
    assert "lr=0.2" in command
    assert "momentum" not in command
    again = asdict(compose(overrides(command)))
    assert again | {"rerun": None} == {
        **yaml.safe_load((folder / "config.yaml").read_text()),
        "rerun": None,
    }


def test_if_nobody_knows_what_was_changed_every_setting_is_named(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, "defense=baybfed_literal", "attack=dba", "model.hidden=[8]")
    origin = json.loads((folder / "origin.json").read_text())
    (folder / "origin.json").write_text(json.dumps(origin | {"changed": None}))
    seal(folder)
    (run,) = read_runs([tmp_path])
    command = single_command(run)
    assert "momentum=0.9" in command
    assert (
        compose(overrides(command)).defense
        == yaml.safe_load((folder / "config.yaml").read_text())["defense"]
    )


def a_run(config: dict[str, Any], origin: Origin | None, command: str) -> RunResult:
    return RunResult(Path("x"), "finished", config, {}, origin=origin, summary={"command": command})


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("fedbench --config-dir 'my conf' -m x=1", ["--config-dir", "my conf"]),
        ("fedbench -cd=conf", ["--config-dir", "conf"]),
        ("fedbench 'hydra.searchpath=[pkg://a.conf]'", ["hydra.searchpath=[pkg://a.conf]"]),
        ("fedbench x=1", []),
        ("fedbench --config-dir 'x", []),
    ],
)
def test_folders_of_configs_are_kept_if_a_choice_needs_them(typed: str, kept: list[str]) -> None:
    origin = Origin({"defense": "mine"}, {"defense": "mine"})
    command = single_command(a_run({"defense": "krum", "seed": 2}, origin, typed))
    assert overrides(command) == [*kept, "defense=mine", "seed=2"]
    shipped = Origin({"defense": "krum"}, {"defense": "krum"})
    command = single_command(a_run({"defense": "krum", "seed": 2}, shipped, typed))
    assert overrides(command) == ["defense=krum", "seed=2"]


def test_a_run_without_settings_has_no_command() -> None:
    assert single_command(a_run({}, None, "fedbench")) == ""
