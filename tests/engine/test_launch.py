"""What must not change a result: processes, their number, the order of clients, the defense."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import (
    Ended,
    Plugins,
    checkpoint,
    fedbench,
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
)

from fedbench.config import RunConfig
from fedbench.plan import Plan

pytestmark = pytest.mark.slow

NORMED = """
from dataclasses import dataclass

from torch import nn

from fedbench.models import MODELS, Model


@MODELS.register("normed")
@dataclass(frozen=True)
class Normed(Model):
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

RECORDER = """
import hashlib
from dataclasses import dataclass

import torch

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("recorder")
@dataclass(frozen=True)
class Recorder(Defense):
    keep: int = 1

    def init(self):
        return []

    def aggregate(self, updates, state, view):
        rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in updates]
        return mean_of(updates, torch.arange(len(updates)) < self.keep), [*state, rows]
"""


def on(devices: int, *overrides: str, cwd: Path, env: dict[str, str] | None = None) -> Path:
    """The folder of the run on so many processes."""
    out = f"on{devices}"
    command = [*overrides, f"executor.devices={devices}", f"out={out}"]
    ended = fedbench(*command, cwd=cwd, env=env)
    assert ended.code == 0, ended
    return run_folder(cwd / out)


def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    command = ["defense=krum", "n_clients=[3,5]", "pool=7", "pmr=0.4"]
    one, two = (on(devices, *command, cwd=tmp_path) for devices in (1, 2))
    assert one.name == two.name
    assert result(one) == result(two)
    assert [len(record["clients"]) for record in rounds(two)] == [4, 5, 3]
    (alone,), (shared,) = ((tmp_path / out).glob(".pretrained/*.pt") for out in ("on1", "on2"))
    assert fingerprint(checkpoint(alone)) == fingerprint(checkpoint(shared))


def test_two_processes_give_the_bits_of_one_with_batch_norm(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.models]\nnormed = theirs:Normed\n",
        NORMED,
        {"model/normed": "name: normed\nwidth: 16\n"},
    )
    command = [plugins.searchpath, "model=normed", "n_clients=3", "rounds=2", "pmr=0.34"]
    one, two = (on(devices, *command, cwd=tmp_path, env=plugins.env) for devices in (1, 2))
    assert one.name == two.name
    assert result(one) == result(two)
    buffers = checkpoint(two / "checkpoint.pt")["buffers"]
    assert buffers.shape == (32,)
    assert buffers[16:].ne(1).all(), "the running variances never left their start"


@pytest.mark.parametrize(
    "settings",
    [["executor=vectorized", "executor.stack=2"], ["executor.threads=2"]],
    ids=["vectorized", "spawned"],  # processes that have threads are not forked
)
def test_two_processes_give_the_bits_of_one_however_they_train(
    settings: list[str], tmp_path: Path
) -> None:
    data = ["partition=dirichlet", "pretrain_non_iid=0", "n_clients=[3,6]"]
    command = [*settings, *data, "model.hidden=[16]", "attack.epochs=2", "rounds=2"]
    one, two = (on(devices, *command, "pmr=0.34", cwd=tmp_path) for devices in (1, 2))
    assert result(one) == result(two)


def test_more_processes_than_clients(tmp_path: Path) -> None:
    one, two = (on(devices, "n_clients=1", "pmr=1", "rounds=1", cwd=tmp_path) for devices in (1, 2))
    assert result(one) == result(two)


def test_a_mistake_in_several_processes_is_told_in_one_line(tmp_path: Path) -> None:
    command = ["executor.devices=2", "dataset=mnist", "dataset.root=nowhere"]
    ended = fedbench(*command, cwd=tmp_path)
    assert ended.code not in (0, None)
    assert ended.out == []
    assert [line for line in ended.err if "Traceback" in line] == []
    assert ended.err[-1].startswith("fedbench: dataset.root=nowhere: expected ")
    assert os.listdir(tmp_path) == []
    assert len(ended.err) == 1, "\n".join(ended.err)


