"""The checks: devices against each other, executors, defenses, checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, ServerView
from fedbench.engine.executors import EXECUTORS, Sequential
from fedbench.engine.launch import launch
from fedbench.errors import first_line
from fedbench.models import MODELS
from fedbench.results.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedbench.rng import generator
from fedbench.selfcheck.trials import Trial, run_trials
from fedbench.testing.verify import verify_result

# Largest relative difference of two vectors: |a - b| / |b|
ON_GPU = 2e-2  # of trained models: GPUs add in another order, and convolutions round to TF32
REORDERED = 1e-3  # of executors, and of defenses on another device: another order of additions
CPU = torch.device("cpu")
N, P, ROUNDS = 12, 20_000, 3  # clients, parameters and rounds of a check of a defense


@dataclass(frozen=True)
class CheckResult:
    """A line of the table."""

    name: str
    difference: float | None = None  # relative; None: an error
    allowed: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.difference is not None and self.difference <= self.allowed

    def __str__(self) -> str:
        if self.difference is None:
            return f"FAILED  {self.name}: {self.error}"
        measured = "same bits" if self.difference == 0 else f"difference {self.difference:.1e}"
        allowed = f", allowed {self.allowed:.0e}" if self.allowed else ""
        return f"{'ok    ' if self.ok else 'FAILED'}  {self.name}: {measured}{allowed}"


def all_checks(accelerator: str, devices: int, quick: bool) -> Iterator[CheckResult]:
    """Check models, executors, defenses and checkpoints on `cpu` or `cuda`."""
    yield from check_models(accelerator, devices, quick)
    yield from check_executors(accelerator)
    device = CPU if accelerator == "cpu" else torch.device("cuda", 0)
    for name in DEFENSES.names():
        yield check_defense(name, device)
    gpus = [torch.device("cuda", i) for i in range(devices)] if accelerator == "cuda" else []
    yield check_checkpoints([CPU, *gpus])


def check_models(accelerator: str, devices: int, quick: bool) -> Iterator[CheckResult]:
    """Each model: the GPU against the CPU, and several devices against one."""
    names = ["mlp"] if quick else [name for name in MODELS.names() if name != "custom"]
    trials = [Trial(name) for name in names]
    expected, where = _trained("cpu", 1, trials), "1 process"
    on_gpu = accelerator == "cuda"
    if on_gpu:
        found, where = _trained("cuda", 1, trials), "1 GPU"
        for name, have, want in zip(names, found, expected, strict=True):
            yield compared(f"model {name}, GPU against CPU", have, want, ON_GPU)
        expected = found
    if devices > 1:
        found = _trained(accelerator, devices, trials)
        what = f"{devices} {'GPUs' if on_gpu else 'processes'} against {where}"
        for name, have, want in zip(names, found, expected, strict=True):
            yield compared(f"model {name}, {what}", have, want, ON_GPU if on_gpu else 0.0)


def check_executors(accelerator: str) -> Iterator[CheckResult]:
    """Each executor against `sequential`, on one device."""
    others = [name for name in EXECUTORS.names() if name != "sequential"]
    expected, *found = _trained(accelerator, 1, [Trial("mlp"), *(Trial("mlp", n) for n in others)])
    for name, have in zip(others, found, strict=True):
        yield compared(f"executor {name} against sequential", have, expected, REORDERED)


def _trained(accelerator: str, devices: int, trials: Sequence[Trial]) -> list[Tensor | str]:
    """Train on 1 or more devices: vectors on the CPU, or errors."""
    executor = Sequential(accelerator=accelerator)
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "results.pt")
            launch(executor, devices, run_trials, trials, file)
            return torch.load(file, weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        return [f"{type(error).__name__}: {first_line(error)}"] * len(trials)


def compared(name: str, have: Tensor | str, want: Tensor | str, allowed: float) -> CheckResult:
    """Compare two vectors; a string is the error that occurred instead."""
    for result in (have, want):
        if isinstance(result, str):
            return CheckResult(name, error=result)
    assert isinstance(have, Tensor)
    assert isinstance(want, Tensor)
    if have.shape != want.shape:
        return CheckResult(name, error=f"shape {tuple(have.shape)}, expected {tuple(want.shape)}")
    difference = float((have - want).norm() / want.norm().clamp_min(1e-30))
    if difference != difference:
        return CheckResult(name, error="results are not finite")
    return CheckResult(name, difference, allowed)


def check_defense(name: str, device: torch.device) -> CheckResult:
    """Rounds on a device, resumed from checkpoints, against uninterrupted rounds on the CPU."""
    what = "GPU against CPU" if device.type == "cuda" else "resumed against uninterrupted"

    def results(on: torch.device, resumed: bool) -> Tensor | str:
        try:
            return torch.cat([_vector(result) for result in _aggregates(name, on, resumed)])
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"

    expected, found = results(CPU, False), results(device, True)
    allowed = REORDERED if device.type == "cuda" else 0.0
    return compared(f"defense {name}, {what}", found, expected, allowed)


def _aggregates(name: str, device: torch.device, resumed: bool) -> Iterator[Aggregate]:
    defense = DEFENSES.build({"name": name})
    rng = torch.Generator().manual_seed(0)
    params = torch.randn(P, generator=rng).to(device)
    layers = {"first.weight": slice(0, P - 2000), "last.weight": slice(P - 2000, P)}
    state = defense.init()
    for index in range(ROUNDS):
        updates = 0.1 * torch.randn(N, P, generator=rng)
        updates[: N // 4] = 3 * updates[0] + 0.01 * updates[: N // 4]  # similar and longer
        updates = updates.to(device)
        view = ServerView(
            index=index,
            client_ids=torch.arange(N, device=device),
            global_params=params,
            initial_params=params,
            layers=layers,
            rng=generator(0, "defense", index),
        )
        result, state = defense.aggregate(updates, state, view)
        verify_result(result, updates)
        yield result
        if resumed:
            state = _saved_and_loaded(state, device)


def _vector(result: Aggregate) -> Tensor:
    """The update, weights and decisions of a round, each of norm at most 1, on the CPU."""
    parts = [result.update, result.weights]
    parts += [part for part in (result.accepted, result.scores) if part is not None]
    values = [part.cpu().double() for part in parts]
    return torch.cat([value / value.norm().clamp_min(1e-30) for value in values])


def _saved_and_loaded(state: Any, device: torch.device) -> Any:
    nothing = torch.zeros(0)
    return _through_file(
        Checkpoint(0, nothing, nothing, nothing, nothing, state), device
    ).defense_state


def _through_file(checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        save_checkpoint(path, checkpoint, "selfcheck")
        return load_checkpoint(path, device, "of this check", "selfcheck")


def check_checkpoints(devices: Sequence[torch.device]) -> CheckResult:
    """Save on each device, load on each."""
    name = f"checkpoints between {', '.join(map(str, devices))}"
    values = torch.arange(1000.0)
    try:
        for saved in devices:
            on_device = values.to(saved)
            checkpoint = Checkpoint(1, on_device, on_device, on_device, on_device, {3: on_device})
            for device in devices:
                loaded = _through_file(checkpoint, device)
                for tensor in (loaded.params, loaded.defense_state[3]):
                    if tensor.device != device or not torch.equal(tensor.cpu(), values):
                        return CheckResult(name, error=f"saved on {saved}, found {tensor.device}")
    except Exception as error:
        return CheckResult(name, error=f"{type(error).__name__}: {first_line(error)}")
    return CheckResult(name, 0.0)
