"""engine.launch, end to end: processes never change a result, and end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import (
    TIMEOUT,
    Ended,
    Plugins,
    checkpoint,
    environment,
    fedbench,
    fedbench_in_this_process,
    fingerprint,
    install,
    result,
    rounds,
    run_folder,
    run_folders,
    start,
    succeed,
    summary,
    wait,
    with_small,
)

from fedbench import single_run
from fedbench.composition import compose
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine import launch
from fedbench.multirun import resources
from fedbench.plan import Plan

pytestmark = pytest.mark.slow

BATCH_NORM_MODEL = """
from dataclasses import dataclass

from torch import nn

from fedbench.models import MODELS, Model


@MODELS.register("batch_norm")
@dataclass(frozen=True)
class BatchNormNet(Model):
    width: int = 16

    def build(self, sample_shape, n_classes):
        return nn.Sequential(
            nn.Conv2d(sample_shape[0], self.width, kernel_size=5, stride=3),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(self.width * 64, n_classes),
        )
"""

UPDATE_RECORDER = """
import hashlib
from dataclasses import dataclass

import torch

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("update_recorder")
@dataclass(frozen=True)
class UpdateRecorder(Defense):
    keep: int = 1

    def init(self):
        return []

    def aggregate(self, updates, state, view):
        rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in updates]
        return mean_of(updates, torch.arange(len(updates)) < self.keep), [*state, rows]