def interrupted(to_all: bool, cwd: Path) -> Ended:
    process = start("executor.devices=2", "rounds=30", cwd=cwd)
    assert process.stdout is not None
    while "round 2/30" not in (line := process.stdout.readline()):
        assert line, wait(process)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    return wait(process)


@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill -INT"])
def test_an_interrupt_stops_all_processes(to_all: bool, tmp_path: Path) -> None:
    ended = interrupted(to_all, tmp_path)
    assert ended.code == 130
    assert not any("Traceback" in line for line in ended.err), ended.err
    assert len(rounds(run_folder(tmp_path / "runs"))) < 30, "it went on to the end"
    assert sum("the same command resumes it" in line for line in ended.out) == 1


def test_a_seed_gives_the_same_bits_in_any_process_and_another_seed_others(tmp_path: Path) -> None:
    command = ["rounds=2", "partition=dirichlet", "attack=constrain_and_scale"]
    succeed(*command, "out=first", cwd=tmp_path, env={"PYTHONHASHSEED": "1"})
    sweep = ["-m", "seed=1,0", *command, "out=second"]  # another seed before it in the process
    succeed(*sweep, cwd=tmp_path, env={"PYTHONHASHSEED": "2"})
    first = run_folder(tmp_path / "first")
    same = tmp_path / "second" / "default" / first.name
    (other,) = (path for path in run_folders(tmp_path / "second") if path != same)
    assert result(same) == result(first)
    for part, value in result(other).items():
        assert value != result(first)[part], part


def test_the_first_updates_do_not_depend_on_the_defense(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.defenses]\nrecorder = theirs:Recorder\n",
        RECORDER,
        {"defense/recorder": "name: recorder\nkeep: 1\n"},
    )
    sweep = ["-m", plugins.searchpath, "defense=recorder", "defense.keep=1,4", "pmr=0.34"]
    succeed(*sweep, "pool=8", cwd=tmp_path, env=plugins.env)
    one, other = run_folders(tmp_path / "runs")
    seen, otherwise = (checkpoint(run / "checkpoint.pt")["defense_state"] for run in (one, other))
    assert len(set(seen[0])) == 6  # each client trains for itself
    assert seen[0] == otherwise[0]
    assert not set(seen[1]) & set(otherwise[1])  # from here on the global models differ

    def who(run: Path) -> list[list[tuple[int, bool]]]:
        return [[(c["id"], c["malicious"]) for c in record["clients"]] for record in rounds(run)]

    assert who(one) == who(other)


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_neither_the_order_of_clients_nor_the_split_over_devices_matters(executor: str) -> None:
    from fedbench.engine.client_runner import ClientRunner
    from fedbench.engine.launch import make_fabric
    from fedbench.engine.parameters import FlatModel
    from fedbench.engine.selection import Round
    from fedbench.run import build_simulation

    plan = Plan.of(small_config(executor))
    simulation = build_simulation(plan, plan.source.load(), make_fabric(plan.executor))
    layout = simulation.replica.layout
    context = simulation.backdoor_context(layout.read_params(), layout.read_buffers())
    simulation.set_backdoors([backdoor.prepare(context) for backdoor in plan.backdoors])
    round_ = Round(0, simulation.selection.select(0), layout.read_params(), layout.read_buffers())
    assert [p.malicious for p in round_.participants].count(True) == 2
    backend = plan.executor.backend(simulation.replica, plan.config)
    runner = ClientRunner(simulation, backend)
    costs = [simulation.data.cost(0, p) for p in round_.participants]
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


