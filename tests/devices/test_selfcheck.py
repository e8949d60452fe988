"""python -m fedbench.selfcheck: passes here, passes on fake GPUs, fails if a plugin is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from end_to_end import environment
from fake_gpu import fabric_on, fake_gpus
from lightning.fabric import Fabric
from shipped import published
from torch import Tensor, nn

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.engine.executors import EXECUTORS, Executor
from fedbench.models import MODELS, Model
from fedbench.selfcheck import __main__ as selfcheck
from fedbench.selfcheck.checks import (
    CheckResult,
    all_checks,
    check_defense,
    check_models,
    compared,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def gpu_machine() -> Iterator[None]:
    """A machine with fake GPUs, where processes on the CPU have a plain Fabric."""

    def make_fabric(executor: Executor, devices: Any = 1) -> Fabric:
        return fabric_on("cuda:0" if executor.accelerator == "cuda" else "cpu")

    with mock.patch("fedbench.engine.launch.make_fabric", make_fabric), fake_gpus():
        yield


@pytest.mark.slow
def test_this_machine_passes_in_two_processes() -> None:
    command = [sys.executable, "-m", "fedbench.selfcheck", "--accelerator", "cpu", "--devices", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200)
    assert ended.returncode == 0, ended
    for name in published(MODELS):
        line = f"ok      model {name}, 2 processes against 1 process: same bits"
        assert (line in ended.stdout) == (name != "custom")
    assert ended.stdout.rstrip().endswith("all checks ok")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        assert selfcheck.main(["--quick", "--devices", "1"]) == 0
    printed = capsys.readouterr().out
    assert "No GPU found" in printed
    assert "GPUs are NOT checked" in printed
    for name in published(DEFENSES):
        assert f"ok      defense {name}, resumed against uninterrupted: same bits" in printed
    for name in published(EXECUTORS):
        assert (f"executor {name} against" in printed) == (name != "sequential")


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_machine")
def test_fake_gpus_pass() -> None:
    results = {result.name: result for result in all_checks("cuda", 1, quick=False)}
    assert [str(result) for result in results.values() if not result.ok] == []
    for name in published(MODELS):
        assert (f"model {name}, GPU against CPU" in results) == (name != "custom")
    assert {f"defense {name}, GPU against CPU" for name in published(DEFENSES)} <= {*results}
    assert "checkpoints between cpu, cuda:0" in results


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--accelerator", "cuda"], "executor.accelerator=cuda: this machine has no GPU"),
        (["--devices", "0"], "--devices 0: must be from 1 to "),
        (["--devices", "99999"], "--devices 99999: must be from 1 to "),
    ],
)
def test_wrong_options_print_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        assert selfcheck.main(arguments) == 1
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"fedbench: {line}")


def test_gpus_are_listed() -> None:
    gpu = mock.Mock(total_memory=80 * 2**30)
    gpu.name = "NVIDIA A100"
    with (
        mock.patch("torch.cuda.device_count", return_value=2),
        mock.patch("torch.cuda.get_device_properties", return_value=gpu),
    ):
        lines = [*selfcheck._machine("cuda", 2)]
    assert lines[2:] == ["  cuda:0  NVIDIA A100, 80.0 GiB", "  cuda:1  NVIDIA A100, 80.0 GiB"]


class Broken(Defense):
    """Base of defenses with one fault each; otherwise the mean."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), state


@dataclass(frozen=True)
class Raises(Broken):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        raise IndexError("row 12 of 12")


@dataclass(frozen=True)
class HidesMemory(Broken):
    """Counts rounds outside its state."""

    rounds: ClassVar[list[int]] = []

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        self.rounds.append(view.index)
        return mean_of(updates, torch.arange(len(updates)) < len(self.rounds)), state


@dataclass(frozen=True)
class WrongShape(Broken):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        result, _ = super().aggregate(updates, state, view)
        return Aggregate(result.update[:5], result.weights), state


@dataclass(frozen=True)
class StaysOnCpu(Broken):
    """Multiplies by weights on the CPU, which works there only."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        weights = torch.full((len(updates),), 1 / len(updates))
        return Aggregate(weights @ updates, weights), state


@pytest.mark.parametrize(
    ("broken", "device", "reason"),
    [
        (Raises, CPU, "IndexError: row 12 of 12"),
        (HidesMemory, CPU, "difference"),
        (WrongShape, CPU, "update must have shape"),
        (StaysOnCpu, GPU, "same device"),
    ],
)
def test_a_broken_defense_fails(
    broken: type[Broken], device: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFENSES._classes, "broken", broken)
    with fake_gpus():
        result = check_defense("broken", device)
    assert not result.ok
    assert str(result).startswith("FAILED  defense broken, ")
    assert reason in str(result)


def test_a_failed_check_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEFENSES._classes, "broken", Raises)
    with mock.patch("torch.cuda.device_count", return_value=0):
        assert selfcheck.main(["--quick", "--devices", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FAILED") for line in lines) == 1
    assert lines[-1].endswith(f"1 of {len(lines) - 3} checks failed")


@dataclass(frozen=True)
class BrokenModel(Model):
    def build(self, sample_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        raise TypeError("no width")


def test_a_broken_model_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, gpu_machine: None
) -> None:
    monkeypatch.setitem(MODELS._classes, "broken", BrokenModel)
    monkeypatch.setattr(MODELS, "names", lambda: ["broken", "mlp"])
    results = [*check_models("cuda", 1, quick=False)]
    assert [result.ok for result in results] == [False, True]
    assert str(results[0]) == "FAILED  model broken, GPU against CPU: TypeError: no width"


@pytest.mark.parametrize(
    ("have", "ok", "text"),
    [
        (torch.tensor([3.0, 4.0]), True, "same bits"),
        (torch.tensor([3.0, 4.04]), True, "difference 8.0e-03, allowed 1e-02"),
        (torch.tensor([3.0, 4.5]), False, "difference 1.0e-01, allowed 1e-02"),
        (torch.tensor([3.0, torch.nan]), False, "results are not finite"),
        (torch.tensor([3.0]), False, "shape (1,), expected (2,)"),
        ("ValueError: no", False, "ValueError: no"),
    ],
)
def test_differences_are_relative(have: Tensor | str, ok: bool, text: str) -> None:
    result: CheckResult = compared("case", have, torch.tensor([3.0, 4.0]), 1e-2)
    assert result.ok is ok
    assert text in str(result)
