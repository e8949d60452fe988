"""A sweep of runs: checked as a whole before the first one starts, compared when all have ended."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from fedbench.config import RunConfig
from fedbench.errors import UserError, one_line
from fedbench.results.reader import read_runs
from fedbench.sweep import resources, worker_pool

if TYPE_CHECKING:  # it imports torch, which takes seconds: workers are made ready before
    from fedbench.plan import Plan


class SweepCallback(Callback):
    """Hydra's callback around the runs of `-m`, in the process that launches them."""

    # Of this process's sweep: Hydra keeps its callbacks to itself, and calls none after a failure.
    folders: ClassVar[list[Path]] = []
    has_workers: ClassVar[bool] = False

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Composes and checks every run, so that a mistake in the last costs nobody the first."""
        try:
            runs = _runs_of(config)
            SweepCallback.has_workers = _prepare_workers(config, len(runs))
            from fedbench.plan import Plan

            composed = [_compose(config, overrides) for overrides in runs]
            plans = [Plan.of(RunConfig.from_hydra(run)) for run in composed]
            by_folder = {plan.folder.path: plan for plan in plans}  # the same run twice is one
            SweepCallback.folders = list(by_folder)
            if self.has_workers:
                _divide_machine(config, [*by_folder.values()])
        except Exception as error:
            if (line := one_line(error)) is None:
                raise
            # Hydra turns an exception of a callback into a warning, but lets an exit pass.
            sys.exit(line)

    @classmethod
    def fail(cls, error: UserError) -> None:
        """Marks the runs failed that were under way when their processes ended."""
        from fedbench.results.run_dir import RunDir

        for folder in map(RunDir, cls.folders):
            if folder.path.exists() and not folder.summary_file.exists():
                folder.fail(error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """The table; the program ends with an error if any run did."""
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
    """Whether the launcher is one of joblib's, with processes of its own; they are made ready."""
    launcher = config.hydra.launcher
    if launcher.get("n_jobs") is None:
        return False
    if launcher.n_jobs < 1:  # joblib's -1 is all there are
        launcher.n_jobs = resources.n_cores()
    if n_runs:  # else the sweeper decides as it goes
        launcher.n_jobs = min(launcher.n_jobs, n_runs)
    if launcher.n_jobs == 1:  # joblib has the runs in this process
        return False
    worker_pool.prepare()
    return True


def _divide_machine(config: DictConfig, plans: Sequence[Plan]) -> None:
    """Tells the runs, which workers will do, how many of them go on side by side."""
    from fedbench import pretraining

    left = [plan for plan in plans if plan.folder.finished() is None]
    if not left:
        return
    side_by_side = min(config.hydra.launcher.n_jobs, len(left))
    pretrainings = {plan.config.pretrain_id() for plan in left if pretraining.is_due(plan.config)}
    last = left[len(left) // side_by_side * side_by_side :]  # fewer than before, so with more cores
    told = {
        resources.PARALLEL: side_by_side,
        resources.PRETRAINING: min(side_by_side, max(len(pretrainings), 1)),
        resources.LAST: " ".join(plan.folder.path.name for plan in last),
        resources.SWEEP: os.getpid(),
    }
    atexit.register(resources.forget_sweep, os.getpid())
    with open_dict(config):  # not by this process's environment: theirs may be running already
        config.hydra.overrides.hydra += [
            f"+hydra.job.env_set.{name}='{value}'" for name, value in told.items()
        ]


def _runs_of(config: DictConfig) -> list[list[str]]:
    """The overrides of each run; none for a sweeper that decides as it goes."""
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []
    overrides = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    overrides += config.hydra.overrides.task
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return BasicSweeper.split_arguments(parser.parse_overrides(overrides), max_batch_size=None)[0]


def _compose(config: DictConfig, overrides: list[str]) -> DictConfig:
    composed = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
    with open_dict(composed):
        del composed["hydra"]
    return composed