NET = """
import os
import signal

import torch


class Net(torch.nn.Sequential):
    # Something happens on one rank, after some rounds.

    def __init__(self, what, rank):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        self.what, self.rank, self.steps = what, rank, 0

    def forward(self, x):
        several = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if several else 0
        self.steps += self.training
        if self.training and self.steps > 400 and rank == self.rank:
            if self.what == "raise":
                raise ArithmeticError("out of order")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


def broken(what: str, rank: int, devices: int, cwd: Path) -> tuple[Ended, Path]:
    """How a run ends in which something happens to one of its processes, and its folder."""
    (cwd / "theirs.py").write_text(NET)
    arguments = [f"+model.arguments.what={what}", f"+model.arguments.rank={rank}"]
    model = ["model=custom", "model.target=theirs.Net", *arguments]
    ended = fedbench(f"executor.devices={devices}", *model, "rounds=50", cwd=cwd)
    return ended, run_folder(cwd / "runs")


@pytest.mark.parametrize(("devices", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_client_that_raises_ends_the_run_as_failed(
    devices: int, rank: int, tmp_path: Path
) -> None:
    """Only one of the processes trains that client; the other must not wait for it forever."""
    ended, folder = broken("raise", rank, devices, tmp_path)
    assert ended.code == 1
    (line,) = ended.err
    reason = r"client \d+ in round \d+: ArithmeticError: out of order"
    assert re.fullmatch(f"fedbench: {reason}", line), line
    assert summary(folder)["status"] == "failed"
    assert re.search(reason, summary(folder)["error"])
    assert 0 < len(rounds(folder)) < 50


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_ends_the_run_as_failed(rank: int, tmp_path: Path) -> None:
    ended, folder = broken("kill", rank, 2, tmp_path)
    assert ended.code == 1
    (line,) = ended.err
    assert line.startswith(f"fedbench: worker process {rank + 1} of 2 died (SIGKILL)"), line
    found = summary(folder)
    assert (found["status"], f"fedbench: {found['error']}") == ("failed", line)
    assert processes_in(tmp_path) == []


def test_a_bug_of_a_plugin_keeps_its_traceback_on_several_processes(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.defenses]\nrecorder = theirs:Recorder\n",
        RECORDER.replace("rows = ", "rows = 1 / (1 - view.index) and "),
        {"defense/recorder": "name: recorder\nkeep: 1\n"},
    )
    command = [plugins.searchpath, "defense=recorder", "executor.devices=2"]
    ended = fedbench(*command, cwd=tmp_path, env=plugins.env)
    assert ended.code == 1
    assert any("theirs.py" in line for line in ended.err)
    assert sum(line == "ZeroDivisionError: division by zero" for line in ended.err) == 1
    found = summary(run_folder(tmp_path / "runs"))
    assert (found["status"], found["error"]) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_run_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
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


def processes_in(folder: Path) -> list[int]:
    """Those whose working folder it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:  # it has ended, or is another's
            continue
    return found


WHEREABOUTS = """
import os
from dataclasses import dataclass

import torch

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("whereabouts")
@dataclass(frozen=True)
class Whereabouts(Defense):
    number: int = 0

    def init(self):
        return {}

    def aggregate(self, updates, state, view):
        everyone = torch.ones(len(updates), dtype=torch.bool)
        parallel = int(os.environ.get("FEDBENCH_PARALLEL", 0))
        with open(f"/proc/{os.getppid()}/cmdline") as parent:
            forked = "forkserver" in parent.read()
        known = {"pid": os.getpid(), "parallel": parallel, "forked": forked}
        return mean_of(updates, everyone), known
"""


def whereabouts(site: Path) -> Plugins:
    return install(
        site,
        "[fedbench.defenses]\nwhereabouts = theirs:Whereabouts\n",
        WHEREABOUTS,
        {"defense/whereabouts": "name: whereabouts\nnumber: 0\n"},
    )


def test_runs_of_a_sweep_go_on_side_by_side(tmp_path: Path) -> None:
    """In two processes, of which each serves several runs; the others have the same numbers."""
    plugins = whereabouts(tmp_path / "site")
    command = [plugins.searchpath, "defense=whereabouts"]
    sweep = ["-m", *command, "defense.number=0,1,2,3,4", "hydra.launcher.n_jobs=2"]
    succeed(*sweep, cwd=tmp_path, env=plugins.env)
    runs = run_folders(tmp_path / "runs")
    states = [checkpoint(run / "checkpoint.pt")["defense_state"] for run in runs]
    assert len({state["pid"] for state in states}) == 2
    assert [state["parallel"] for state in states] == [2] * 5
    assert all(state["forked"] for state in states)  # of a process that has imported all
    succeed(*command, "out=alone", cwd=tmp_path, env=plugins.env)
    alone = run_folder(tmp_path / "alone")
    assert rounds_without_time(tmp_path / "runs" / "default" / alone.name) == (
        rounds_without_time(alone)
    )


