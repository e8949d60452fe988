"""The command line, run as a real process: what it accepts, refuses, writes and prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import yaml
from end_to_end import (
    CONFIGS,
    ROOT,
    RUN_FILES,
    TIMEOUT,
    Ended,
    Plugins,
    environment,
    fedbench,
    fedbench_in_this_process,
    files,
    install,
    rounds,
    run_folder,
    run_folders,
    start,
    succeed,
    summary,
    wait,
)
from hydra._internal.utils import get_args_parser

from fedbench import __version__
from fedbench.command_line import COMMANDS, FLAGS, WITH_VALUE, hydra_arguments
from fedbench.config_comments import comments
from fedbench.errors import UserError
from fedbench.results.origin import title
from fedbench.results.run_reader import read_runs

CONFIG = ROOT / "conf" / "config.yaml"
PLUGINS_WITH_SETTINGS = ("attack", "dataset", "defense", "executor", "model", "tracker")

KEYS = [
    "attack",
    "attack_rounds",
    "attack_start",
    "batch_size",
    "clip_grad",
    "dataset",
    "defense",
    "dirichlet_alpha",
    "evaluate_every",
    "executor",
    "local_epochs",
    "lr",
    "lr_decay",
    "malicious",
    "model",
    "momentum",
    "n_clients",
    "name",
    "non_iid",
    "out",
    "partition",
    "pdr",
    "pdr_end",
    "pdr_step",
    "pmr",
    "pool",
    "pretrain_non_iid",
    "pretrain_rounds",
    "pretrained",
    "rerun",
    "rounds",
    "seed",
    "server_lr",
    "tracker",
    "weight_decay",
]
GROUPS = [
    *("attack", "dataset", "defense", "executor", "model", "scenario", "size", "tracker"),
    *("sized", "tuned", "tuned_attack"),
]
ROUND_KEYS = [
    "round",
    "attacked",
    "pdr",
    "applied",
    "MA",
    "BA",
    "TPR",
    "TNR",
    "AUC",
    "threshold",
    "norm_ratio",
    "cosine",
    "benign_cosine",
    "BA_by_backdoor",
    "seconds",
    "clients",
    "check",
]
SUMMARY_KEYS = [
    "status",
    "MA",
    "BA",
    "TPR",
    "TNR",
    "AUC",
    "norm_ratio",
    "cosine",
    "benign_cosine",
    "BA_by_backdoor",
    "BA_cumulative",
    "lifespan_50",
    "lifespan_10",
    "rounds_after_attack",
    "rounds",
    "seconds",
    "seconds_by_step",
    "adaptive_to",
    "command",
    "git",
    "fedbench_git",
    "fedbench_code",
    "versions",
    "processor",
    "processes",
    "threads",
    "last_check",
    "run",
    "check",
]
CLIENT_KEYS = ["id", "malicious", "accepted", "score", "weight", "norm", "cosine"]
STEPS = ["train", "collude", "screen", "aggregate", "evaluate", "record"]

# Overrides, and what the error line must contain: the value and what is allowed.
MISTAKES = {
    "no values": (
        ["-m", "defense=choice()"],
        ["defense=choice(): has no values; write defense=A,B"],
    ),
    "unknown defense": (["defense=krumm"], ["defense=krumm", "did you mean krum?"]),
    "unknown data set": (["dataset=mnits"], ["dataset=mnits", "did you mean mnist?"]),
    "no defense": (["defense=null"], ["defense"]),
    "range": (["pmr=1.5"], ["pmr=1.5", "between 0 and 1"]),
    "not a number": (["pmr=nan"], ["pmr=nan", "a finite number"]),
    "type": (["pmr=abc"], ["pmr=abc: must be a number"]),
    "misspelt key": (["pmrr=0.2"], ["pmrr", "did you mean pmr?"]),
    "misspelt added key": (["+pmrr=0.2"], ["pmrr", "did you mean pmr?"]),
    "no clients": (["n_clients=0"], ["n_clients=0", "from 1 to 10000"]),
    "no number of clients": (["n_clients=abc"], ["n_clients=abc", "[fewest, most]"]),
    "range upside down": (["n_clients=[9,4]"], ["n_clients=[9, 4]", "[fewest, most]"]),
    "range in a sweep": (["-m", "n_clients=[4,9],[9,4]"], ["n_clients=[9, 4]", "[fewest, most]"]),
    "unknown scenario": (["scenario=convergd"], ["scenario=convergd", "did you mean converged?"]),
    "negative share": (["pdr=-1"], ["pdr=-1", "between 0 and 1"]),
    "fewer clients than take part": (["pool=5"], ["pool=5", "n_clients=6"]),
    "too few clients": (["defense=krum", "n_clients=2"], ["N - f - 2 >= 1", "N=2, f=0"]),
    "misspelt setting": (["defense=krum", "defense.ff=1"], ["krum has no such", "did you mean f?"]),
    "setting of another defense": (
        ["-m", "defense=krum,flame", "defense.noise=0.1"],
        ["defense.noise: krum has no such setting (known: f, m)", "defense.NAME.noise=..."],
    ),
    "setting of a misspelt defense": (
        ["-m", "defense=krum,flame", "defense.flam.noise=0.1"],
        ["defense.flam: no such defense; did you mean flame?"],
    ),
    "setting of a defense that is not in the sweep": (
        ["-m", "defense=krum,dp", "defense.flame.noise=0.1,0.2"],
        ["defense.flame.noise: no run of the sweep has defense=flame"],
    ),
    "setting of one defense without a sweep": (
        ["defense=flame", "defense.flame.noise=0.1"],
        ["defense.flame.noise=0.1: belongs in a sweep, -m", "write defense.noise=0.1"],
    ),
    "misspelt added setting": (["defense=krum", "+defense.ff=1"], ["'ff'", "did you mean f?"]),
    "type of setting": (["defense=krum", "defense.f=many"], ["defense.f=many", "a whole number"]),
    "bool": (
        ["defense=baybfed", "defense.persist=maybe"],
        ["persist=maybe: must be true or false"],
    ),
    "list of a plugin": (
        ["model.hidden=3"],
        ["model.hidden=3: must be a list, 'model.hidden=[3]'"],
    ),
    "range of setting": (["defense=krum", "defense.f=-1"], ["krum", "0 or more", "-1"]),
    "folder for a name": (["name=a/b"], ["name=a/b", "a folder name"]),
    "unknown attack": (["attack=dbaa"], ["attack=dbaa", "did you mean dba?"]),
    "unknown backdoor": (["attack.backdoors=[pach]"], ["'pach'", "did you mean patch?"]),
    "no backdoor": (["attack.backdoors=[3]"], ["backdoors", "3", "the name of a backdoor"]),
    "no backdoors": (["attack.backdoors=[]"], ["backdoors must be one or more"]),
    "setting of a backdoor": (
        ["attack.backdoors=[{name:patch,sise:3}]"],
        ["'sise'", "did you mean size?"],
    ),
    "backdoor of another data set": (
        ["attack.backdoors=[semantic]"],
        ["semantic refers to images of cifar10, not of fmnist_sample"],
    ),
    "images of another shape": (
        ["attack=edge_case", "attack.backdoors=[southwest]"],
        ["(3, 32, 32)", "fmnist_sample", "(1, 28, 28)"],
    ),
    "missing images": (
        ["attack=edge_case", "attack.backdoors=[{name:ardis,folder:nowhere}]"],
        ["nowhere", "no such file or folder"],
    ),
    "words on images": (["attack.backdoors=[words]"], ["fmnist_sample", "(1, 28, 28)"]),
    "packets on images": (["attack.backdoors=[traffic]"], ["fmnist_sample", "(1, 28, 28)"]),
    "trigger that cannot be split": (
        ["attack=dba", "attack.backdoors=[tail]"],
        ["to split", "Tail"],
    ),
    "trigger that does not fit": (
        ["-m", "attack.backdoors=[patch],[{name:patch,size:40}]"],
        ["size=40", "does not fit"],
    ),
    "target": (["attack.backdoors=[{name:bars,target:10}]"], ["target", "0..9", "10"]),
    "round after the last": (["attack_rounds=[3]"], ["attack_rounds=[3]", "2, the last round"]),
    "setting of an attack": (["attack=ipm", "attack.epsilon=-1"], ["epsilon", "above 0", "-1"]),
    "list without a sweep": (["pmr=0.2,0.3"], ["pmr=0.2,0.3: several", "fedbench -m pmr=0.2,0.3"]),
    "accelerator": (["executor.accelerator=abacus"], ["accelerator", "abacus", "cpu"]),
    "last run of a sweep": (["-m", "pmr=0.2,1.5"], ["pmr=1.5", "between 0 and 1"]),
    "last name of a sweep": (["-m", "defense=krum,krumm"], ["krumm", "did you mean krum?"]),
    "key of a sweep": (["-m", "+pmrr=0.2,0.3"], ["pmrr", "did you mean pmr?"]),
    "type in a sweep": (["-m", "pmr=0.2,abc"], ["pmr=abc: must be a number"]),
    "name of a sweep": (["-m", "name=a/b", "pmr=0.2,0.3"], ["name=a/b", "a folder name"]),
    # The settings of the plugins are right, although the default attack and defense lack them
    "range, and a setting of all attacks of a sweep": (
        ["-m", "attack=alie,ipm", "attack.omniscient=false", "rounds=0"],
        ["rounds=0: must be a whole number from 1 to 100000"],
    ),
    "range, and a setting of one defense of a sweep": (
        ["-m", "defense=krum,flame", "defense.flame.noise=0.1", "rounds=0"],
        ["rounds=0: must be a whole number from 1 to 100000"],
    ),
    "range, and settings of one defense that are off": (
        ["-m", "defense=baybfed", "defense.norm_range=null", "defense.score_cap=null", "rounds=0"],
        ["rounds=0: must be a whole number from 1 to 100000"],
    ),
    "misspelt group": (
        ["defence=krum"],
        ["defence: no such setting; did you mean defense? fedbench"],
    ),
    "other case": (["defense=FLAME"], ["defense=FLAME", "did you mean flame?"]),
    "number for a list": (["attack_rounds=5"], ["must be a list, 'attack_rounds=[5]'"]),
    "space for a comma": (["pmr=0.2", "0.3"], ["pmr=0.2 0.3: ", "-m pmr=0.2,0.3"]),
    "space after a comma": (["-m", "pmr=0.2,", "0.3"], ["has a comma too many"]),
    "comma at the end": (["defense=krum,"], ["has a comma too many; write defense=krum"]),
    "list of names": (["defense=[krum,flame]"], ["one name; a sweep is -m defense=krum,flame"]),
    "number for a name": (["defense=5"], ["defense=5: must be a name"]),
    "empty name": (["defense="], ["defense=: must be a name"]),
    "list for a launcher": (["hydra/launcher=[1,2]"], ["must be one name; a sweep is -m"]),
    "reference for a name": (
        ["model=${oc.create:[1]}"],
        ["model=${oc.create:[1]}: must be a name"],
    ),
    "reference for a launcher": (["hydra/launcher=${oc.create:[1]}"], ["must be a name"]),
    "empty value": (["pmr="], ["pmr=: must be a number"]),
    "spaces around =": (["pmr", "=", "0.3"], ["write key=value without spaces"]),
    "space after =": (["pmr=", "0.3"], ["pmr= 0.3: write key=value without spaces"]),
    "no value": (["defense", "krum"], ["defense: needs a value, defense=krum"]),
    "no key": (["krum"], ["krum: must follow its group, defense=krum"]),
    "colon": (["pmr:0.3"], ["pmr:0.3", "settings are key=value"]),
    "dashes": (["--defense", "krum"], ["--defense: is a setting, without dashes: defense=krum"]),
    "dashes and =": (["--pmr=0.3"], ["is a setting, without dashes: pmr=0.3"]),
    "misspelt option": (["--multrun"], ["--multrun: no such option; did you mean --multirun?"]),
    "wrong value of an option": (["--cfg=all_of_it"], ["needs a value, job, hydra or all"]),
    "misspelt command": (["reprot", "runs/x"], ["reprot: no such command", "did you mean report?"]),
    "command behind a setting": (["pmr=0.3", "report"], ["report: must come first"]),
    "sweep file as a word": (["sweeps/x.yaml"], ["--config-dir sweeps --config-name x"]),
    "no such sweep file": (["--config-name", "nope"], ["nope: no such config", "--config-dir"]),
    "no such folder of sweeps": (
        ["--config-dir", "a", "--config-name", "b"],
        ["--config-dir a: no"],
    ),
    "open bracket": (["n_clients=[15,30"], ["without its partner; quote", "'n_clients=[15,30]'"]),
    "open quote": (["name='x"], ["name='x: has a bracket or quote without its partner"]),
    "parentheses": (["name=a(b)"], ["""quote the value twice, "name='a(b)'\""""]),
    "setting without a name": (["pmr,=3"], ["'pmr,' is no name of a setting"]),
    "removed defense": (["~defense"], ["~defense: a run needs a choice of defense"]),
    "plus without a value": (["+pmr"], ["+pmr: no such command", "did you mean pmr?"]),
    "plus": (["+pmr=0.3"], ["pmr", "remove + prefix"]),
    "removed nothing": (["~nope"], ["'nope' does not exist"]),
}
# Errors of data and disk, which are found only when the run starts.
DAMAGES = {
    "no data": (["dataset=mnist", "dataset.root=nowhere"], ["dataset.root=nowhere", "idx3-ubyte"]),
    "cut off data": (
        ["dataset=mnist", "dataset.root=cut_off"],
        ["cut_off/train-images-idx3-ubyte.gz", "compressed data is truncated"],
    ),
    "wrong data": (["dataset=mnist", "dataset.root=other"], ["other/train-images", "SHA-256"]),
    "file for a folder": (["out=file/below"], ["file/below", "Not a directory"]),
    "no such place": (["out=/proc/x"], ["/proc/x", "No such file or directory"]),
    "place of a sweep": (["-m", "pmr=0.2,0.3", "out=file/below"], ["file/below"]),
}


