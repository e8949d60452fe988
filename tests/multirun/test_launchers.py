"""Launchers: cores for each run, job files, and real sweeps with Ray and submitit."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from end_to_end import RUN_FILES, fedbench, files, install, run_folders
from omegaconf import DictConfig, OmegaConf

from fedbench.config import RunConfig
from fedbench.engine.executors import Sequential
from fedbench.multirun import launchers, resources
from fedbench.results.run_dir import RunDir

CORES = os.sched_getaffinity(0)  # before the fixture below
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
NEEDS_SUBMITIT = pytest.mark.skipif(
    find_spec("submitit") is None, reason="needs the extra `submitit`"
)


def hydra_config(launcher: dict[str, Any]) -> DictConfig:
    overrides = {"hydra": []}
    sweep = {"dir": "runs/default"}
    tree = {"hydra": {"launcher": launcher, "overrides": overrides, "sweep": sweep}}
    config = OmegaConf.create(tree)
    assert isinstance(config, DictConfig)
    return config


def ray(**remote: Any) -> DictConfig:
    target = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
    return hydra_config({"_target_": target, "ray": {"init": {"address": None}, "remote": remote}})


def submitit(folder: str = launchers.SUBMITIT_FOLDER) -> DictConfig:
    target = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
    return hydra_config({"_target_": target, "submitit_folder": folder})


def plans(tmp_path: Path, n: int, **executor: Any) -> list[Any]:
    """Runs that have not started."""
    config = RunConfig(pretrain_rounds=0)
    settings = Sequential(accelerator="cpu", **executor)
    folders = [RunDir(tmp_path / str(i)) for i in range(n)]
    return [
        SimpleNamespace(folder=f, finished=f.finished, config=config, executor=settings)
        for f in folders
    ]


def variables(config: DictConfig) -> dict[str, str]:
    pairs = (line.removeprefix("+hydra.job.env_set.") for line in config.hydra.overrides.hydra)
    return {key: value.strip("'") for key, _, value in (pair.partition("=") for pair in pairs)}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("atexit.register", lambda *arguments: None)


@pytest.mark.parametrize(
    ("n_runs", "executor", "cores"),
    [
        (2, {}, 4),  # two runs share the eight cores
        (3, {}, 2),
        (100, {}, 1),
        (1, {}, 8),
        (100, {"threads": 3}, 4),  # two runs of three threads fit
        (100, {"devices": 2, "threads": 2}, 4),
        (100, {"devices": 16}, 8),  # more than there are
    ],
)
def test_ray_divides_the_cores_of_this_machine(
    n_runs: int, executor: dict[str, int], cores: int, tmp_path: Path
) -> None:
    config = ray()
    launchers.share_machine(config, plans(tmp_path, n_runs, **executor), has_workers=False)
    assert config.hydra.launcher.ray.remote.num_cpus == cores
    assert variables(config) == {resources.CORES: str(cores)}


def test_on_a_ray_cluster_a_run_uses_the_cores_that_ray_reserves(tmp_path: Path) -> None:
    config = ray(num_cpus=3)
    launchers.share_machine(config, plans(tmp_path, 2), has_workers=False)
    assert config.hydra.launcher.ray.remote.num_cpus == 3
    assert variables(config) == {resources.CORES: "3"}
    config = ray()
    config.hydra.launcher.ray.init.address = "auto"
    launchers.share_machine(config, plans(tmp_path, 2, threads=2), has_workers=False)
    assert config.hydra.launcher.ray.remote.num_cpus == 2


def test_a_run_counts_the_cores_that_are_reserved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.n_cores() == 8
    monkeypatch.setenv(resources.CORES, "2")
    assert resources.n_cores() == 2
    assert resources.units("cpu") == 2
    monkeypatch.setenv(resources.CORES, "64")  # of the machine that planned the sweep
    assert resources.n_cores() == 8


def test_jobs_of_submitit_that_do_not_fit_wait_for_a_slot(tmp_path: Path) -> None:
    config = submitit()
    launchers.share_machine(config, plans(tmp_path, 100, threads=2), has_workers=False)
    assert variables(config)[resources.PARALLEL] == "4"
    config = submitit()
    launchers.share_machine(config, plans(tmp_path, 3), has_workers=False)
    assert variables(config)[resources.PARALLEL] == "3"


@pytest.mark.parametrize(
    ("launcher", "n_runs", "expected"),
    [
        ({"_target_": "x.JoblibLauncher", "n_jobs": 4}, 9, 4),
        ({"_target_": "x.JoblibLauncher", "n_jobs": 4}, 3, 3),
        ({"_target_": "x.JoblibLauncher", "n_jobs": -1}, 9, 8),
        ({"_target_": "x.JoblibLauncher", "n_jobs": 4}, 0, 1),
        ({"_target_": "x.BasicLauncher"}, 9, 1),
        ({"_target_": "x.SlurmLauncher", "array_parallelism": 5}, 9, 5),
        ({"_target_": "x.LocalLauncher"}, 9, 4),  # of two threads each
        ({"_target_": "x.LocalLauncher"}, 0, 1),
    ],
)
def test_a_dry_run_knows_how_many_runs_the_launcher_would_start(
    launcher: dict[str, Any], n_runs: int, expected: int, tmp_path: Path
) -> None:
    runs = plans(tmp_path, n_runs, threads=2)
    assert launchers.n_at_a_time(hydra_config(launcher), runs) == expected


def test_finished_runs_take_no_cores(tmp_path: Path) -> None:
    runs = plans(tmp_path, 3)
    for run in runs[:2]:
        run.folder.path.mkdir()
        run.folder.finish({"status": "finished"})
    config = ray()
    launchers.share_machine(config, runs, has_workers=False)
    assert config.hydra.launcher.ray.remote.num_cpus == 8


def test_job_files_of_submitit_have_a_folder_without_a_placeholder(tmp_path: Path) -> None:
    config = submitit()
    config.hydra.sweep.dir = str(tmp_path)
    folder = launchers.place_job_files(config, "mine")
    assert folder == tmp_path / ".submitit" / "mine"
    assert config.hydra.launcher.submitit_folder == str(folder)
    other = folder.parent / "other"
    for path in (folder, other):
        path.mkdir(parents=True)
    launchers.remove_job_files(folder)
    assert [*folder.parent.iterdir()] == [other], "another sweep is still running"
    launchers.remove_job_files(other)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_for_job_files_that_the_user_chose_stays() -> None:
    config = submitit("logs/%j")
    assert launchers.place_job_files(config, "mine") is None
    assert config.hydra.launcher.submitit_folder == "logs/%j"
    assert launchers.place_job_files(hydra_config({"n_jobs": 2}), "mine") is None


CORE_RECORDER = """
import os
from dataclasses import dataclass
from fedbench.defense import DEFENSES, Defense, mean_of
from fedbench.multirun import resources


