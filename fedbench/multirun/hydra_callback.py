"""Hydra's callback: check every run of a sweep first, print the table at the end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from filelock import Timeout
from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from rich.text import Text

from fedbench.collector import fast_imports
from fedbench.config import RunConfig
from fedbench.default_settings import origin_of
from fedbench.display import run_events
from fedbench.display.console import (
    announce_start,
    console_for_output,
    failing_output_ignored,
    print_text,
)
from fedbench.display.sweep_panel import DONE, LEFT, RunState, labels
from fedbench.errors import UserError, print_error
from fedbench.multirun import launchers, resources, sweeper
from fedbench.multirun.failed_runs import failed_runs, print_failed_runs
from fedbench.multirun.parent_watch import exit_with_parent
from fedbench.multirun.scratch import ScratchFolder
from fedbench.multirun.sweep_watch import SweepWatch
from fedbench.multirun.worker_pool import WorkerPool
from fedbench.results.atomic_files import write_atomically
from fedbench.results.origin import Origin
from fedbench.results.planned_runs import write_planned_runs
from fedbench.results.provenance import has_changed_since
from fedbench.results.run_reader import read_runs

if TYPE_CHECKING:  # imports torch, which takes seconds: start the worker pool first
    from fedbench.plan import Plan


class SweepCallback(Callback):
    """Called by Hydra before and after the runs, in the process that launches them."""

    # Class variables, as Hydra gives no access to its callback object and skips
    # `on_multirun_end` after a failure.
    runs: ClassVar[dict[Path, str]] = {}  # label of each, by folder
    workers: ClassVar[WorkerPool | None] = None
    watch: ClassVar[SweepWatch | None] = None
    events: ClassVar[ScratchFolder | None] = None
    job_files: ClassVar[Path | None] = None

    def __init__(self, listing: str | None = None, dry_run: bool = False) -> None:
        """`listing`: file to list the runs in, for the Python process that started the command.

        `dry_run`: check all runs and print what would be done about them, but start nothing.
        """
        self.listing = listing
        self.dry_run = dry_run

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the run of a command without `-m`, instead of starting it, with `dry_run`."""
        if self.dry_run:
            with _exit_after():
                announce_start("checking 1 run")
                (plan,) = _plans([_settings_of(config.copy())])
                if plan.finished() is None and not any(plan.finished_elsewhere()):
                    resources.check_accelerator(plan.executor.accelerator)
                _print_dry_run(config, [plan], [""])

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """List the run of a command without `-m`."""
        if self.listing is not None and config.hydra.mode == RunMode.RUN:
            with suppress(Exception):  # the run itself reports errors
                self._list_runs(_plans([_settings_of(config.copy())]))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Compose and check every run before the first one starts."""
        with _exit_after(success=self.dry_run):
            runs = _runs_of(config)
            announce_start(f"checking {len(runs)} runs" if runs else "starting the sweeper")
            if not self.dry_run:
                SweepCallback.workers = launchers.prepare_workers(config, len(runs))
            plans = _plans([_compose(config, overrides) for overrides in runs])
            if self.dry_run:
                _print_dry_run(config, plans, labels(runs))
            else:
                self._prepare(config, plans, labels(runs))

    def _prepare(self, config: DictConfig, plans: Sequence[Plan], names: Sequence[str]) -> None:
        """Set up everything that the runs of the sweep need; `names` are their labels."""
        by_folder = {plan.folder.path: plan for plan in plans}  # drops duplicate runs
        paths = [plan.folder.path for plan in plans]
        SweepCallback.runs = dict(zip(paths, names, strict=True))
        self._list_runs([*by_folder.values()], config.hydra.sweep.dir)
        _take_over(plans, names)
        launchers.name_sweep(config)
        launchers.share_machine(config, [*by_folder.values()], self.workers is not None)
        if plans:
            _write_planned(plans, names)
            self._watch(config, plans, names)

    def _watch(self, config: DictConfig, plans: Sequence[Plan], names: Sequence[str]) -> None:
        """Show the progress of the runs until `close`."""
        sweep = Path(config.hydra.sweep.dir).absolute()
        sweep.mkdir(parents=True, exist_ok=True)
        SweepCallback.events = scratch = ScratchFolder(sweep, ".sweep-")
        events = scratch.path
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
        """End the workers, show how the sweep ended and tidy up; later calls do nothing."""
        if cls.workers is not None:
            cls.workers.end()
            cls.workers = None
        if cls.watch is not None:
            cls.watch.close()
            cls.watch = None
        if cls.events is not None:
            cls.events.remove()
            cls.events = None

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

        for folder in map(RunDir, cls.runs):
            if folder.path.exists() and not folder.summary_file.exists():
                folder.fail(error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table, then the runs that failed; exit with an error if any did."""
        sweep, complete = config.hydra.sweep.dir, False
        with failing_output_ignored():
            try:
                self.close()
                # A sweeper that picks its runs one by one has not listed them.
                runs = self.runs or {run.folder: "" for run in read_runs([sweep])}
                if failed := failed_runs(runs):
                    print_failed_runs(failed, len(runs))
                elif self.job_files is not None:  # logs of failed jobs stay
                    launchers.remove_job_files(self.job_files)
                _print_table(runs, sweep)
                complete = not failed
            except Exception as error:
                print_error(error, brief=True)
        if not complete:
            sys.exit(1)  # see `_exit_after`