def assert_one_line(ended: Ended, parts: list[str]) -> None:
    assert ended.code not in (0, None), ended
    started = ("  starting", "checking 2 runs")  # printed before the slow imports
    assert all(line.endswith(started) for line in ended.out[:1]), ended
    assert ended.out[1:] == [], ended
    assert len(ended.err) == 1, "\n".join(ended.err)
    (line,) = ended.err
    assert line.startswith("fedbench: "), line
    for part in parts:
        assert part in line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_user_error_prints_one_line_and_writes_nothing(mistake: str, tmp_path: Path) -> None:
    overrides, parts = MISTAKES[mistake]
    launcher = ["hydra/launcher=basic"] if "-m" in overrides else []
    assert_one_line(fedbench_in_this_process(*overrides, *launcher, cwd=tmp_path), parts)
    assert files(tmp_path) == []


def test_a_name_may_come_from_the_environment(tmp_path: Path) -> None:
    command, env = ("model=${oc.env:NETWORK}", "model.hidden=[4]", "rounds=1"), {"NETWORK": "mlp"}
    ended = fedbench_in_this_process(*command, cwd=tmp_path, env=env)
    assert (ended.code, ended.err) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["unknown defense", "type", "last run of a sweep"])
def test_a_process_prints_user_errors_in_one_line(mistake: str, tmp_path: Path) -> None:
    overrides, parts = MISTAKES[mistake]
    assert_one_line(wait(start(*overrides, cwd=tmp_path)), parts)
    assert files(tmp_path) == []