def test_a_sweep_of_one_run_at_a_time_stays_in_its_process(tmp_path: Path) -> None:
    """And ends with no other: it may have been left to itself on purpose."""
    plugins = whereabouts(tmp_path / "site")
    sweep = ["-m", plugins.searchpath, "defense=whereabouts", "defense.number=0,1", "rounds=1"]
    succeed(*sweep, "hydra.launcher.n_jobs=1", cwd=tmp_path, env=plugins.env)
    runs = run_folders(tmp_path / "runs")
    states = [checkpoint(run / "checkpoint.pt")["defense_state"] for run in runs]
    assert len({state["pid"] for state in states}) == 1
    assert [(state["parallel"], state["forked"]) for state in states] == [(0, False)] * 2


def rounds_without_time(folder: Path) -> list[dict[str, Any]]:
    return [{**record, "seconds": None} for record in rounds(folder)]


def test_a_sweep_pretrains_on_all_cores(tmp_path: Path) -> None:
    """While the other run waits for it; with the numbers of one process."""
    long = ["local_epochs=5", "rounds=4", "defense=fedavg,median"]  # 250,000 labels
    env = {"LOKY_MAX_CPU_COUNT": "2"}
    ended = succeed("-m", *long, "hydra.launcher.n_jobs=2", cwd=tmp_path, env=env)
    told = [line for line in ended.out if "pretraining: " in line]
    if (os.cpu_count() or 1) >= 2:
        assert [line.rpartition("pretraining: ")[2] for line in told] == [
            "sequential on 2 processes"
        ]
    assert not any("stopped" in line for line in ended.out)
    (shared,) = (tmp_path / "runs").glob(".pretrained/*.pt")
    succeed(*long[:2], "executor.devices=1", "out=alone", cwd=tmp_path)
    (alone,) = (tmp_path / "alone").glob(".pretrained/*.pt")
    assert fingerprint(checkpoint(shared)) == fingerprint(checkpoint(alone))


def test_the_last_run_of_a_sweep_takes_the_cores_that_others_leave(tmp_path: Path) -> None:
    """With the numbers of one process."""
    long = ["local_epochs=5", "rounds=4"]  # 250,000 labels
    ended = succeed(
        "-m", *long, "defense=fedavg,median,krum", "hydra.launcher.n_jobs=2", cwd=tmp_path
    )
    if (os.cpu_count() or 1) >= 2:
        said = [line for line in ended.out if re.search("  sequential on . process", line)]
        assert sorted(re.split(" constrain| on ", line)[0::2] for line in said) == [
            ["fedavg", "1 process"],
            ["krum", "2 processes"],
            ["median", "1 process"],
        ]
    succeed(*long, "defense=krum", "executor.devices=1", "out=alone", cwd=tmp_path)
    alone = run_folder(tmp_path / "alone")
    assert result(tmp_path / "runs" / "default" / alone.name) == result(alone)


def test_a_process_of_a_sweep_that_dies_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(NET)
    arguments = ["+model.arguments.what=kill", "+model.arguments.rank=0", "executor.devices=1"]
    model = ["model=custom", "model.target=theirs.Net", *arguments]
    ended = fedbench("-m", "defense=fedavg,median", *model, "rounds=50", cwd=tmp_path)
    assert ended.code == 1
    told = [line for line in ended.err if line.startswith("fedbench: ")]
    assert len(told) == 1, ended.err
    assert "a process of the sweep was killed" in told[0]
    for folder in run_folders(tmp_path / "runs"):
        assert summary(folder)["status"] == "failed"
    assert processes_in(tmp_path) == []
