"""Hydra's callback: check every run of a sweep first, print the table at the end."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from fedbench.config import RunConfig
from fedbench.errors import UserError, print_error
from fedbench.multirun import resources, worker_pool
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
            from fedbench.plan import Plan

            composed = config.copy()
            with open_dict(composed), suppress(Exception):  # the run itself reports errors
                del composed["hydra"]
                self._list_runs([Plan.of(RunConfig.from_hydra(composed))])

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check every run before the first one starts."""
        try:
            runs = _runs_of(config)
            SweepCallback.has_workers = _prepare_workers(config, len(runs))
            from fedbench.plan import Plan

            plans = [Plan.of(_compose(config, overrides)) for overrides in runs]
            by_folder = {plan.folder.path: plan for plan in plans}  # drops duplicate runs
            SweepCallback.folders = list(by_folder)
            self._list_runs([*by_folder.values()], config.hydra.sweep.dir)
            _name_sweep(config)
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

    unfinished = [plan for plan in plans if plan.finished() is None]
    if not unfinished:
        return
    for plan in unfinished:
        resources.announce_limit(plan.executor, plan.config.most_clients)
    n_parallel = min(config.hydra.launcher.n_jobs, len(unfinished))
    due = {plan.pretrain_id for plan in unfinished if pretraining.is_due(plan)}
    last_batch = unfinished[len(unfinished) // n_parallel * n_parallel :]
    variables = {
        resources.PARALLEL: n_parallel,
        resources.PRETRAINING: min(n_parallel, max(len(due), 1)),
        resources.LAST_BATCH: " ".join(plan.folder.path.name for plan in last_batch),
    }
    _pass_on(config, variables)


def _name_sweep(config: DictConfig) -> None:
    """Tell the runs of any launcher that they belong to one sweep, and which."""
    sweep = f"{os.getpid()}-{time.time_ns()}"  # a system uses the same process ids again
    atexit.register(resources.forget_sweep, sweep)
    _pass_on(config, {resources.SWEEP: sweep})


def _pass_on(config: DictConfig, variables: Mapping[str, object]) -> None:
    """Set environment variables of the runs.

    Not through os.environ: the fork server, whose environment workers inherit, already runs, and
    runs on other machines do not inherit it.
    """
    with open_dict(config):
        config.hydra.overrides.hydra += [
            f"+hydra.job.env_set.{name}='{value}'" for name, value in variables.items()
        ]


def _runs_of(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each run; empty for a sweeper that picks its runs one by one."""
    if config.hydra.runtime.choices["hydra/sweeper"] != "basic":
        return []
    overrides = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides += config.hydra.overrides.task
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return expand(parser.parse_overrides(overrides))


def expand(overrides: Iterable[Override]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in the order of Hydra's basic sweeper.

    `a=1,2 b=3,4` expands to [a=1 b=3], [a=1 b=4], [a=2 b=3], [a=2 b=4]. Of two overrides with the
    same key the last one counts.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values = iter([override.get_value_element_as_str()])
        elif override.is_discrete_sweep():
            values = override.sweep_string_iterator()
        else:
            raise UserError(f"{override.input_line}: must be a list or a range of values")
        choices[key] = [f"{key}={value}" for value in values]
    return [list(run) for run in product(*choices.values())]


def _compose(config: DictConfig, overrides: list[str]) -> RunConfig:
    composed = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
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
