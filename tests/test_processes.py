"""What must not change a result: processes, their number, the order of clients, the defense."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from end_to_end import (
    Ended,
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
from fedbench.results import RunDir
from fedbench.run import Plan

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
    command = ["defense=krum", "n_clients=5", "pool=7", "pmr=0.4"]  # shares of 3 and 2
    one, two = (on(devices, *command, cwd=tmp_path) for devices in (1, 2))
    assert one.name == two.name
    assert result(one) == result(two)
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
    seen = [process.stdout.readline() for _ in range(3)]
    assert "round 2/30" in seen[-1], seen
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


def test_neither_the_order_of_clients_nor_the_split_over_devices_matters() -> None:
    from fedbench.population import Order, Population

    plan = Plan.of(small_config())
    dataset = plan.source.load()
    torch.manual_seed(0)
    network = plan.model.build(dataset.input_shape, dataset.n_classes)
    fabric = plan.executor.fabric()
    population = Population(plan.config, dataset, network, plan.attack, fabric)
    layout = population.layout
    scene = population.scene(layout.read_params(), layout.read_buffers())
    population.implants = [backdoor.prepare(scene) for backdoor in plan.backdoors]
    order = Order(0, population.select(0), layout.read_params(), layout.read_buffers())
    assert [job.malicious for job in order.jobs].count(True) == 2

    def trained(clients: list[int]) -> torch.Tensor:
        rows = order.params.new_empty(len(clients), layout.n_params)
        plan.executor.train(population, order, clients, rows)
        return rows

    whole = trained([0, 1, 2, 3, 4])
    assert torch.equal(trained([3, 0, 4, 2, 1]), whole[[3, 0, 4, 2, 1]])
    for share in ([1, 3], [4]):
        assert torch.equal(trained(share), whole[share])


def small_config() -> RunConfig:
    config = RunConfig(
        defense={"name": "fedavg"},
        attack={"name": "constrain_and_scale"},
        dataset={"name": "fmnist_sample"},
        model={"name": "mlp", "hidden": [16]},
        executor={"name": "sequential"},
        tracker={"name": "none"},
    )
    return replace(config, n_clients=5, pmr=0.4, local_epochs=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_client_that_raises_ends_the_run_as_failed(devices: int, tmp_path: Path) -> None:
    """Only one of the processes trains that client; the other must not wait for it forever."""
    (tmp_path / "theirs.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))\n"
        "    def forward(self, x):\n"
        "        if self.training and torch.distributed.is_initialized():\n"
        "            assert torch.distributed.get_rank() == 0, 'out of order'\n"
        "        assert not self.training or torch.distributed.is_initialized(), 'out of order'\n"
        "        return super().forward(x)\n"
    )
    command = [f"executor.devices={devices}", "model=custom", "model.target=theirs.Net"]
    ended = fedbench(*command, cwd=tmp_path)
    assert ended.code == 1
    assert "out of order" in "".join(ended.err)
    folder = run_folder(tmp_path / "runs")
    if devices == 1:
        assert summary(folder)["status"] == "failed"
    else:  # the process that keeps the run may be ended before it can say so
        assert RunDir(folder).finished() is None
