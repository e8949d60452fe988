"""accelerator=auto, executor.devices: resolved once, limited to the machine, wrong ones refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from end_to_end import environment
from lightning.fabric import Fabric
from omegaconf import OmegaConf

from fedbench.config import RunConfig
from fedbench.engine import launch
from fedbench.engine.executors import EXECUTORS, Executor, Sequential
from fedbench.errors import UserError
from fedbench.multirun import launchers, resources
from fedbench.plan import Plan
from fedbench.single_run import run


@pytest.fixture(params=[0, 2], ids=["no GPU", "2 GPUs"])
def n_gpus(request: pytest.FixtureRequest) -> Iterator[int]:
    with mock.patch("torch.cuda.device_count", return_value=request.param):
        yield request.param


def config(**executor: Any) -> RunConfig:
    return RunConfig(
        defense={"name": "fedavg"},
        attack={"name": "none"},
        dataset={"name": "fmnist_sample"},
        model={"name": "mlp"},
        executor={"name": "auto", **executor},
        tracker={"name": "none"},
    )


@pytest.mark.parametrize("name", EXECUTORS.names())
def test_every_executor_takes_a_gpu_if_there_is_one(name: str, n_gpus: int) -> None:
    chosen = {
        accelerator: EXECUTORS.build({"name": name, "accelerator": accelerator}).accelerator
        for accelerator in ("auto", "cpu", "cuda", "gpu")
    }
    auto = "cuda" if n_gpus else "cpu"
    assert chosen == {"auto": auto, "cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}
    assert EXECUTORS.build({"name": name}).accelerator == auto


def test_a_run_records_the_accelerator_that_it_uses(n_gpus: int) -> None:
    auto, same, other = (
        Plan.of(config(accelerator=accelerator))
        for accelerator in ("auto", *(("gpu", "cpu") if n_gpus else ("cpu", "gpu")))
    )
    assert auto.config.executor["accelerator"] == ("cuda" if n_gpus else "cpu")
    assert auto.folder.path == same.folder.path != other.folder.path
    assert auto.pretrain_id == same.pretrain_id != other.pretrain_id


@pytest.mark.parametrize("accelerator", ["mps", "tpu"])
def test_other_accelerators_are_refused_in_one_line(accelerator: str) -> None:
    with pytest.raises(UserError, match=f"must be one of auto, cpu, cuda, gpu, got {accelerator}"):
        Plan.of(config(accelerator=accelerator))
    with pytest.raises(ValueError, match="mps, which has no float64"):
        Sequential(accelerator="mps")


def test_cuda_without_a_gpu_is_refused_before_data_is_loaded() -> None:
    plan = Plan.of(config(accelerator="cuda"))  # a login node may plan runs of other machines
    with (
        mock.patch.object(type(plan.source), "load", side_effect=AssertionError),
        mock.patch("torch.cuda.device_count", return_value=0),
        pytest.raises(UserError, match="accelerator=cuda: this machine has no GPU that torch can"),
    ):
        run(config(accelerator="cuda"))


def test_lightning_gets_the_resolved_accelerator() -> None:
    with mock.patch("fedbench.engine.launch.Fabric") as fabric:
        launch.make_fabric(Sequential(accelerator="gpu"), [3])
    assert fabric.call_args.kwargs["accelerator"] == "cuda"
    assert fabric.call_args.kwargs["devices"] == [3]


def test_each_rank_gets_a_gpu_of_its_own() -> None:
    main = launch.RankMain(Sequential(accelerator="cuda"), [1, 3], ranks, ())
    with mock.patch("fedbench.engine.launch.Fabric") as fabric:
        main(1, [])
    assert fabric.call_args.kwargs["devices"] == [3]
    strategy = fabric.call_args.kwargs["strategy"]
    assert strategy.root_device == torch.device("cuda", 3)
    assert (strategy.global_rank, strategy.world_size) == (1, 2)
    assert not strategy.is_global_zero


def ranks(fabric: Fabric) -> int:
    return fabric.world_size


@pytest.mark.slow
def test_a_run_in_a_slurm_job_launches_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task of a job may use several devices."""
    job = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_NAME": "submitit", "JOB_ID": "77"}
    place = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "NODELIST": "localhost"}
    for key, value in (job | place).items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    assert launch.launch(Sequential(accelerator="cpu"), 2, ranks) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_processes_are_forked_only_without_gpus(n_gpus: int) -> None:
    with mock.patch("torch.cuda.is_available", return_value=n_gpus > 0):
        assert launch._can_fork(Sequential()) is (n_gpus == 0)
        assert launch._can_fork(Sequential(accelerator="cuda")) is False


def test_gpus_of_parallel_runs_are_claimed(monkeypatch: pytest.MonkeyPatch, n_gpus: int) -> None:
    monkeypatch.setenv(resources.PARALLEL, "2")
    with (
        mock.patch("fedbench.multirun.resources.claim") as claim,
        launch._claimed_devices(Sequential(), 1) as claimed,
    ):
        if n_gpus:
            claim.assert_called_once_with("gpus", 1, 2)
        else:
            assert claimed == 1


LIMITS = [
    # devices, accelerator, clients: used, line
    (99, "cpu", 30, 4, "executor.devices=99: this machine has 4 cores; using 4"),
    (99, "cuda", 30, 2, "executor.devices=99: this machine has 2 GPUs; using 2"),
    (4, "cpu", 3, 3, "executor.devices=4: a round has 3 clients; using 3"),
    (2, "cuda", 1, 1, "executor.devices=2: a round has 1 client; using 1"),
    (4, "cpu", 30, 4, None),
    (None, "cpu", 30, None, None),
]


@pytest.mark.parametrize(("devices", "accelerator", "n_clients", "used", "line"), LIMITS)
def test_devices_are_limited_with_one_line(
    devices: int | None,
    accelerator: str,
    n_clients: int,
    used: int | None,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(resources, "n_cores", lambda: 4)
    monkeypatch.setattr(resources, "n_gpus", lambda: 2)
    resources._announce.cache_clear()
    executor: Executor = Sequential(devices=devices, accelerator=accelerator)
    for _ in range(3):  # the runs of a sweep in one process
        resources.announce_limit(executor, n_clients)
    assert capsys.readouterr().out.splitlines() == ([line] if line else [])
    if used is not None:
        assert resources.usable_devices(executor, n_clients) == used


@pytest.mark.parametrize(
    ("target", "remote"),
    [
        ("hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", False),
        ("hydra._internal.core_plugins.basic_launcher.BasicLauncher", False),
        ("hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher", False),
        ("hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher", True),
        ("hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", True),
    ],
)
def test_launchers_of_other_machines_need_a_definite_accelerator(target: str, remote: bool) -> None:
    runtime = {"choices": {"hydra/launcher": "cluster"}}
    sweep = OmegaConf.create({"hydra": {"launcher": {"_target_": target}, "runtime": runtime}})
    if not remote:
        launchers.check_local(sweep)
        return
    with pytest.raises(UserError, match="auto: must be cpu or cuda with hydra/launcher=cluster"):
        launchers.check_local(sweep)


def test_a_sweep_finds_its_number_of_runs_without_importing_torch() -> None:
    """On machines without the driver of a GPU; importing torch takes seconds."""
    code = (
        "import sys; from fedbench.multirun import resources; resources._has_gpu_driver = bool; "
        "assert resources.jobs('auto', 1, None) >= 1; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