@DEFENSES.register("core_recorder")
@dataclass(frozen=True)
class CoreRecorder(Defense):
    number: int = 0

    def aggregate(self, updates, state, view):
        print("cores", resources.n_cores() // resources.n_parallel(), flush=True)
        return mean_of(updates, view.client_ids >= 0), state
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["submitit_local"], marks=NEEDS_SUBMITIT),
        pytest.param(["ray", "executor.accelerator=cpu"], marks=NEEDS_RAY),
        pytest.param(["basic"]),
        pytest.param(["parallel", "hydra.launcher.n_jobs=2"]),
    ],
    ids=lambda words: words[0],
)
def test_every_launcher_shows_the_progress_of_its_runs(launcher: list[str], tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.defenses]\ncore_recorder = theirs:CoreRecorder\n",
        CORE_RECORDER,
        {"defense/core_recorder": "name: core_recorder\nnumber: 0\n"},
    )
    name, *settings = launcher
    command = ["-m", plugins.searchpath, f"hydra/launcher={name}", *settings, "rounds=1"]
    command += ["defense=core_recorder", "defense.number=0,1"]
    (tmp_path / "work").mkdir()
    env = plugins.env | {"RAY_AUTH_MODE": "disabled"}
    ended = fedbench(*command, cwd=tmp_path / "work", env=env)
    assert ended.code == 0, ended
    assert ended.out[:2] == ["checking 2 runs", "starting 2 runs"]
    assert sum(line.startswith("defense.number=0  finished in") for line in ended.out) == 1
    assert sum(line.startswith("defense.number=1  finished in") for line in ended.out) == 1
    n_cores = len(CORES)
    share = n_cores if name == "basic" else max(n_cores // 2, 1)
    assert [line for line in ended.out if line.startswith("cores")] == [f"cores {share}"] * 2
    sweep = tmp_path / "work" / "runs" / "default"
    folders = run_folders(tmp_path / "work" / "runs")
    assert [files(folder) for folder in folders] == [RUN_FILES] * 2
    left = {path.name for path in sweep.iterdir()} - {folder.name for folder in folders}
    assert left <= {"multirun.yaml", "planned.json"}


@pytest.mark.slow
@NEEDS_SUBMITIT
def test_a_failed_job_of_submitit_is_reported_and_keeps_its_logs(tmp_path: Path) -> None:
    command = ["-m", "hydra/launcher=submitit_local", "seed=0,1", "dataset=mnist"]
    ended = fedbench(*command, "dataset.root=nowhere", cwd=tmp_path)
    assert ended.code == 1
    assert all(line.startswith("fedbench: dataset.root=nowhere") for line in ended.err[:2]), ended
    assert ended.err[2] == "2 of 2 runs failed:"
    assert len(ended.err) == 5
    (logs,) = (tmp_path / "runs" / "default" / ".submitit").iterdir()
    assert "%" not in logs.name
    assert len([*logs.glob("*_log.err")]) == 2
