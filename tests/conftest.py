"""Shared fixtures: a small data set, and a federation on it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from wandb_records import KEY
from wandb_server import WandbServer, wandb_server

from fedbench.attack import ATTACKS, Attack
from fedbench.backdoor import BACKDOORS, Backdoor
from fedbench.config import RunConfig
from fedbench.data import DATASETS, Dataset
from fedbench.defense import DEFENSES, Defense
from fedbench.engine.executors import Sequential
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

torch.set_num_threads(1)  # parallel tests would compete for cores

# Commands that tests start would inherit what `nohup`, or the background of a script, ignores. They
# inherit no handlers, so the tests themselves go on after a hangup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def sample() -> Dataset:
    """Return 600 training and 300 test images of `fmnist_sample`."""
    data = DATASETS.build({"name": "fmnist_sample"}).load()
    return replace(
        data,
        x_train=data.x_train[:600],
        y_train=data.y_train[:600],
        x_test=data.x_test[:300],
        y_test=data.y_test[:300],
    )


@pytest.fixture(scope="session")
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def federation(sample: Dataset, fabric: Fabric) -> Callable[..., Federation]:
    """Return a factory of federations: 6 clients and a small network, unless replaced."""

    def make(
        defense: Defense | None = None,
        attack: Attack | None = None,
        network: nn.Module | None = None,
        **settings: Any,
    ) -> Federation:
        config = RunConfig(
            **{"n_clients": 6, "pmr": 0.34, "local_epochs": 1, "batch_size": 32} | settings
        )
        torch.manual_seed(0)
        network = network or nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        rank_context = RankContext(
            config,
            sample,
            network,
            attack or ATTACKS.build({"name": "constrain_and_scale"}),
            fabric,
        )
        defense = defense or DEFENSES.build({"name": "fedavg"})
        federation = Federation(RankGroup(Sequential(), rank_context), defense)
        chosen = rank_context.attack.backdoor_settings([{"name": "patch"}])
        federation.prepare([BACKDOORS.build(backdoor) for backdoor in chosen], federation.initial())
        return federation

    return make


@pytest.fixture
def after_rounds(federation: Callable[..., Federation]) -> Callable[..., Record]:
    """Return a function that runs 4 benign and 4 attacked rounds, and returns the last record."""

    def run(attack: Attack, backdoors: Sequence[Backdoor] | None = None, **settings: Any) -> Record:
        server = federation(attack=attack, **{"lr": 0.05, "pretrain_rounds": 4} | settings)
        state = server.initial()
        while state.next_round < 0:
            state = server.pretrain(state)
        if backdoors is not None:
            server.prepare(backdoors, state)
        for _ in range(4):
            state, record = server.round(state)
        return record

    return run


@pytest.fixture
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No W&B account, an empty home folder, and no server at the address of W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home" / name.lower()))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A W&B server to which the user is logged in."""
    with wandb_server() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield running


def pytest_collection_finish() -> None:
    """Let the garbage collector ignore modules and tests: that saves a seventh of the time."""
    gc.freeze()