def test_a_traceback_can_be_requested_of_a_sweep(tmp_path: Path) -> None:
    sweep, env = ("-m", "pmr=0.2,3", "hydra/launcher=basic"), {"FEDBENCH_TRACEBACK": "1"}
    ended = fedbench_in_this_process(*sweep, cwd=tmp_path, env=env)
    assert ended.code == 1
    assert ended.err[0].startswith("Traceback")
    assert ended.err[-1].startswith("fedbench.errors.UserError: pmr=3.0: must be")
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_error_of_data_or_disk_prints_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sample = ROOT / "fedbench" / "assets" / "fmnist_sample"
    for folder in ("cut_off", "other"):
        shutil.copytree(sample, tmp_path / folder)
    images = tmp_path / "cut_off" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:5000])
    before = files(tmp_path)

    overrides, parts = DAMAGES[damage]
    launcher = ["hydra/launcher=basic"] if "-m" in overrides else []
    assert_one_line(fedbench_in_this_process(*overrides, *launcher, cwd=tmp_path), parts)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_a_sweep_whose_runs_all_fail_to_start_exits_with_an_error(tmp_path: Path) -> None:
    ended = fedbench("-m", "pmr=0.2,0.3", "dataset=mnist", "dataset.root=nowhere", cwd=tmp_path)
    assert ended.code == 1, ended
    *errors, count, one, other = ended.err
    assert all(line.startswith("fedbench: dataset.root=nowhere") for line in errors), ended.err
    assert count == "2 of 2 runs failed:"
    assert [line.partition(" (")[0] for line in (one, other)] == ["  pmr=0.2", "  pmr=0.3"]


