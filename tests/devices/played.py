"""Helpers for tests on fake GPUs: tiny data sets, and rounds played on a sequence of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fake_gpu import fabric_on, fake_gpus
from torch import Tensor

from fedbench.attack import ATTACKS, Attack
from fedbench.backdoor import BACKDOORS, settings_of
from fedbench.config import RunConfig
from fedbench.data import Dataset, Features, Images, Sequences
from fedbench.datasets.images import crop_and_flip
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.defenses.fedavg import FedAvg
from fedbench.engine.executors import EXECUTORS
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.federation import Federation
from fedbench.models import MODELS
from fedbench.registry import Registry
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.run_dir import Record, RunDir

WORDS = ("pasta", "from", "astoria", "tastes", "delicious", "and", "the", "cat")
N_CLIENTS, N_PER_CLIENT, N_TEST = 6, 9, 16


def images(channels: int = 1, side: int = 28, augment: bool = False) -> Images:
    """Random images of 4 classes; the pixels of a class are similar."""
    rng = torch.Generator().manual_seed(0)
    n, n_test = N_CLIENTS * N_PER_CLIENT, N_TEST
    y = torch.arange(n + n_test) % 4
    x = torch.randint(256, (4, channels, side, side), generator=rng)[y] // 2
    x = (x + torch.randint(128, (n + n_test, channels, side, side), generator=rng)).to(torch.uint8)
    return Images(
        "tiny", x[:n], y[:n], x[n:], y[n:], 4, mean=0.5, std=0.3,
        augment=crop_and_flip if augment else None, reserved=(1, 4),
    )  # fmt: skip


def features() -> Features:
    """Random feature vectors of 3 classes."""
    rng = torch.Generator().manual_seed(0)
    n, n_test = N_CLIENTS * N_PER_CLIENT, N_TEST
    y = torch.arange(n + n_test) % 3
    x = y[:, None] + torch.randn(n + n_test, 6, generator=rng)
    mean, std = x[:n].mean(dim=0), x[:n].std(dim=0)
    return Features("tiny_table", x[:n], y[:n], x[n:], y[n:], 3, mean=mean, std=std)


def sequences(threshold: float | None = None) -> Sequences:
    """Random sequences of symbols with an owner each, and windows of two attack phases."""
    rng = torch.Generator().manual_seed(0)
    n, n_test = N_CLIENTS * N_PER_CLIENT, N_TEST
    streams = torch.randint(len(WORDS), (n + n_test, 6), generator=rng).int()
    x, y = streams[:, :-1], streams[:, 1:]
    windows = {
        phase: tuple(torch.randint(len(WORDS), (k, 6), generator=rng).int() for k in (5, 4))
        for phase in ("scan", "flood")
    }
    return Sequences(
        "tiny_words", x[:n], y[:n], x[n:], y[n:], len(WORDS),
        vocabulary={word: i for i, word in enumerate(WORDS)}, attacks=windows,  # type: ignore[arg-type]
        owners=torch.arange(n) % N_CLIENTS, threshold=threshold,
    )  # fmt: skip


class ChecksView(FedAvg):
    """A user's defense may combine any tensors of its inputs."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        given = (updates, view.client_ids, view.global_params, view.initial_params)
        assert {tensor.device for tensor in given} == {updates.device}
        return super().aggregate(updates, state, view)


class Setting(NamedTuple):
    """What to play; plugins by name and settings."""

    defense: str | Mapping[str, Any] | Defense = "fedavg"
    attack: str | Mapping[str, Any] | Attack = "none"
    model: Mapping[str, Any] = {"name": "mlp", "hidden": [5]}
    executor: str = "sequential"
    dataset: Dataset | None = None  # None: `images()`
    backdoors: Sequence[Any] | None = None
    config: Mapping[str, Any] = {}

    def federation(self, device: str) -> Federation:
        """A federation on one device, ready for round -1."""
        fabric = fabric_on(device)
        data = self.dataset or images()
        defaults: dict[str, Any] = {
            "n_clients": N_CLIENTS, "pmr": 0.34, "local_epochs": 1, "batch_size": 5, "lr": 0.1,
            "pretrain_rounds": 1, "rounds": 3, "model": dict(self.model),
            "partition": "natural" if data.owners is not None else "main_class",
        }  # fmt: skip
        config = RunConfig(**defaults | dict(self.config))
        torch.manual_seed(0)
        network = MODELS.build(config.model).build(data.input_shape, data.n_classes)
        attack = _built(ATTACKS, self.attack)
        context = RankContext(config, data.to(fabric.device), network, attack, fabric)
        executor = EXECUTORS.build({"name": self.executor, "accelerator": "cpu"})
        return Federation(RankGroup(executor, context), _built(DEFENSES, self.defense))

    def play(self, devices: Sequence[str], folder: Path) -> Played:
        """Play a benign round and one round per device; every round resumes from a checkpoint."""
        run = RunDir(folder)
        folder.mkdir(parents=True)
        federation = self.federation(devices[0])
        state: Checkpoint | None = federation.pretrain(federation.initial())
        for i, device in enumerate(devices):
            if i and device != devices[i - 1]:
                federation = self.federation(device)
            state = state if i == 0 else run.resume(federation.device)
            assert state is not None
            assert {t.device for t in _tensors(vars(state))} == {federation.device} or i == 0
            self._prepare(federation, state)
            state, record = federation.round(state)
            run.record(record)
            run.checkpoint(state)
        end = run.resume(torch.device("cpu"))
        assert end is not None
        return Played([_timeless(record) for record in run.rounds()], end)

    def _prepare(self, federation: Federation, state: Checkpoint) -> None:
        default = ["words" if federation.rank_context.dataset.owners is not None else "patch"]
        backdoors = self.backdoors
        if backdoors is None:
            backdoors = federation.rank_context.attack.backdoor_settings(default)
        federation.prepare([BACKDOORS.build(settings_of(b)) for b in backdoors], state)


class Played(NamedTuple):
    """Records without times, and the last checkpoint, on the CPU."""

    records: list[Record]
    checkpoint: Checkpoint


def assert_same_on_gpus(setting: Setting, folder: Path, tolerance: float = 0.0) -> Played:
    """Rounds on cuda:0, cuda:0 and cuda:1 give the results of the CPU."""
    expected = setting.play(["cpu"] * 3, folder / "cpu")
    with fake_gpus():
        found = setting.play(["cuda:0", "cuda:0", "cuda:1"], folder / "gpu")
    assert_same(found, expected, tolerance)
    return found


def assert_same(found: Played, expected: Played, tolerance: float = 0.0) -> None:
    if not tolerance:
        assert found.records == expected.records
    for have, want in zip(_leaves(found), _leaves(expected), strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
        elif isinstance(want, float):
            assert have == pytest.approx(want, rel=tolerance, abs=tolerance)
        else:
            assert have == want


def _built(registry: Registry[Any], plugin: Any) -> Any:
    if isinstance(plugin, str | Mapping):
        return registry.build({"name": plugin} if isinstance(plugin, str) else plugin)
    return plugin


def _timeless(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "seconds"}


def _leaves(value: Any) -> Iterator[Any]:
    """All tensors, numbers and strings of nested containers, with the keys of mappings."""
    if isinstance(value, Checkpoint):
        value = vars(value)
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))
