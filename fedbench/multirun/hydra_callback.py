"""Hydra's callback: check every run of a sweep first, print the table at the end."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from fedbench.config import RunConfig
from fedbench.errors import UserError, print_error
from fedbench.multirun import resources, sweeper, worker_pool
from fedbench.multirun.parent_watch import exit_with_parent
from fedbench.results.atomic_files import write_atomically
from fedbench.results.run_reader import read_runs

if TYPE_CHECKING:  # imports torch, which takes seconds: start the worker pool first
    from fedbench.plan import Plan


class SweepCallback(Callback):
    """Called by Hydra before and after the runs, in the process that launches them."""

    # Class variables, as Hydra gives no access to its callback object and skips
    # `on_multirun_end` after a failure.
    folders: ClassVar[list[Path]] = []
    has_workers: ClassVar[bool] = False

    def __init__(self, listing: str | None = None) -> None:
        """`listing`: file to list the runs in, for the Python process that started the command."""
        self.listing = listing

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """List the run of a command without `-m`."""
        if self.listing is not None and config.hydra.mode == RunMode.RUN:
            composed = config.copy()
            with open_dict(composed), suppress(Exception):  # the run itself reports errors
                del composed["hydra"]
                run = RunConfig.from_hydra(composed)
                from fedbench.plan import Plan

                self._list_runs([Plan.of(run)])

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check every run before the first one starts."""
        try:
            runs = _runs_of(config)
            SweepCallback.has_workers = _prepare_workers(config, len(runs))
            configs = [_compose(config, overrides) for overrides in runs]
            from fedbench.plan import Plan

            plans = [Plan.of(run) for run in configs]
            by_folder = {plan.folder.path: plan for plan in plans}  # drops duplicate runs
            SweepCallback.folders = list(by_folder)
            self._list_runs([*by_folder.values()], config.hydra.sweep.dir)
            if self.has_workers:
                _announce_sweep(config, [*by_folder.values()])
        except Exception as error:
            print_error(error)
            # Hydra turns an exception of a callback into a warning, but lets SystemExit pass.
            sys.exit(1)

    def _list_runs(self, plans: Sequence[Plan], parent: str = "") -> None:
        """Write folder and settings of each run; `parent` if the sweeper picks runs one by one."""
        if self.listing is not None:
            exit_with_parent()
            runs = [{"folder": str(p.folder.path), "config": asdict(p.config)} for p in plans]
            lines = [json.dumps(run) + "\n" for run in runs or [{"folder": parent, "config": {}}]]
            write_atomically(
                Path(self.listing), lambda file: file.write("".join(lines).encode("utf-8"))
            )

    @classmethod
    def fail(cls, error: UserError) -> None:
        """Mark the runs as failed that were in progress when the worker pool broke."""
        from fedbench.results.run_dir import RunDir

        for folder in map(RunDir, cls.folders):
            if folder.path.exists() and not folder.summary_file.exists():
                folder.fail(error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table; exit with an error if any run failed."""
        from fedbench.report.table import print_runs
        from fedbench.results.run_dir import RunDir

        if self.has_workers:
            worker_pool.end()
        started = [folder for folder in self.folders if folder.exists()]
        if started or not self.folders:
            print_runs(read_runs(started or [config.hydra.sweep.dir]))
        if any(RunDir(folder).finished() is None for folder in self.folders):
            sys.exit(1)


def _prepare_workers(config: DictConfig, n_runs: int) -> bool:
    """Start the worker pool if the launcher is joblib's and runs several processes."""
    launcher = config.hydra.launcher
    if launcher.get("n_jobs") is None:
        return False
    if launcher.n_jobs < 1:  # joblib's -1 means all cores
        launcher.n_jobs = resources.n_cores()
    if n_runs:  # 0: the sweeper picks its runs one by one
        launcher.n_jobs = min(launcher.n_jobs, n_runs)
    if launcher.n_jobs == 1:  # joblib runs in this process
        return False
    worker_pool.prepare()
    return True


def _announce_sweep(config: DictConfig, plans: Sequence[Plan]) -> None:
    """Pass the resources.* variables to the workers: how many runs share the machine, and when."""
    from fedbench import pretraining

    unfinished = [plan for plan in plans if plan.folder.finished() is None]
    if not unfinished:
        return
    for plan in unfinished:
        resources.announce_limit(plan.executor, plan.config.most_clients)
    n_parallel = min(config.hydra.launcher.n_jobs, len(unfinished))
    due = {plan.config.pretrain_id() for plan in unfinished if pretraining.is_due(plan.config)}
    last_batch = unfinished[len(unfinished) // n_parallel * n_parallel :]
    variables = {
        resources.PARALLEL: n_parallel,
        resources.PRETRAINING: min(n_parallel, max(len(due), 1)),
        resources.LAST_BATCH: " ".join(plan.folder.path.name for plan in last_batch),
        resources.SWEEP: os.getpid(),
    }
    atexit.register(resources.forget_sweep, os.getpid())
    # Not through os.environ: the fork server, whose environment workers inherit, already runs.
    with open_dict(config):
        config.hydra.overrides.hydra += [
            f"+hydra.job.env_set.{name}='{value}'" for name, value in variables.items()
        ]


def _runs_of(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each run; empty for a sweeper that picks its runs one by one."""
    if config.hydra.runtime.choices["hydra/sweeper"] not in ("basic", sweeper.CONFIG):
        return []
    loader = GlobalHydra.instance().config_loader()
    task = config.hydra.overrides.task
    return sweeper.runs_of(
        sweeper.parsed(config.hydra.sweeper.params, task, loader), loader, config
    )


def _compose(config: DictConfig, overrides: list[str]) -> RunConfig:
    composed = sweeper.composed(config, overrides, GlobalHydra.instance().config_loader())
    with open_dict(composed):
        del composed["hydra"]
    run = RunConfig.from_hydra(composed)
    if run.executor.get("accelerator") == "auto":
        _check_local(config)
    return run


def _check_local(config: DictConfig) -> None:
    """Raise a UserError for a launcher of other machines: `auto` would look for a GPU here."""
    target = str(config.hydra.launcher.get("_target_"))
    if any(remote in target for remote in ("SlurmLauncher", "ray_launcher")):
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise UserError(
            f"executor.accelerator=auto: must be cpu or cuda with hydra/launcher={name}, "
            "whose runs may be on other machines than this one"
        )
