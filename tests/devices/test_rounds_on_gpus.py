"""Whole rounds on fake GPUs give the results of the CPU, to the bit; any mix of devices raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from played import ChecksView, Setting, assert_same_on_gpus, features, images, sequences
from shipped import published
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.backdoor import BACKDOORS
from fedbench.data import Dataset
from fedbench.defense import DEFENSES
from fedbench.engine.executors import EXECUTORS
from fedbench.models import MODELS

pytestmark = pytest.mark.slow

# Settings beyond the defaults that use other code, or leave other state behind
DEFENSE_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "afa": [{"xi": 0.1, "block": 0.6}],
    "auror": [{"layers": "all", "alpha": 0.0, "rounds": 1}],
    "baybfed": [
        {"bins": 32, "max_clusters": 2},
        {"weights": "model", "cosine": "angular", "cold_start": "score", "tau": "cluster"},
        {"scoring": "sequential", "assign": "min", "score": "divergence", "sigma0_sq": "auto"},
        {"cosine": "similarity", "filter": "pseudocode", "persist": False},
        {"threshold": "groups", "error_floor": 0.0},
    ],
    "dp": [{"clip": 1e-3, "noise": 0.1}],
    "foolsgold": [{"layers": "all", "kappa": 2.0}],
    "krum": [{"m": "auto"}],
}
ATTACK_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "alie": [{"omniscient": False}],
    "constrain_and_scale": [{"gamma": "bounded", "constraint": "cosine", "epochs": 2}],
    "dba": [{"gamma": "bounded", "epochs": 1}],
    "edge_case": [{"eps": 0.5, "lr": 0.05, "lr_decay": 0.1, "lr_decay_at": [0.5]}],
    "min_max": [{"perturbation": "unit"}, {"perturbation": "sign", "omniscient": False}],
}
MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "resnet18_light": {"widths": [4, 6]},
    "lstm": {"width": 5},
    "gru": {"width": 5},
}
SEQUENCE_MODELS = ("lstm", "gru")


def cases(names: list[str], settings: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The defaults of every plugin, then its other settings."""
    return [{"name": name, **more} for name in names for more in [{}, *settings.get(name, [])]]


@pytest.mark.parametrize("defense", cases(published(DEFENSES), DEFENSE_SETTINGS), ids=str)
def test_every_defense(defense: dict[str, Any], tmp_path: Path) -> None:
    assert_same_on_gpus(Setting(defense, "constrain_and_scale"), tmp_path)


def test_all_inputs_of_a_defense_are_on_one_device(tmp_path: Path) -> None:
    assert_same_on_gpus(Setting(ChecksView()), tmp_path)


@pytest.mark.parametrize("attack", cases(published(ATTACKS), ATTACK_SETTINGS), ids=str)
def test_every_attack(attack: dict[str, Any], tmp_path: Path) -> None:
    assert_same_on_gpus(Setting("krum", attack), tmp_path)


@pytest.mark.parametrize("name", [n for n in published(MODELS) if n != "custom"])
def test_every_model(name: str, tmp_path: Path) -> None:
    data = sequences() if name in SEQUENCE_MODELS else images()
    model = {"name": name, **MODEL_SETTINGS.get(name, {})}
    # On the CPU, recurrent layers have kernels of their own, which round differently.
    tolerance = 1e-5 if name in SEQUENCE_MODELS else 0.0
    clipped = {"clip_grad": 0.5, "weight_decay": 0.01}
    setting = Setting("flame", "constrain_and_scale", model, dataset=data, config=clipped)
    assert_same_on_gpus(setting, tmp_path, tolerance)


@pytest.mark.parametrize("attack", ["constrain_and_scale", "edge_case", "adaptive_baybfed"])
@pytest.mark.parametrize("name", published(EXECUTORS))
def test_every_executor(name: str, attack: str, tmp_path: Path) -> None:
    """With clients of different sizes and rates, and attacks that change every step."""
    unequal = {"partition": "dirichlet", "dirichlet_alpha": 0.5, "clip_grad": 0.5}
    settings = {"gamma": "bounded", "epochs": 2, "lr": 0.05, "lr_decay": 0.1, "lr_decay_at": [0.5]}
    setting = Setting("fedavg", {"name": attack, **settings}, executor=name, config=unequal)
    # A stack of clients is multiplied in another order on the CPU, where steps are captured.
    assert_same_on_gpus(setting, tmp_path, tolerance=1e-4 if name != "sequential" else 0.0)