@pytest.mark.slow
def test_a_run_writes_its_directory_and_repeating_the_command_skips_it(tmp_path: Path) -> None:
    command = ["pmr=0.34", "attack_start=1", "out=here", "name=${defense.name}-${seed}"]
    ended = wait(start(*command, cwd=tmp_path))
    assert (ended.code, ended.err) == (0, []), ended
    title = (
        "fedavg constrain_and_scale pmr=0.34 n_clients=6 rounds=3 pretrain_rounds=1 attack_start=1 "
        "local_epochs=1 seed=0  "
    )
    assert all(line.startswith(title) for line in ended.out), ended.out
    assert [line.removeprefix(title).split("  ")[0] for line in ended.out[:-1]] == [
        "starting",
        "sequential on 1 process",
        "pretrain 1/1",
        "round 1/3",
        "round 2/3",
        "round 3/3",
    ]

    assert os.listdir(tmp_path) == ["here"]
    folder = run_folder(tmp_path / "here")
    cache = {path.suffix for path in (tmp_path / "here" / ".pretrained").iterdir()}
    assert cache == {".pt", ".lock"}
    assert files(folder) == RUN_FILES
    assert len(files(tmp_path / "here")) == len(RUN_FILES) + 5  # 3 folders and 2 cache files

    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert sorted(config) == [key for key in KEYS if key != "rerun"]
    assert config["defense"] == {"name": "fedavg"}
    assert config["name"] == "fedavg-0"  # resolved
    assert (config["pmr"], config["attack_start"], config["n_clients"]) == (0.34, 1, 6)

    records = rounds(folder)
    assert [list(record) for record in records] == [ROUND_KEYS] * 3
    assert [record["round"] for record in records] == [0, 1, 2]
    assert [record["attacked"] for record in records] == [False, True, True]
    assert [record["TPR"] for record in records] == [None, 0.0, 0.0]  # first none, then missed
    assert [record["AUC"] for record in records] == [None] * 3  # fedavg has no scores
    for record in records:
        assert list(record["seconds"]) == STEPS
        assert list(record["BA_by_backdoor"]) == ["0"]
        assert [client["id"] for client in record["clients"]] == list(range(6))
        assert sum(client["malicious"] for client in record["clients"]) == 2 * record["attacked"]
        for client in record["clients"]:
            assert list(client) == CLIENT_KEYS
            assert (client["accepted"], client["score"]) == (True, None)
            assert client["norm"] > 0

    end = summary(folder)
    assert list(end) == SUMMARY_KEYS
    assert (end["status"], end["rounds"], end["TPR"], end["TNR"]) == ("finished", 3, 0.0, 1.0)
    assert (end["MA"], end["BA"]) == (records[-1]["MA"], records[-1]["BA"])
    assert list(end["seconds_by_step"]) == STEPS
    assert list(end["versions"]) == ["fedbench", "python", "torch", "lightning", "numpy", "scipy"]

    everything = [path for path in tmp_path.rglob("*") if path.is_file()]
    times = [(path, path.stat().st_mtime_ns) for path in everything]
    again = fedbench_in_this_process(*command, cwd=tmp_path)
    assert (again.code, again.err) == (0, [])
    (line,) = again.out
    assert line.startswith(f"{title}already finished, skipped")
    assert [(path, path.stat().st_mtime_ns) for path in everything] == times
    assert sorted(everything) == sorted(path for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_without_a_login_the_default_tracker_writes_to_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    env = {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    succeed("tracker=wandb", "rounds=1", cwd=tmp_path / "work", env=env)
    assert os.listdir(tmp_path / "work") == ["runs"]
    folder = run_folder(tmp_path / "work" / "runs")
    assert sorted(os.listdir(folder)) == sorted([*RUN_FILES, "wandb"])


@pytest.mark.slow
def test_a_sweep_prints_one_table_of_all_runs(tmp_path: Path) -> None:
    command = ["-m", "defense=krum,median", "rounds=2"]
    ended = wait(start(*command, cwd=tmp_path))
    assert (ended.code, ended.err) == (0, []), ended
    head = next(i for i, line in enumerate(ended.out) if line.split()[:2] == ["defense", "BA"])
    assert ended.out[:2] == ["checking 2 runs", "starting 2 runs"]
    reported = [line for line in ended.out[2 : head - 1] if not line.startswith("sweep of 2: ")]
    assert sorted(line.partition(" in ")[0] for line in reported) == [
        "defense=krum  finished",
        "defense=median  finished",
    ], ended.out
    assert sum(" defense " in line for line in ended.out) == 1
    rows = [line.split() for line in ended.out[head + 2 : head + 4]]
    assert [(row[0], len(row)) for row in rows] == [("krum", 7), ("median", 7)]
    assert rows[1][3:6] == ["-", "-", "-"]  # median judges no client
    assert len([*(tmp_path / "runs").glob(".pretrained/*.pt")]) == 1  # shared by the two

    assert os.listdir(tmp_path) == ["runs"]
    folders = run_folders(tmp_path / "runs")
    assert [folder.name.partition("-")[0] for folder in folders] == ["krum", "median"]
    assert [files(folder) for folder in folders] == [RUN_FILES] * 2

    again = succeed(*command, cwd=tmp_path)
    assert again.out[0] == "2 of 2 runs already finished"
    assert again.out[1].strip() == "", "the table follows"
    assert [line.split() for line in again.out if line.split()[:1] == ["krum"]][-1] == rows[0]


@pytest.mark.slow
def test_runs_of_a_sweep_are_told_apart_by_what_was_swept(tmp_path: Path) -> None:
    command = ["-m", "pdr=0.5,0.8", "non_iid=0,0.5", "rounds=1", "n_clients=5"]
    ended = fedbench_in_this_process(*command, "hydra/launcher=basic", cwd=tmp_path)
    assert ended.code == 0, ended
    labels = [line.partition("  ")[0] for line in ended.out if "finished in" in line]
    swept = [f"pdr={pdr} non_iid={non_iid}" for pdr in ("0.5", "0.8") for non_iid in ("0", "0.5")]
    assert labels == swept
    fixed = "n_clients=5 rounds=1 pretrain_rounds=1 local_epochs=1 seed=0"
    titles = {title(run.config, run.origin) for run in read_runs([tmp_path / "runs"])}
    assert titles == {f"fedavg constrain_and_scale pmr=0.2 {setting} {fixed}" for setting in swept}
    (head,) = (line.split() for line in ended.out if " defense " in line)
    assert head[:3] == ["pdr", "non_iid", "defense"]
    assert "rounds 1, pretrain_rounds 1, local_epochs 1; seed 0" in " ".join(
        " ".join(ended.out).split()
    )
    origins = [json.loads((f / "origin.json").read_text()) for f in run_folders(tmp_path / "runs")]
    assert {origin["choices"]["defense"] for origin in origins} == {"fedavg"}
    assert sorted(origin["changed"].get("pdr", 0.5) for origin in origins) == [0.5, 0.5, 0.8, 0.8]


@pytest.mark.slow
def test_a_sweep_file_is_checked_and_run(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    sweep = {
        "defaults": ["config", "_self_"],
        "hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"defense": "krum", "pmr": "0.2,2"}}},
    }
    (tmp_path / "sweeps" / "mine.yaml").write_text(yaml.safe_dump(sweep))
    command = ["--config-dir", "sweeps", "--config-name", "mine", "rounds=1"]
    ended = fedbench_in_this_process(*command, "hydra/launcher=basic", cwd=tmp_path)
    assert_one_line(ended, ["pmr=2", "between 0 and 1"])
    assert sorted(os.listdir(tmp_path)) == ["sweeps"]
    succeed(*command, "pmr=0.2,0.4", cwd=tmp_path)
    assert len(run_folders(tmp_path / "runs")) == 2


@pytest.mark.slow
def test_a_converged_sweep_over_non_iid_shares_one_pretrained_model(tmp_path: Path) -> None:
    command = ["scenario=converged", "pretrain_rounds=1", "rounds=1", "pmr=0.34"]
    splits = ["non_iid=0,1", "n_clients=[4,5],6", "pool=6"]
    ended = succeed("-m", *command, *splits, cwd=tmp_path)
    assert len([*(tmp_path / "runs").glob(".pretrained/*.pt")]) == 2
    cells = [line.split()[:4] for line in ended.out if " fedavg " in line]
    rows = [" ".join(row) for row in cells if row[0] in ("0.0", "1.0")]
    assert [row.partition(" fedavg")[0] for row in rows] == [
        *("0.0 6", "0.0 [4, 5]", "1.0 6", "1.0 [4, 5]")
    ]
    assert "pretrain_non_iid 0.0, rounds 1, scenario converged, " in " ".join(ended.out)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "basic"])  # the default is tested above
def test_a_sweep_on_a_launcher(launcher: str, tmp_path: Path) -> None:
    settings = [f"hydra/launcher={launcher}", "defense=krum,median", "rounds=1"]
    ended = succeed("-m", *settings, cwd=tmp_path)
    assert sum(" defense " in line for line in ended.out) == 1
    assert [files(folder) for folder in run_folders(tmp_path / "runs")] == [RUN_FILES] * 2
    assert not any("HYDRA" in line or "Joblib" in line for line in ended.out)


PLUGINS = """
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("boom")
@dataclass(frozen=True)
class Boom(Defense):
    fuse: int = 1

    def aggregate(self, updates, state, view):
        if view.index == self.fuse:
            raise RuntimeError(f"boom in round {view.index}")
        return mean_of(updates, view.client_ids >= 0), state


@DEFENSES.register("smallest")
@dataclass(frozen=True)
class Smallest(Defense):
    keep: int = 1

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def aggregate(self, updates, state, view):
        norms = updates.norm(dim=1)
        return mean_of(updates, norms.argsort().argsort() < self.keep, norms), state
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    return install(
        tmp_path / "site",
        f"[fedbench.defenses]\nboom = theirs:Boom\nsmallest = theirs:Smallest\n{CONFIGS}",
        PLUGINS,
        {"defense/boom": "name: boom\nfuse: 1\n", "defense/smallest": "name: smallest\nkeep: 2\n"},
    )


@pytest.mark.slow
def test_a_failing_run_does_not_stop_a_sweep_of_plugins(tmp_path: Path, plugins: Plugins) -> None:
    work = tmp_path / "work"
    work.mkdir()
    sweep = ["-m", "defense=boom,smallest"]
    ended = fedbench(*sweep, cwd=work, env=plugins.env)
    assert ended.code not in (0, None)
    assert "RuntimeError: boom in round 1" in ended.err[-1]
    (line,) = (line for line in ended.err if line.startswith("fedbench: "))
    assert "RuntimeError: boom in round 1 (" in line
    assert ended.err[-2] == "1 of 2 runs failed:"
    assert not any(line.startswith("Traceback") for line in ended.err)
    rows = [line.split() for line in ended.out if line.startswith((" boom ", " smallest "))]
    assert [row[:2] for row in rows[:1]] == [["boom", "failed"]]
    assert (rows[1][0], len(rows[1])) == ("smallest", 7)

    boom, smallest = run_folders(work / "runs")
    failed = summary(boom)
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: boom in round 1")
    assert "MA" not in failed
    assert len(rounds(boom)) == 1
    assert summary(smallest)["status"] == "finished"
    assert yaml.safe_load((smallest / "config.yaml").read_text())["defense"]["keep"] == 2
    accepted = [[client["accepted"] for client in record["clients"]] for record in rounds(smallest)]
    assert [sum(verdicts) for verdicts in accepted] == [2, 2, 2]

    once = fedbench("defense=boom", cwd=work, env=plugins.env)
    assert once.code not in (0, None), "a failed run is repeated, and fails again"
    assert once.out[-1].endswith("failed: RuntimeError: boom in round 1")


@pytest.mark.slow
def test_a_wrong_setting_of_a_plugin_prints_one_line(tmp_path: Path, plugins: Plugins) -> None:
    work = tmp_path / "work"
    work.mkdir()
    command = ["defense=smallest", "defense.keep=0"]
    ended = fedbench(*command, cwd=work, env=plugins.env)
    assert_one_line(ended, ["smallest", "keep must be at least 1, got 0"])
    ended = fedbench("defense=smalest", cwd=work, env=plugins.env)
    assert_one_line(ended, ["did you mean smallest?"])
    assert files(work) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("sweep", [[], ["-m", "defense=krum,median"]])
def test_ctrl_c_and_sigterm_say_how_to_resume(
    sweep: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes, SIGTERM the command alone. Nothing temporary is left."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    process = start(*sweep, "rounds=200", cwd=tmp_path, env={"TMPDIR": str(temporary)})
    assert process.stdout is not None
    while "starting" not in (line := process.stdout.readline()):
        assert line, wait(process)
    while not any((tmp_path / "runs").glob("*/*/checkpoint.pt")):
        assert process.poll() is None, wait(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    ended = wait(process)
    assert (ended.code, ended.err) == (128 + number, [])
    stopped = "stopped: 0 of 2 runs done; the same command resumes the others"
    assert (stopped if sweep else "stopped after round") in ended.out[-1]
    folders = run_folders(tmp_path / "runs")  # in a sweep, the runs that have started
    assert not any((folder / "summary.json").exists() for folder in folders)
    assert not [*(tmp_path / "runs" / "default").glob(".sweep*")]
    if sweep:
        assert [*temporary.iterdir()] == []
    shutil.rmtree(temporary)


def test_help_explains_every_setting_in_80_columns(tmp_path: Path) -> None:
    ended = fedbench_in_this_process("--help", cwd=tmp_path)
    assert (ended.code, ended.err, files(tmp_path)) == (0, [], [])
    assert max(map(len, ended.out)) <= 80
    rows = [line.split(maxsplit=1) for line in ended.out if re.match(r"  [a-z_.]+=", line)]
    labels = [row[0].partition("=")[0] for row in rows]
    groups = [group for group in GROUPS if not group.startswith(("sized", "tuned"))]
    top_level = [label for label in labels if "." not in label]
    assert sorted(top_level) == sorted({*KEYS, *groups})
    text = " ".join(" ".join(ended.out).split())
    comments = re.findall(r"^[a-z_]+: .*? # (.*)$", CONFIG.read_text(), re.MULTILINE)
    assert len(comments) == len(KEYS) - 6  # six are groups
    for comment in comments:
        assert " ".join(comment.split()) in text
    for command in COMMANDS:
        assert f"\n  {command} " in "\n".join(ended.out)


def test_help_explains_the_settings_of_the_chosen_plugins(tmp_path: Path) -> None:
    words = ["--help", "defense=baybfed_literal", "dataset=iot_sample", "lr=3", "pmr=0.1,0.2"]
    ended = fedbench_in_this_process("-m", *words, cwd=tmp_path)
    text = " ".join(" ".join(ended.out).split())
    assert "defense.score=divergence distance (square root) or divergence" in text  # inherited
    assert "dataset.length=20 packets per window" in text
    assert "model=gru" in text
    assert " lr=3.0 " in text
    assert " pmr=0.2 " in text
    ended = fedbench_in_this_process("--help", "defense=krumm", cwd=tmp_path)
    assert_one_line(ended, ["did you mean krum?"])


@pytest.mark.parametrize(
    "file", [file for group in PLUGINS_WITH_SETTINGS for file in CONFIG.parent.glob(f"{group}/*")]
)
def test_config_files_explain_their_settings(file: Path) -> None:
    """So that `--help` explains them."""
    group = file.parent.name
    explained = comments(f"{group}/{file.stem}")
    settings = yaml.safe_load(file.read_text())
    own, prefix = (settings, "") if group != "dataset" else (settings["dataset"], "dataset.")
    for key in {*own} - {"name", "defaults"}:
        assert explained[f"{prefix}{key}"], key


def test_hydras_options_are_known() -> None:
    """A flag that is not in the tables would be refused."""
    actions = [action for action in get_args_parser()._actions if action.option_strings]
    flags = {name for a in actions if a.nargs == 0 for name in a.option_strings}
    assert flags == FLAGS
    valued = {name: tuple(a.choices or ()) for a in actions for name in a.option_strings}
    assert {name: valued[name] for name in {*valued} - flags} == WITH_VALUE


def test_options_may_stand_anywhere() -> None:
    words = ["defense=krum", "-m", "pmr=0.2,0.3", "--config-dir", "conf", "rounds=1", "-c=job"]
    assert hydra_arguments(words) == [
        *("-m", "--config-dir", "conf", "-c", "job"),
        *("defense=krum", "pmr=0.2,0.3", "rounds=1"),
    ]


def test_an_option_needs_its_value() -> None:
    with pytest.raises(UserError, match=r"^--config-name: needs a value$"):
        hydra_arguments(["pmr=0.2", "--config-name"])


def test_force_is_the_setting_rerun() -> None:
    assert hydra_arguments(["defense=krum", "--force"]) == ["defense=krum", "rerun=true"]


def test_version(tmp_path: Path) -> None:
    ended = fedbench_in_this_process("--version", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, [f"fedbench {__version__}"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_exists_and_explains_itself(command: str, tmp_path: Path) -> None:
    module, about = COMMANDS[command]
    assert callable(import_module(module).main)
    assert about
    with mock.patch("end_to_end.SMALL", {}):
        ended = fedbench_in_this_process(command, "--help", cwd=tmp_path)
    assert (ended.code, ended.err, files(tmp_path)) == (0, [], [])
    assert len(ended.out) > 2
    assert f"fedbench {command}".removesuffix(" run") in "\n".join(ended.out)


def test_a_subcommand_gets_its_arguments(tmp_path: Path) -> None:
    with mock.patch("end_to_end.SMALL", {}):
        ended = fedbench_in_this_process("report", "runs/x", cwd=tmp_path)
    assert ended.code != 0
    assert "no folder runs/x" in ended.err[-1]


@pytest.mark.parametrize(
    "words",
    [["pmr=1.5"], ["rounds=0"], ["-m", "pmr=0.2,0.3,1.5"], ["--help"], ["list"], ["krum"]],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(words: list[str], tmp_path: Path) -> None:
    """Importing torch takes seconds: errors of range must not wait for it."""
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from fedbench.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.stdout.splitlines()[-1] == "False", done


@pytest.mark.slow
def test_settings_of_one_plugin_in_a_sweep_are_those_of_single_runs(tmp_path: Path) -> None:
    """Krum once, FLAME twice, on the command line and in a file; alone they are the same runs."""
    small = ["rounds=1", "attack=ipm", "hydra/launcher=basic"]
    sweep = ["defense=krum,flame", "defense.flame.noise=0.001,0.01", "attack.omniscient=false"]
    ended = fedbench_in_this_process("-m", *sweep, *small, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, [])
    folders = run_folders(tmp_path / "runs")
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    defenses = [(c["defense"]["name"], c["defense"].get("noise")) for c in configs]
    assert sorted(defenses, key=str) == [("flame", 0.001), ("flame", 0.01), ("krum", None)]
    assert all(config["attack"]["omniscient"] is False for config in configs)

    alone = ["defense=flame", "defense.noise=0.01", "attack.omniscient=false", *small]
    assert "already finished, skipped" in fedbench_in_this_process(*alone, cwd=tmp_path).out[-1]

    params = {"defense": "krum,flame", "defense.flame.noise": "0.001,0.01"}
    content = {
        "defaults": ["config", "_self_"],
        "hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    file = ["--config-dir", ".", "--config-name", "mine"]
    ended = fedbench_in_this_process(*file, "attack.omniscient=false", *small, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, [])
    assert "3 of 3 runs already finished" in ended.out
    assert run_folders(tmp_path / "runs") == folders