"""


def run_on(devices: int, *overrides: str, cwd: Path, env: dict[str, str] | None = None) -> Path:
    """Run on this number of processes; return the run directory."""
    out = f"on{devices}"
    command = [*overrides, f"executor.devices={devices}", f"out={out}"]
    if devices == 1 and env is None:
        ended = fedbench_in_this_process(*command, cwd=cwd)
    else:
        ended = fedbench(*command, cwd=cwd, env=env)
    assert ended.code == 0, ended
    return run_folder(cwd / out)


def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    command = ["defense=krum", "n_clients=[3,5]", "pool=7", "pmr=0.4"]
    one, two = (run_on(devices, *command, cwd=tmp_path) for devices in (1, 2))
    assert one.name == two.name
    assert result(one) == result(two)
    assert [len(record["clients"]) for record in rounds(two)] == [4, 5, 3]
    (alone,), (shared,) = ((tmp_path / out).glob(".pretrained/*.pt") for out in ("on1", "on2"))
    assert fingerprint(checkpoint(alone)) == fingerprint(checkpoint(shared))


def test_two_processes_give_the_bits_of_one_with_batch_norm(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.models]\nbatch_norm = theirs:BatchNormNet\n",
        BATCH_NORM_MODEL,
        {"model/batch_norm": "name: batch_norm\nwidth: 16\n"},
    )
    command = [plugins.searchpath, "model=batch_norm", "n_clients=3", "rounds=2", "pmr=0.34"]
    one, two = (run_on(devices, *command, cwd=tmp_path, env=plugins.env) for devices in (1, 2))
    assert one.name == two.name
    assert result(one) == result(two)
    buffers = checkpoint(two / "checkpoint.pt")["buffers"]
    assert buffers.shape == (32,)
    assert buffers[16:].ne(1).all(), "running variances never changed"


@pytest.mark.parametrize(
    "settings",
    [["executor=vectorized", "executor.stack=2"], ["executor.threads=2"]],
    ids=["vectorized", "spawned"],  # processes with several threads are not forked
)
def test_two_processes_give_the_bits_of_one_with_other_executors(
    settings: list[str], tmp_path: Path
) -> None:
    data = ["partition=dirichlet", "pretrain_non_iid=0", "n_clients=[1,4]", "seed=13"]
    command = [*settings, *data, "model.hidden=[16]", "attack.epochs=2", "rounds=2"]
    one, two = (run_on(devices, *command, "pmr=0.5", cwd=tmp_path) for devices in (1, 2))
    assert result(one) == result(two)
    # In one round there are more processes than clients.
    assert [len(record["clients"]) for record in rounds(two)] == [1, 4]


def test_user_errors_on_several_processes_print_one_line(tmp_path: Path) -> None:
    command = ["executor.devices=2", "dataset=mnist", "dataset.root=nowhere"]
    ended = wait(start(*command, cwd=tmp_path))
    assert ended.code not in (0, None)
    assert [line.partition("  ")[2] for line in ended.out] == ["starting"]
    assert [line for line in ended.err if "Traceback" in line] == []
    assert ended.err[-1].startswith("fedbench: dataset.root=nowhere: expected ")
    assert os.listdir(tmp_path) == []
    assert len(ended.err) == 1, "\n".join(ended.err)


def run_and_interrupt(to_all: bool, cwd: Path) -> Ended:
    process = start("executor.devices=2", "rounds=30", cwd=cwd)
    assert process.stdout is not None
    while "round 1/30" not in (line := process.stdout.readline()):
        assert line, wait(process)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    return wait(process)


@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill -INT"])
def test_interrupt_stops_all_processes(to_all: bool, tmp_path: Path) -> None:
    ended = run_and_interrupt(to_all, tmp_path)
    assert ended.code == 130
    assert not any("Traceback" in line for line in ended.err), ended.err
    assert len(rounds(run_folder(tmp_path / "runs"))) < 30, "the run was not interrupted"
    assert sum("the same command resumes it" in line for line in ended.out) == 1


def test_results_depend_on_the_seed_and_not_on_the_process(tmp_path: Path) -> None:
    command = ["rounds=2", "partition=dirichlet", "attack=constrain_and_scale"]
    succeed(*command, "out=first", cwd=tmp_path, env={"PYTHONHASHSEED": "1"})
    sweep = ["-m", "seed=1,0", *command, "out=second"]  # seed 0 follows another run in its process
    succeed(*sweep, cwd=tmp_path, env={"PYTHONHASHSEED": "2"})
    first = run_folder(tmp_path / "first")
    same = tmp_path / "second" / "default" / first.name
    (other,) = (path for path in run_folders(tmp_path / "second") if path != same)
    assert result(same) == result(first)
    for part, value in result(other).items():
        assert value != result(first)[part], part


def test_first_updates_do_not_depend_on_the_defense(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.defenses]\nupdate_recorder = theirs:UpdateRecorder\n",
        UPDATE_RECORDER,
        {"defense/update_recorder": "name: update_recorder\nkeep: 1\n"},
    )
    sweep = ["-m", plugins.searchpath, "defense=update_recorder", "defense.keep=1,4", "pmr=0.34"]
    succeed(*sweep, "pool=8", cwd=tmp_path, env=plugins.env)
    runs = run_folders(tmp_path / "runs")
    one, other = (checkpoint(run / "checkpoint.pt")["defense_state"] for run in runs)
    assert len(set(one[0])) == 6  # updates of all clients differ
    assert one[0] == other[0]
    assert not set(one[1]) & set(other[1])  # from now on, the global models differ

    def participants(run: Path) -> list[list[tuple[int, bool]]]:
        return [[(c["id"], c["malicious"]) for c in record["clients"]] for record in rounds(run)]

    assert participants(runs[0]) == participants(runs[1])


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_results_do_not_depend_on_the_order_or_assignment_of_groups(executor: str) -> None:
    from fedbench.engine.client_runner import ClientRunner
    from fedbench.engine.client_selection import Round
    from fedbench.engine.flat_parameters import FlatModel
    from fedbench.engine.launch import make_fabric
    from fedbench.single_run import build_rank_context

    plan = Plan.of(small_config(executor))
    rank_context = build_rank_context(plan, plan.source.load(), make_fabric(plan.executor))
    layout = rank_context.replica.layout
    context = rank_context.backdoor_context(layout.read_params(), layout.read_buffers())
    rank_context.set_backdoors([backdoor.prepare(context) for backdoor in plan.backdoors])
    round_ = Round(0, rank_context.selection.select(0), layout.read_params(), layout.read_buffers())
    assert [p.malicious for p in round_.participants].count(True) == 2
    backend = plan.executor.backend(rank_context.replica, plan.config)
    runner = ClientRunner(rank_context, backend)
    costs = [rank_context.data.cost(0, p) for p in round_.participants]
    groups = backend.groups(costs, [p.malicious for p in round_.participants])
    assert sorted(i for group in groups for i in group) == [0, 1, 2, 3, 4]

    def trained(groups: list[list[int]]) -> torch.Tensor:
        rows = round_.params.new_full((5, layout.n_params), torch.nan)
        for group in groups:
            out = [FlatModel(rows[i], torch.empty(0)) for i in group]
            runner.run(round_, [round_.participants[i] for i in group], out)
        return rows

    whole = trained(groups)
    assert whole.isfinite().all()
    assert torch.equal(trained(groups[::-1]), whole)
    for group in groups:
        assert torch.equal(trained([group])[group], whole[group])


def small_config(executor: str) -> RunConfig:
    config = RunConfig(
        defense={"name": "fedavg"},
        attack={"name": "constrain_and_scale"},
        dataset={"name": "fmnist_sample"},
        model={"name": "mlp", "hidden": [16]},
        executor={"name": executor},
        tracker={"name": "none"},
    )
    return replace(config, n_clients=5, pmr=0.4, local_epochs=1)


FAILING_NETWORK = """
import multiprocessing
import os
import signal