@pytest.fixture
def backdoor_files(tmp_path: Path) -> dict[str, tuple[dict[str, Any], Dataset]]:
    """Backdoors whose samples are in files: their settings, and a data set that they fit."""
    rng = np.random.default_rng(0)
    planes = {part: rng.integers(256, size=(4, 32, 32, 3)) for part in ("train", "test")}
    np.savez(tmp_path / "planes.npz", **planes)
    windows = {part: rng.integers(8, size=(4, 6)) for part in ("train", "test")}
    np.savez(tmp_path / "windows.npz", **windows)
    for part in ("train", "test"):
        np.savetxt(tmp_path / f"ARDIS_{part}_2828.csv", rng.integers(256, size=(3, 784)))
        np.savetxt(tmp_path / f"ARDIS_{part}_labels.csv", np.eye(10)[[7, 7, 2]])
    return {
        "ardis": ({"folder": str(tmp_path), "target": 1}, images()),
        "southwest": ({"file": str(tmp_path / "planes.npz"), "target": 1}, images(3, 32, True)),
        "traffic": ({"file": str(tmp_path / "windows.npz")}, sequences(threshold=0.1)),
    }


BACKDOOR_SETTINGS: dict[str, tuple[dict[str, Any], Dataset]] = {
    "features": ({"target": 1}, features()),
    "semantic": ({"dataset": "tiny", "train": [1, 4], "test": [7]}, images(augment=True)),
    "tail": ({"rate": 0.5, "source": 1, "target": 2}, images()),
    "traffic": ({}, sequences(threshold=0.1)),
    "words": ({}, sequences()),
}


@pytest.mark.parametrize(
    ("name", "from_file"),
    [*((name, False) for name in published(BACKDOORS)), ("traffic", True)],
)
def test_every_backdoor(
    name: str, from_file: bool, backdoor_files: dict[str, Any], tmp_path: Path
) -> None:
    known = backdoor_files if from_file else BACKDOOR_SETTINGS
    settings, data = known.get(name, backdoor_files.get(name, ({}, images())))
    backdoors = [{"name": name, **settings}]
    attack = {"name": "constrain_and_scale", "backdoors": backdoors}
    model = {"name": "gru", "width": 4} if data.owners is not None else {"name": "mlp"}
    tolerance = 1e-5 if data.owners is not None else 0.0
    setting = Setting("median", attack, model, dataset=data)
    played = assert_same_on_gpus(setting, tmp_path / "runs", tolerance)
    assert all(record["BA"] is not None for record in played.records)


@dataclass(frozen=True)
class Malformed(Attack):
    """Send rows that the server must refuse."""

    def collude(self, updates: Tensor, view: AttackView) -> list[Tensor]:
        broken = torch.full_like(updates[0], torch.nan)
        return [updates[0][:3], *[broken] * (len(updates) - 1)]


@pytest.mark.parametrize("defense", ["fedavg", "krum", "foolsgold"])
def test_refused_rows(defense: str, tmp_path: Path) -> None:
    setting = Setting(defense, Malformed())
    played = assert_same_on_gpus(setting, tmp_path)
    assert {c["refused"] for c in played.records[0]["clients"] if c["malicious"]} == {
        "not finite", "size (3,), not (3949,)",
    }  # fmt: skip


def test_a_round_without_any_valid_row_changes_nothing(tmp_path: Path) -> None:
    played = assert_same_on_gpus(Setting("krum", Malformed(), config={"pmr": 1.0}), tmp_path)
    assert [record["applied"] for record in played.records] == [False] * 3


def test_augmented_samples(tmp_path: Path) -> None:
    assert_same_on_gpus(Setting("fedavg", "dba", dataset=images(augment=True)), tmp_path)