@contextmanager
def _exit_after(success: bool = True) -> Iterator[None]:
    """Exit with an error after an exception, which is printed, and with `success` in any case.

    Hydra turns an exception of a callback into a warning, but lets SystemExit pass.
    """
    try:
        yield
    except Exception as error:
        print_error(error)
        sys.exit(1)
    if success:
        sys.exit()


def _print_table(folders: Iterable[Path], sweep: str) -> None:
    """Print the table of the runs that have started, and which of them it leaves out."""
    from fedbench.report.comparison import compare
    from fedbench.report.missing_runs import missing_runs
    from fedbench.report.table import print_comparison

    if not (started := [folder for folder in folders if (folder / "config.yaml").exists()]):
        return
    runs = read_runs(started)
    compared = compare(runs)
    missing = [run for run in missing_runs(runs, compared) if run.status == "not counted"]
    print_comparison(compared, [str(run) for run in missing])
    command = f"python -m fedbench.report {shlex.quote(sweep)}"
    print(f"{command} draws these runs: a page, figures, tables for papers")


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


def _compose(config: DictConfig, overrides: list[str]) -> tuple[RunConfig, Origin]:
    composed = sweeper.composed(config, overrides, GlobalHydra.instance().config_loader())
    run, origin = _settings_of(composed)
    if run.executor.get("accelerator") == "auto":
        launchers.check_local(config)
    return run, origin


def _settings_of(composed: DictConfig) -> tuple[RunConfig, Origin]:
    """Return the settings of a run and how the user came to them; `composed` loses Hydra's part."""
    job = composed.hydra
    with open_dict(composed):
        del composed["hydra"]
    run = RunConfig.from_hydra(composed)
    return run, origin_of(run, job)


def _plans(runs: Iterable[tuple[RunConfig, Origin]]) -> list[Plan]:
    with fast_imports():
        from fedbench.plan import Plan

    return [replace(Plan.of(run), origin=origin) for run, origin in runs]


def _print_dry_run(config: DictConfig, plans: Sequence[Plan], names: Sequence[str]) -> None:
    from fedbench.multirun.dry_run import print_dry_run

    if not plans:
        name = config.hydra.runtime.choices["hydra/sweeper"]
        raise UserError(f"--dry-run: hydra/sweeper={name} picks its runs only while others run")
    titles: dict[Path, str] = {}
    for plan, name in zip(plans, names, strict=True):
        titles.setdefault(plan.folder.path, name or plan.title)
    by_folder = {plan.folder.path: plan for plan in plans}
    print_dry_run(config, {title: by_folder[path] for path, title in titles.items()})


def _take_over(plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Copy the runs that have finished under another name, so that the sweep shows them as done."""
    from fedbench.results.reuse import take_over

    for plan, name in zip(plans, names, strict=True):
        if plan.finished() is None and (sources := [*plan.finished_elsewhere()]):
            with suppress(Timeout), plan.folder.locked(wait=False):  # else another command runs it
                for line in take_over(plan.folder, sources, plan.config, plan.origin):
                    print_text(console_for_output(), Text(f"{name or plan.title}  {line}"))
