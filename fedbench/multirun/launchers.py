"""Sets up Hydra's launchers: how many runs share the machine, and where jobs leave their files."""

from __future__ import annotations

import atexit
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fedbench.errors import UserError
from fedbench.multirun import resources
from fedbench.multirun.worker_pool import WorkerPool

if TYPE_CHECKING:  # imports torch, which takes seconds: start the worker pool first
    from fedbench.plan import Plan

SUBMITIT_FOLDER = "${hydra.sweep.dir}/.submitit/%j"  # submitit's default: a folder for each job


def kind(config: DictConfig) -> str:
    """Return the class of the launcher, such as `JoblibLauncher`."""
    return str(config.hydra.launcher.get("_target_")).rpartition(".")[2]


def check_local(config: DictConfig) -> None:
    """Raise a UserError for a launcher of other machines: `auto` would look for a GPU here."""
    if kind(config) in ("SlurmLauncher", "RayLauncher"):
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise UserError(
            f"executor.accelerator=auto: must be cpu or cuda with hydra/launcher={name}, "
            "whose runs may be on other machines than this one"
        )


def prepare_workers(config: DictConfig, n_runs: int) -> WorkerPool | None:
    """Start the worker pool if the launcher is joblib's and runs several processes."""
    launcher = config.hydra.launcher
    if launcher.get("n_jobs") is None:
        return None
    launcher.n_jobs = _n_jobs(launcher)
    if n_runs:  # 0: the sweeper picks its runs one by one
        launcher.n_jobs = min(launcher.n_jobs, n_runs)
    if launcher.n_jobs == 1:  # joblib runs in this process
        return None
    return WorkerPool()


def n_at_a_time(config: DictConfig, plans: Sequence[Plan]) -> int:
    """Number of these runs that the launcher would run at a time."""
    n, launcher = 1, config.hydra.launcher
    if kind(config) == "JoblibLauncher":
        n = _n_jobs(launcher)
    elif kind(config) == "SlurmLauncher":
        n = launcher.array_parallelism
    elif plans and kind(config) in ("LocalLauncher", "RayLauncher"):
        n = _n_fitting(plans)
    return max(min(n, len(plans)), 1)


def _n_jobs(launcher: DictConfig) -> int:
    n = int(launcher.n_jobs)
    return n if n >= 1 else resources.n_cores()  # joblib's -1 means all cores


def name_sweep(config: DictConfig) -> None:
    """Tell the runs that they belong to one sweep, and which."""
    sweep = f"{os.getpid()}-{time.time_ns()}"  # a system uses the same process ids again
    atexit.register(resources.forget_sweep, sweep)
    set_variables(config, {resources.SWEEP: sweep})


def share_machine(config: DictConfig, plans: Sequence[Plan], has_workers: bool) -> None:
    """Tell the unfinished runs of a sweep how many of them share the machine, and when."""
    unfinished = [plan for plan in plans if plan.finished() is None]
    if not unfinished:
        return
    for plan in unfinished:
        resources.announce_limit(plan.executor, plan.config.most_clients)
    if has_workers:
        n_parallel = min(config.hydra.launcher.n_jobs, len(unfinished))
        _set_slots(config, unfinished, n_parallel)
        last_batch = unfinished[len(unfinished) // n_parallel * n_parallel :]
        names = " ".join(plan.folder.path.name for plan in last_batch)
        set_variables(config, {resources.LAST_BATCH: names})
    elif kind(config) == "LocalLauncher":  # starts all jobs at once: those without a slot wait
        _set_slots(config, unfinished, _n_fitting(unfinished))
    elif kind(config) == "RayLauncher":
        _reserve_cores(config, unfinished)


def _n_fitting(plans: Sequence[Plan]) -> int:
    """Number of runs that fit on the machine at a time, each on the cores or GPUs it asks for."""
    executors = [plan.executor for plan in plans]
    fitting = min(resources.jobs(e.accelerator, e.threads, e.devices) for e in executors)
    return min(fitting, len(plans))


def _set_slots(config: DictConfig, plans: Sequence[Plan], n_parallel: int) -> None:
    from fedbench import pretraining

    due = {plan.pretrain_id for plan in plans if pretraining.is_due(plan)}
    set_variables(
        config,
        {
            resources.PARALLEL: n_parallel,
            resources.PRETRAINING: min(n_parallel, max(len(due), 1)),
        },
    )


def _reserve_cores(config: DictConfig, plans: Sequence[Plan]) -> None:
    """Let Ray start as many runs as fit, and limit each to the cores that Ray reserves for it."""
    ray = config.hydra.launcher.ray
    is_local = ray.init.get("address") is None and "RAY_ADDRESS" not in os.environ
    needed = max(plan.executor.threads * (plan.executor.devices or 1) for plan in plans)
    with open_dict(ray):
        if ray.remote.get("num_cpus") is None:
            n_cores = resources.n_cores()
            shared = max(n_cores // _n_fitting(plans), 1)
            ray.remote.num_cpus = min(max(shared, needed), n_cores) if is_local else needed
        # fedbench prints the output of the runs itself.
        ray.init.setdefault("log_to_driver", False)
        ray.init.setdefault("logging_level", "WARNING")
    set_variables(config, {resources.CORES: max(int(ray.remote.num_cpus), 1)})


def set_variables(config: DictConfig, variables: Mapping[str, Any]) -> None:
    """Set environment variables of the runs.

    Not through os.environ: joblib's fork server, whose environment workers inherit, already runs,
    and jobs of a cluster have another one.
    """
    with open_dict(config):
        config.hydra.overrides.hydra += [
            f"+hydra.job.env_set.{name}='{value}'" for name, value in variables.items()
        ]


def place_job_files(config: DictConfig, sweep: str) -> Path | None:
    """Give submitit one folder for the files of all jobs of this sweep; None for other launchers.

    Its default has `%j` for the id of a job. It creates a folder of that very name, too.
    """
    launcher = config.hydra.launcher
    raw = OmegaConf.to_container(launcher, resolve=False)
    assert isinstance(raw, dict)
    if raw.get("submitit_folder") != SUBMITIT_FOLDER:
        return None
    folder = Path(config.hydra.sweep.dir, ".submitit", sweep)
    launcher.submitit_folder = str(folder)
    return folder


def remove_job_files(folder: Path) -> None:
    """Remove the job files of a sweep, and their parent after the last sweep."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.is_dir() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()
