"""Hydra's callback: check every run of a sweep first, print the table at the end."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
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
from fedbench.display import run_events
from fedbench.display.console import announce_start
from fedbench.display.sweep_panel import DONE, LEFT, RunState, labels
from fedbench.errors import UserError, print_error
from fedbench.multirun import launchers, sweeper, worker_pool
from fedbench.multirun.parent_watch import exit_with_parent
from fedbench.multirun.sweep_watch import SweepWatch
from fedbench.results.atomic_files import write_atomically
from fedbench.results.planned_runs import write_planned_runs
from fedbench.results.provenance import has_changed_since
from fedbench.results.run_reader import read_runs

if TYPE_CHECKING:  # imports torch, which takes seconds: start the worker pool first
    from fedbench.plan import Plan


class SweepCallback(Callback):
    """Called by Hydra before and after the runs, in the process that launches them."""

    # Class variables, as Hydra gives no access to its callback object and skips
    # `on_multirun_end` after a failure.
    folders: ClassVar[list[Path]] = []
    has_workers: ClassVar[bool] = False
    watch: ClassVar[SweepWatch | None] = None
    job_files: ClassVar[Path | None] = None

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
            announce_start(f"checking {len(runs)} runs" if runs else "starting the sweeper")
            SweepCallback.has_workers = launchers.prepare_workers(config, len(runs))
            configs = [_compose(config, overrides) for overrides in runs]
            from fedbench.plan import Plan

            plans = [Plan.of(run) for run in configs]
            by_folder = {plan.folder.path: plan for plan in plans}  # drops duplicate runs
            SweepCallback.folders = list(by_folder)
            self._list_runs([*by_folder.values()], config.hydra.sweep.dir)
            launchers.name_sweep(config)
            launchers.share_machine(config, [*by_folder.values()], self.has_workers)
            if plans:
                _write_planned(plans, labels(runs))
                self._watch(config, plans, labels(runs))
        except Exception as error:
            print_error(error)
            # Hydra turns an exception of a callback into a warning, but lets SystemExit pass.
            sys.exit(1)

    def _watch(self, config: DictConfig, plans: Sequence[Plan], names: Sequence[str]) -> None:
        """Show the progress of the runs until `close`."""
        sweep = Path(config.hydra.sweep.dir).absolute()
        sweep.mkdir(parents=True, exist_ok=True)
        events = Path(tempfile.mkdtemp(prefix=".sweep-", dir=sweep))
        launchers.set_variables(config, {run_events.FOLDER: events})
        SweepCallback.job_files = launchers.place_job_files(config, events.name)
        runs: dict[str, RunState] = {}
        for plan, name in zip(plans, names, strict=True):
            summary = plan.finished()
            state = RunState(name or plan.title, plan.config.rounds)
            state.status = LEFT if summary is None else DONE
            state.is_of_other_code = summary is not None and has_changed_since(summary)
            runs.setdefault(plan.folder.path.name, state)
        SweepCallback.watch = SweepWatch(events, runs, [plan.folder.path.name for plan in plans])
        SweepCallback.watch.start()

    @classmethod
    def close(cls) -> None:
        """Show how the sweep ended; later calls do nothing."""
        if cls.watch is not None:
            cls.watch.close()
            cls.watch = None

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
        self.close()
        started = [folder for folder in self.folders if folder.exists()]
        if started or not self.folders:
            sweep = config.hydra.sweep.dir
            print_runs(read_runs(started or [sweep]))
            command = f"python -m fedbench.report {shlex.quote(sweep)}"
            print(f"{command} draws these runs: a page, figures, tables for papers")
        if any(RunDir(folder).finished() is None for folder in self.folders):
            sys.exit(1)
        if self.job_files is not None:  # logs of failed jobs stay
            launchers.remove_job_files(self.job_files)


def _write_planned(plans: Sequence[Plan], names: Sequence[str]) -> None:
    """List the runs beside their folders, so that a report can name those that never started."""
    planned: dict[Path, dict[str, str]] = {}
    for plan, name in zip(plans, names, strict=True):
        path = plan.folder.path
        planned.setdefault(path.parent, {}).setdefault(path.name, name or plan.title)
    for parent, titles in planned.items():
        write_planned_runs(parent, titles)


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
        launchers.check_local(config)
    return run
