"""One run from configuration to summary: skip or resume, pretrain, run the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from fedbench import pretraining
from fedbench.collector import fast_imports
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.display import run_events
from fedbench.display.console import Display
from fedbench.display.run_display import RunDisplay, SweepDisplay
from fedbench.errors import UserError
from fedbench.multirun import resources
from fedbench.plan import Plan
from fedbench.report.partition_figure import PARTITION_FILE, write_partition_figure
from fedbench.results.atomic_files import WriteError
from fedbench.results.checkpoint import Checkpoint
from fedbench.results.continuation import continue_shorter
from fedbench.results.origin import Origin
from fedbench.results.provenance import has_changed_since, provenance
from fedbench.results.reuse import take_over
from fedbench.results.run_dir import Record
from fedbench.results.summary import summarise
from fedbench.rng import derive, seeded
from fedbench.tracking.trackers import RunInfo, Session

if TYPE_CHECKING:  # Lightning takes seconds to import; user errors must print before that
    from lightning.fabric import Fabric

    from fedbench.engine.rank_context import RankContext
    from fedbench.federation import Federation

T = TypeVar("T")

LONG = 200_000  # trained labels from which a run is worth starting several processes


def run(config: RunConfig, origin: Origin | None = None) -> Record:
    """Run, resume or skip a configuration; return its summary."""
    plan = replace(Plan.of(config), origin=origin)
    if (finished := _finished(plan) or _taken_over(plan)) is not None:
        return finished
    resources.check_accelerator(plan.executor.accelerator)
    if not resources.in_sweep():  # otherwise the sweep has announced it
        resources.announce_limit(plan.executor, plan.config.most_clients)
    dataset = plan.source.load()
    plan = plan.fitted(dataset.spec)
    with fast_imports():
        from fedbench.engine.launch import launch
        from fedbench.engine.memory_needs import check_fits
        from fedbench.engine.processes import WorkerError

    if plan.executor.accelerator == "cpu":
        check_fits(config, plan.model, dataset.input_shape, dataset.n_classes)

    devices = _devices(plan, dataset, _last_batch_size(plan) or resources.n_parallel())
    _start_over_or_continue(plan)
    try:
        with resources.sweep_slot():
            _pretrain_on_more(plan, dataset)
            outcome = launch(plan.executor, devices, _on_rank, plan, dataset)
    except WorkerError as error:  # the process died before it could record its failure
        if plan.folder.path.exists():
            plan.folder.fail(error)
        raise
    if isinstance(outcome, UserError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _devices(plan: Plan, dataset: Dataset, n_runs: int) -> int:
    """Number of processes or GPUs for this run when `n_runs` run at the same time."""
    executor, config = plan.executor, plan.config
    if executor.devices is not None:
        return resources.usable_devices(executor, config.most_clients)
    n_rounds = config.rounds + config.pretrain_rounds
    n_clients = (config.fewest_clients + config.most_clients) / 2
    n_labels = dataset.y_train.numel() * n_clients / config.pool_size
    if n_labels * config.local_epochs * n_rounds < LONG:
        return 1
    return min(
        resources.units_per_run(executor.accelerator, executor.threads, n_runs), config.most_clients
    )


def _last_batch_size(plan: Plan) -> int:
    """Number of runs in the sweep's last, partial batch if this run is one of them, else 0.

    These runs start more processes than they may use at first, and use them as other runs end.
    """
    executor = plan.executor
    undecided = executor.accelerator == "cpu" and executor.devices is None
    return resources.last_batch_size(plan.folder.path.name) if undecided else 0


def _pretrain_on_more(plan: Plan, dataset: Dataset) -> None:
    """Pretrain on the devices of the other runs of a sweep, which wait for the result."""
    from fedbench.engine.launch import launch

    devices = _devices(plan, dataset, resources.n_pretraining())
    usual = _devices(plan, dataset, resources.n_parallel())
    if devices <= usual or plan.folder.checkpoint_file.exists():
        return
    if pretraining.is_due(plan):
        with pretraining.exclusive(plan):
            if pretraining.is_due(plan):  # another run may have done it meanwhile
                outcome = launch(plan.executor, devices, _pretrain_on_rank, plan, dataset)
                if isinstance(outcome, UserError):
                    raise outcome


def _on_rank(fabric: Fabric, plan: Plan, dataset: Dataset) -> Record | UserError | None:
    """Main function of a rank. Returns UserErrors, which would lose their type if raised."""

    def rounds(federation: Federation) -> Record:
        with plan.folder.locked():
            # Another process may have finished the run while this one waited for the lock.
            return _finished(plan) or _rounds(plan, federation)

    return _lead_or_serve(rounds, fabric, plan, dataset)


def _pretrain_on_rank(fabric: Fabric, plan: Plan, dataset: Dataset) -> UserError | None:
    def pretrain(federation: Federation) -> None:
        display = _display(plan)  # prints lines only; the run itself opens its own
        display.describe(f"pretraining: {federation.ranks}")
        pretraining.train(plan, federation, display)

    return _lead_or_serve(pretrain, fabric, plan, dataset)


def _lead_or_serve(
    lead: Callable[[Federation], T], fabric: Fabric, plan: Plan, dataset: Dataset
) -> T | UserError | None:
    """Rank 0 leads the federation; the other ranks serve until it stops them."""
    from fedbench.engine.ranks import RankGroup
    from fedbench.federation import Federation

    try:
        ranks = RankGroup(
            plan.executor, build_rank_context(plan, dataset.to(fabric.device), fabric)
        )
        if _last_batch_size(plan):
            ranks.available = partial(resources.units_available, "cpu", plan.executor.threads)
        if fabric.global_rank > 0:
            ranks.serve()
            return None
        try:
            return lead(Federation(ranks, plan.defense))
        finally:
            ranks.stop()
    except UserError as error:
        return error


def _finished(plan: Plan) -> Record | None:
    """Return the summary of a finished run, and print that it is skipped."""
    summary = plan.finished()
    if summary is not None:
        display = _display(plan)
        for line in plan.folder.start(plan.config, plan.origin):
            display.say(f"{plan.title}  {line}")
        if has_changed_since(summary) and not run_events.in_panel():  # a sweep says it once
            display.say(f"{plan.title}  fedbench has changed since; rerun=true runs it again")
        display.close(summary, skipped=True)
    return summary


def _taken_over(plan: Plan) -> Record | None:
    """Copy the run if it has finished under another name; return its summary."""
    if sources := [*plan.finished_elsewhere()]:
        with plan.folder.locked():
            for line in take_over(plan.folder, sources, plan.config, plan.origin):
                _display(plan).say(f"{plan.title}  {line}")
        return _finished(plan)
    return None


def _start_over_or_continue(plan: Plan) -> None:
    """Delete the earlier attempt with `rerun`; otherwise continue a run with fewer rounds."""
    folder, config = plan.folder, plan.config
    if plan.starts_over(*folder.files):
        with folder.locked():
            folder.clear()
    elif not config.rerun and (shorter := [*plan.shorter()]):
        with folder.locked():
            for line in continue_shorter(folder, shorter, config):
                _display(plan).say(f"{plan.title}  {line}")


def _display(plan: Plan, first_round: int = 0) -> RunDisplay:
    config = plan.config
    if run_events.in_panel():
        return SweepDisplay(plan.folder.path.name, first_round)
    # Parallel runs would overwrite each other's live line.
    live = resources.n_parallel() == 1
    return Display(plan.title, config.rounds, first_round, live=live)


def build_rank_context(plan: Plan, dataset: Dataset, fabric: Fabric) -> RankContext:
    """All clients, with a freshly initialized network."""
    from fedbench.engine.rank_context import RankContext

    def build() -> nn.Module:
        with seeded(derive(plan.config.seed, "init")):
            return plan.model.build(dataset.input_shape, dataset.n_classes)

    return RankContext(plan.config, dataset, build(), plan.attack, fabric, rebuild=build)


def _begin(plan: Plan, federation: Federation) -> Checkpoint | None:
    """Write what a run leaves before its first round; load its checkpoint, if it has one."""
    context = federation.rank_context
    for line in plan.folder.start(plan.config, plan.origin):
        _display(plan).say(f"{plan.title}  {line}")
    figure = plan.folder.path / PARTITION_FILE
    shards, attackers = context.data.shards, context.attackers
    write_partition_figure(figure, plan.config, context.dataset, shards, attackers)
    return plan.folder.resume(federation.device)


def _rounds(plan: Plan, federation: Federation) -> Record:
    """Run the remaining rounds; record, track and checkpoint each, in this order."""
    config, folder, start = plan.config, plan.folder, _begin(plan, federation)
    first_round = 0 if start is None else start.next_round
    about = RunInfo.of(
        config, plan.title, folder.path, folder.rounds(), resources.belongs_to_sweep()
    )
    with _display(plan, first_round) as display:
        session: Session | None = None  # opened late, so that the first round does not wait for it
        open_session = partial(plan.tracker.open, about, resources.once_per_sweep(display.say))

        def end(summary: Record) -> Record:
            summary |= {"adaptive_to": [*plan.attack.adaptive_to]}  # for the report
            summary |= provenance(federation.ranks.fabric.world_size, plan.executor.threads)
            folder.finish(summary)
            (session or open_session()).finish(summary)
            display.close(summary)
            return summary

        _describe(plan, federation, display)
        try:
            state = start or pretraining.pretrained(plan, federation, display)
            federation.prepare(plan.backdoors, state)
            while state.next_round < config.rounds:
                state, record = federation.round(state)
                folder.record(record)
                session = session or open_session()
                session.round(record)
                folder.checkpoint(state)
                display.round(record)
        except WriteError as error:  # nor could anything else be written
            raise WriteError(f"{error}; the run resumes") from error
        except Exception as error:
            folder.keep_traceback(error)
            end({"status": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        except KeyboardInterrupt:
            (session or Session()).interrupt()
            raise
        return end(summarise(folder.rounds()))


def _describe(plan: Plan, federation: Federation, display: RunDisplay) -> None:
    display.describe(str(federation.ranks))
    federation.ranks.on_trained = display.trained
    if (warning := plan.warning()) is not None:
        display.say(f"{plan.title}  warning: {warning}")
