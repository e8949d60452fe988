"""A run from configuration to summary: build, skip or resume, pretrain, go through the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from fedbench import pretraining
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.errors import UserError
from fedbench.plan import Plan
from fedbench.report.console import Display
from fedbench.report.partition_figure import write_picture
from fedbench.report.tracking import RunInfo, Session
from fedbench.results.run_dir import Record
from fedbench.results.summary import summarise
from fedbench.rng import derive
from fedbench.sweep import resources

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from lightning.fabric import Fabric

    from fedbench.engine.population import Population
    from fedbench.federation import Federation

T = TypeVar("T")

LONG = 200_000  # labels to learn from, from which on a run is worth starting processes


def run(config: RunConfig) -> Record:
    """The summary of the run: a finished one is read, an interrupted one goes on where it was."""
    plan = Plan.of(config)
    if (finished := _finished(plan)) is not None:
        return finished
    dataset = plan.source.load()
    plan.check_fit(dataset.spec)
    from fedbench.engine.launch import WorkerError, end_with_parent, launch

    if resources.in_sweep():
        end_with_parent()
    devices = _devices(plan, dataset, _n_last(plan) or resources.side_by_side())
    try:
        with resources.place_in_sweep():
            _pretrain_on_more(plan, dataset)
            outcome = launch(plan.executor, devices, _on_rank, plan, dataset)
    except WorkerError as error:  # of a process that could not say so itself
        if plan.folder.path.exists():
            plan.folder.fail(error)
        raise
    if isinstance(outcome, UserError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _devices(plan: Plan, dataset: Dataset, n_runs: int) -> int:
    """How many processes or GPUs a run is spread over, if so many go on side by side."""
    executor, config = plan.executor, plan.config
    if executor.devices is not None:
        return executor.devices
    n_rounds = config.rounds + config.pretrain_rounds
    usual = (config.fewest_clients + config.most_clients) / 2
    n_labels = dataset.y_train.numel() * usual / config.pool_size
    if n_labels * config.local_epochs * n_rounds < LONG:
        return 1
    return min(resources.share(executor.accelerator, executor.threads, n_runs), config.most_clients)


def _n_last(plan: Plan) -> int:
    """How many the last runs of a sweep are, if this is one of them and may grow as others end."""
    executor = plan.executor
    undecided = executor.accelerator == "cpu" and executor.devices is None
    return resources.n_last(plan.folder.path.name) if undecided else 0


def _pretrain_on_more(plan: Plan, dataset: Dataset) -> None:
    """Pretrains on what other runs of a sweep leave free while they wait for it."""
    from fedbench.engine.launch import launch

    config = plan.config
    devices = _devices(plan, dataset, resources.side_by_side(resources.PRETRAINING))
    usual = _devices(plan, dataset, resources.side_by_side())
    if devices <= usual or plan.folder.checkpoint_file.exists():
        return
    if pretraining.is_due(config):
        with pretraining.alone(config):
            if pretraining.is_due(config):  # still, after the wait
                outcome = launch(plan.executor, devices, _pretrain_on_rank, plan, dataset)
                if isinstance(outcome, UserError):
                    raise outcome


def _on_rank(fabric: Fabric, plan: Plan, dataset: Dataset) -> Record | UserError | None:
    """The run as one process sees it; a UserError is returned, to reach the parent as it is."""

    def rounds(federation: Federation) -> Record:
        with plan.folder.locked():
            # Another process may have finished it while this one waited for the lock.
            return _finished(plan) or _rounds(plan, federation)

    return _serve_or(rounds, fabric, plan, dataset)


def _pretrain_on_rank(fabric: Fabric, plan: Plan, dataset: Dataset) -> UserError | None:
    def pretrain(federation: Federation) -> None:
        display = _display(plan)  # of lines only: the run's own follows
        display.say(f"{plan.config.title}  pretraining: {federation.workforce}")
        pretraining.train(plan.config, federation, display)

    return _serve_or(pretrain, fabric, plan, dataset)


def _serve_or(
    lead: Callable[[Federation], T], fabric: Fabric, plan: Plan, dataset: Dataset
) -> T | UserError | None:
    """What rank 0 makes of a federation; the other ranks do their share of the work."""
    from fedbench.engine.ranks import RankGroup
    from fedbench.federation import Federation

    try:
        population = population_of(plan, dataset.to(fabric.device), fabric)
        workforce = RankGroup(plan.executor, fabric, population)
        if _n_last(plan):
            workforce.room = partial(resources.room, "cpu", plan.executor.threads)
        if fabric.global_rank > 0:
            workforce.serve()
            return None
        try:
            return lead(Federation(population, workforce, plan.defense))
        finally:
            workforce.dismiss()
    except UserError as error:
        return error


def _finished(plan: Plan) -> Record | None:
    """The summary of a run that is finished already, and a line that says so."""
    summary = plan.folder.finished()
    if summary is not None:
        _display(plan).close(summary, skipped=True)
    return summary


def _display(plan: Plan, first_round: int = 0) -> Display:
    config = plan.config
    # Runs side by side would draw over each other's live line.
    live = resources.side_by_side() == 1
    return Display(config.title, config.rounds, first_round, live=live)


def population_of(plan: Plan, dataset: Dataset, fabric: Fabric) -> Population:
    """All clients, with a model as initialised."""
    from fedbench.engine.population import Population

    torch.manual_seed(derive(plan.config.seed, "init"))
    network = plan.model.build(dataset.input_shape, dataset.n_classes)
    return Population(plan.config, dataset, network, plan.attack, fabric)


def _rounds(plan: Plan, federation: Federation) -> Record:
    """All rounds that are left; each is recorded, tracked and checkpointed, in this order."""
    config, folder = plan.config, plan.folder
    folder.start(config)
    write_picture(federation.population, folder.path)
    start = folder.resume()
    first_round = 0 if start is None else start.next_round
    about = RunInfo(
        id=folder.path.name,
        name=config.title,
        group=config.name,
        tags=tuple(str(group["name"]) for group in (config.defense, config.attack, config.dataset)),
        config=asdict(config),
        directory=folder.path,
        first_round=first_round,
        earlier=tuple(folder.rounds()),
    )
    with _display(plan, first_round) as display:
        session: Session | None = None  # opened late: the first round should not wait for it

        def end(summary: Record) -> Record:
            folder.finish(summary)
            (session or plan.tracker.open(about, display.say)).finish(summary)
            display.close(summary)
            return summary

        display.say(f"{config.title}  {federation.workforce}")
        if (warning := plan.warning()) is not None:
            display.say(f"{config.title}  warning: {warning}")
        try:
            state = start or pretraining.pretrained(config, federation, display)
            federation.prepare(plan.backdoors, state)
            while state.next_round < config.rounds:
                state, record = federation.round(state)
                folder.record(record)
                session = session or plan.tracker.open(about, display.say)
                session.round(record)
                folder.checkpoint(state)
                display.round(record)
        except Exception as error:
            end({"status": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        return end(summarise(folder.rounds()))
