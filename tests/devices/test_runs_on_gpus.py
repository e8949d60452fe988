"""Whole runs on fake GPUs: pretraining is shared, interrupted runs resume, on any GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from fake_gpu import fabric_on, fake_gpus
from lightning.fabric import Fabric
from played import images, sequences

from fedbench import preview
from fedbench.config import RunConfig
from fedbench.data import DATASETS
from fedbench.federation import Federation
from fedbench.results.checkpoint import (
    Checkpoint,
    load_checkpoint,
    next_round_of,
    save_checkpoint,
)
from fedbench.single_run import run


@contextmanager
def machine(device: str) -> Iterator[None]:
    """Runs use this device, a fake GPU or the CPU, and tiny data sets."""

    def make_fabric(*_: Any) -> Fabric:
        return fabric_on(device)

    with (
        mock.patch("fedbench.engine.launch.make_fabric", make_fabric),
        mock.patch.object(DATASETS.get("fmnist_sample"), "load", return_value=images()),
        mock.patch.object(DATASETS.get("reddit_sample"), "load", return_value=sequences()),
        nullcontext() if device == "cpu" else fake_gpus(),
    ):
        yield


def config(out: Path, defense: str = "foolsgold", **settings: Any) -> RunConfig:
    return RunConfig(
        defense={"name": defense},
        attack={"name": "edge_case", "epochs": 1, "backdoors": [{"name": "tail", "target": 2}]},
        dataset={"name": "fmnist_sample"},
        model={"name": "mlp", "hidden": [4]},
        executor={"name": "auto", "accelerator": "auto", "devices": 1},
        tracker={"name": "none"},
        **{"n_clients": 4, "pool": 6, "pmr": 0.5, "local_epochs": 1, "rounds": 2}
        | {"pretrain_rounds": 1, "out": str(out)}
        | settings,
    )


def records(out: Path, defense: str) -> list[dict[str, Any]]:
    (folder,) = out.glob(f"default/{defense}-*")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": None, "check": None} for line in lines]


def run_and_stop(settings: RunConfig) -> None:
    """Run, and stop after the first round."""
    play = Federation.round

    def once(self: Federation, state: Any) -> Any:
        if state.next_round == 1:
            raise KeyboardInterrupt
        return play(self, state)

    with mock.patch.object(Federation, "round", once), pytest.raises(KeyboardInterrupt):
        run(settings)


def test_runs_continue_on_another_gpu(tmp_path: Path) -> None:
    """One run stops on cuda:0; on cuda:1 another uses its pretrained model, then it resumes."""
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    with machine("cpu"):
        for defense in ("foolsgold", "krum"):
            run(config(cpu, defense))
    with machine("cuda:0"):
        run_and_stop(config(gpu))
    with machine("cuda:1"):
        run(config(gpu, "krum"))
        run(config(gpu))
    for defense in ("foolsgold", "krum"):
        assert records(gpu, defense) == records(cpu, defense)
    assert len([*gpu.glob(".pretrained/*.pt")]) == 1
    recorded = [yaml.safe_load(p.read_text())["executor"] for p in gpu.glob("default/*/*.yaml")]
    assert [executor["accelerator"] for executor in recorded] == ["cuda"] * 2


def test_interrupted_pretraining_continues_on_another_gpu(tmp_path: Path) -> None:
    pretrain = Federation.pretrain

    def once(self: Federation, state: Any) -> Any:
        if state.next_round == -1:
            raise KeyboardInterrupt
        return pretrain(self, state)

    with machine("cpu"):
        run(config(tmp_path / "cpu", pretrain_rounds=2, rounds=1))
    settings = config(tmp_path / "gpu", pretrain_rounds=2, rounds=1)
    stopped = mock.patch.object(Federation, "pretrain", once)
    with machine("cuda:0"), stopped, pytest.raises(KeyboardInterrupt):
        run(settings)
    with machine("cuda:1"):
        run(settings)
    assert records(tmp_path / "gpu", "foolsgold") == records(tmp_path / "cpu", "foolsgold")


@pytest.mark.parametrize("saved_on", ["cpu", "cuda:0"])
def test_a_run_starts_from_the_checkpoint_of_another_device(saved_on: str, tmp_path: Path) -> None:
    with machine(saved_on):
        run(config(tmp_path / "first", rounds=1, attack_start=0))
    (path,) = (tmp_path / "first").glob("default/*/checkpoint.pt")
    for device in ("cpu", "cuda:1"):
        with machine(device), fake_gpus():  # the CPU of a machine with GPUs
            run(config(tmp_path / device, pretrained=str(path), rounds=1))
    found, expected = (records(tmp_path / device, "foolsgold") for device in ("cuda:1", "cpu"))
    assert found == expected


@pytest.mark.parametrize(
    "overrides",
    [["attack=edge_case"], ["dataset=reddit_sample", "dataset.backdoors=[words]"]],
    ids=str,
)
def test_previews_are_drawn_from_samples_on_a_gpu(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pixels as from the CPU; `tail` needs the features of a pretrained model."""
    monkeypatch.chdir(tmp_path)
    small = ["pretrain_rounds=1", "n_clients=6", "pool=6", "pmr=0.5"]
    for device in ("cpu", "cuda:1"):
        with machine(device):
            command = [*overrides, *small, "--samples", "2", "--to", f"{device}.png"]
            assert preview.main(command) == 0
    assert Path("cpu.png").read_bytes() == Path("cuda:1.png").read_bytes()


def test_checkpoints_of_a_machine_with_more_gpus_are_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with fake_gpus(2):
        vector = torch.zeros(3, device="cuda:1")
        saved = Checkpoint(-2, vector, vector, vector, vector, {"sum": vector})
        save_checkpoint(path, saved, "krum-1")
    with fake_gpus(1):
        assert next_round_of(path) == -2
        state = load_checkpoint(path, torch.device("cuda:0"), "delete it").defense_state
        assert state["sum"].device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match="CUDA device 1 of 1"):
            torch.load(path)


def test_a_whole_checkpoint_is_not_read_to_see_whether_pretraining_is_due(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"next_round": -2, "params": torch.zeros(10)}, path)
    with mock.patch("torch.load", wraps=torch.load) as load:
        assert next_round_of(path) == -2
    assert load.call_args.kwargs["mmap"] is True