import torch


class FailingNetwork(torch.nn.Sequential):
    # Raises, or kills its process, on one rank after some rounds.

    steps = 0  # of all clients of this rank

    def __init__(self, failure, rank):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        self.failure, self.rank = failure, rank

    def forward(self, x):
        rank = 1 if multiprocessing.current_process().name == "rank 1" else 0
        FailingNetwork.steps += self.training
        if self.training and self.steps > 400 and rank == self.rank:
            if self.failure == "raise":
                raise ArithmeticError("broken layer")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


def run_and_fail(failure: str, rank: int, devices: int, cwd: Path) -> tuple[Ended, Path]:
    """Run until one rank raises or is killed; return its output and run directory."""
    (cwd / "theirs.py").write_text(FAILING_NETWORK)
    arguments = [f"model.arguments.failure={failure}", f"model.arguments.rank={rank}"]
    model = ["model=custom", "model.target=theirs.FailingNetwork", *arguments]
    ended = fedbench(f"executor.devices={devices}", *model, "rounds=50", cwd=cwd)
    return ended, run_folder(cwd / "runs")


@pytest.mark.parametrize(("devices", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_run_fails_if_a_client_raises(devices: int, rank: int, tmp_path: Path) -> None:
    """The other processes must not wait forever for the one that raised."""
    ended, folder = run_and_fail("raise", rank, devices, tmp_path)
    assert ended.code == 1
    (line,) = ended.err
    error = r"FailingNetwork.forward: ArithmeticError: broken layer \(\S+theirs.py:\d+\)"
    reason = rf"client \d+ in round \d+: {error}"
    assert re.fullmatch(f"fedbench: {reason}", line), line
    assert summary(folder)["status"] == "failed"
    assert re.search(reason, summary(folder)["error"])
    assert 0 < len(rounds(folder)) < 50


@pytest.mark.parametrize("rank", [0, 1])
def test_run_fails_if_a_worker_dies(rank: int, tmp_path: Path) -> None:
    ended, folder = run_and_fail("kill", rank, 2, tmp_path)
    assert ended.code == 1
    (line,) = ended.err
    assert line.startswith(f"fedbench: worker process {rank + 1} of 2 died (SIGKILL)"), line
    found = summary(folder)
    assert (found["status"], f"fedbench: {found['error']}") == ("failed", line)
    assert processes_in(tmp_path) == []


def test_plugin_bugs_keep_their_traceback_on_several_processes(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.defenses]\nupdate_recorder = theirs:UpdateRecorder\n",
        UPDATE_RECORDER.replace("rows = ", "rows = 1 / (1 - view.index) and "),
        {"defense/update_recorder": "name: update_recorder\nkeep: 1\n"},
    )
    command = [plugins.searchpath, "defense=update_recorder", "executor.devices=2"]
    ended = fedbench(*command, cwd=tmp_path, env=plugins.env)
    assert ended.code == 1
    assert any("theirs.py" in line for line in ended.err)
    assert sum(line == "ZeroDivisionError: division by zero" for line in ended.err) == 1
    found = summary(run_folder(tmp_path / "runs"))
    assert (found["status"], found["error"]) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_killed_run(number: signal.Signals, tmp_path: Path) -> None:
    process = start("executor.devices=2", "rounds=1000", cwd=tmp_path)
    assert process.stdout is not None
    while "round 1/1000" not in (line := process.stdout.readline()):
        assert line, wait(process)
    assert len(processes_in(tmp_path)) == 3
    process.send_signal(number)
    process.wait(10)
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(tmp_path) == []
    process.communicate()


def test_a_run_whose_processes_are_stopped_ends_at_once_when_asked(tmp_path: Path) -> None:
    process = start("executor.devices=2", "rounds=1000", cwd=tmp_path)
    assert process.stdout is not None
    while "round 1/1000" not in (line := process.stdout.readline()):
        assert line, wait(process)
    for rank in {*processes_in(tmp_path)} - {process.pid}:
        os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert wait(process, timeout=5).code == 128 + signal.SIGTERM
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[int]:
    """Return the ids of processes with this working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


PROCESS_RECORDER = """
import os
from dataclasses import dataclass

import torch

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("process_recorder")
@dataclass(frozen=True)
class ProcessRecorder(Defense):
    number: int = 0

    def init(self):
        return {}

    def aggregate(self, updates, state, view):
        everyone = torch.ones(len(updates), dtype=torch.bool)
        parallel = int(os.environ.get("FEDBENCH_PARALLEL", 0))
        with open(f"/proc/{os.getppid()}/cmdline") as parent:
            forked = "forkserver" in parent.read()
        process = {"pid": os.getpid(), "parallel": parallel, "forked": forked}
        return mean_of(updates, everyone), process
"""


def install_process_recorder(site: Path) -> Plugins:
    return install(
        site,
        "[fedbench.defenses]\nprocess_recorder = theirs:ProcessRecorder\n",
        PROCESS_RECORDER,
        {"defense/process_recorder": "name: process_recorder\nnumber: 0\n"},
    )


def test_sweep_runs_in_parallel_processes(tmp_path: Path) -> None:
    """Two processes share five runs; results equal those of a run without a sweep."""
    plugins = install_process_recorder(tmp_path / "site")
    command = [plugins.searchpath, "defense=process_recorder"]
    sweep = ["-m", *command, "defense.number=0,1,2,3,4", "hydra.launcher.n_jobs=2"]
    succeed(*sweep, cwd=tmp_path, env=plugins.env)
    runs = run_folders(tmp_path / "runs")
    states = [checkpoint(run / "checkpoint.pt")["defense_state"] for run in runs]
    assert len({state["pid"] for state in states}) == 2
    assert [state["parallel"] for state in states] == [2] * 5
    assert all(state["forked"] for state in states)  # from a process with all imports
    succeed(*command, "out=alone", cwd=tmp_path, env=plugins.env)
    alone = run_folder(tmp_path / "alone")
    assert rounds_without_time(tmp_path / "runs" / "default" / alone.name) == (
        rounds_without_time(alone)
    )


def test_sweep_of_one_run_at_a_time_stays_in_its_process(tmp_path: Path) -> None:
    plugins = install_process_recorder(tmp_path / "site")
    sweep = ["-m", plugins.searchpath, "defense=process_recorder", "defense.number=0,1", "rounds=1"]
    succeed(*sweep, "hydra.launcher.n_jobs=1", cwd=tmp_path, env=plugins.env)
    runs = run_folders(tmp_path / "runs")
    states = [checkpoint(run / "checkpoint.pt")["defense_state"] for run in runs]
    assert len({state["pid"] for state in states}) == 1
    assert [(state["parallel"], state["forked"]) for state in states] == [(0, False)] * 2


def rounds_without_time(folder: Path) -> list[dict[str, Any]]:
    return [{**record, "seconds": None, "check": None} for record in rounds(folder)]


def test_pretraining_uses_the_cores_of_the_runs_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Dataset
) -> None:
    devices: list[int] = []
    monkeypatch.setattr(launch, "launch", lambda executor, n, *rest: devices.append(n))
    monkeypatch.setattr(resources, "n_cores", lambda: 4)
    plan = Plan.of(compose([f"out={tmp_path}", "tracker=none", "local_epochs=100"]))
    for n_parallel, n_pretraining in ((4, 1), (4, 2), (4, 4), (1, 1)):
        monkeypatch.setenv(resources.PARALLEL, str(n_parallel))
        monkeypatch.setenv(resources.PRETRAINING, str(n_pretraining))
        single_run._pretrain_on_more(plan, sample)
    assert devices == [4, 2]  # otherwise the run itself pretrains, on its own cores


def test_a_sweep_uses_all_cores_for_pretraining_and_for_its_last_run(tmp_path: Path) -> None:
    """Meanwhile other runs wait, or have finished. Model and results equal those of one process."""
    long = ["local_epochs=5", "rounds=4"]  # 250,000 labels
    sweep = ["-m", *long, "defense=fedavg,median,krum", "hydra.launcher.n_jobs=2"]
    ended = succeed(*sweep, cwd=tmp_path, env={"LOKY_MAX_CPU_COUNT": "2"})
    if (os.cpu_count() or 1) >= 2:
        folders = run_folders(tmp_path / "runs")
        processes = {f.name.partition("-")[0]: summary(f)["processes"] for f in folders}
        assert processes == {"fedavg": 1, "krum": 2, "median": 1}
    assert not any("stopped" in line for line in ended.out)
    alone = run_on(1, *long, "defense=krum", cwd=tmp_path)
    assert result(tmp_path / "runs" / "default" / alone.name) == result(alone)
    shared, by_one = ((tmp_path / out).glob(".pretrained/*.pt") for out in ("runs", "on1"))
    assert fingerprint(checkpoint(*shared)) == fingerprint(checkpoint(*by_one))


def test_dead_process_of_a_sweep_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(FAILING_NETWORK)
    arguments = ["+model.arguments.failure=kill", "+model.arguments.rank=0", "executor.devices=1"]
    model = ["model=custom", "model.target=theirs.FailingNetwork", *arguments]
    ended = fedbench("-m", "defense=fedavg,median", *model, "rounds=50", cwd=tmp_path)
    assert ended.code == 1
    errors = [line for line in ended.err if line.startswith("fedbench: ")]
    assert len(errors) == 1, ended.err
    assert "a process of the sweep was killed" in errors[0]
    for folder in run_folders(tmp_path / "runs"):
        assert summary(folder)["status"] == "failed"
    assert processes_in(tmp_path) == []


# The server that forks the workers of a sweep is killed as soon as it is asked for the first.
KILLED_SERVER = """
import os
import signal
from multiprocessing import forkserver

from fedbench.__main__ import main

connect = forkserver.connect_to_new_process


def connect_and_kill(*arguments):
    pipes = connect(*arguments)
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    return pipes


forkserver.connect_to_new_process = connect_and_kill
if __name__ == "__main__":
    main()
"""


def test_dead_server_of_a_sweep_prints_one_line(tmp_path: Path) -> None:
    script = tmp_path / "killed_server.py"
    script.write_text(KILLED_SERVER)
    sweep = with_small(["-m", "defense=fedavg,median", "hydra.launcher.n_jobs=2"])
    done = subprocess.run(
        [sys.executable, script, *sweep],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("fedbench: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "a process of the sweep was killed" in errors[0]
    assert processes_in(tmp_path) == []
