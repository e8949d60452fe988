"""A run from configuration to summary: build, skip or resume, pretrain, go through the rounds."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedbench.attack import ATTACKS, Attack, Omniscient
from fedbench.backdoor import BACKDOORS, Backdoor, settings_of
from fedbench.config import RunConfig, share
from fedbench.console import Display
from fedbench.data import DATASETS, Dataset, DataSource, Spec
from fedbench.defense import DEFENSES, Defense
from fedbench.errors import UserError
from fedbench.executors import EXECUTORS, Executor, Workforce
from fedbench.holdings import write_picture
from fedbench.models import MODELS, Model
from fedbench.results import Checkpoint, Record, RunDir, load_checkpoint, save_checkpoint, summarise
from fedbench.rng import derive
from fedbench.storage import locked
from fedbench.tracking import TRACKERS, RunInfo, Session, Tracker

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from lightning.fabric import Fabric

    from fedbench.federation import Federation
    from fedbench.population import Population


@dataclass(frozen=True)
class Plan:
    """A configuration with its plugins built: everything but data and training."""

    config: RunConfig
    defense: Defense
    attack: Attack
    backdoors: tuple[Backdoor, ...]
    source: DataSource
    model: Model
    executor: Executor
    tracker: Tracker
    pretrained: str | None = None  # hash of the checkpoint to start from

    @classmethod
    def of(cls, config: RunConfig) -> Plan:
        """Builds what the configuration names; a UserError for anything that cannot work."""
        attack = ATTACKS.build(config.attack)
        if isinstance(attack, Omniscient):  # on record, also where the user's file leaves it out
            config.attack = {**config.attack, "omniscient": attack.omniscient}
        source = DATASETS.build(config.dataset)
        planted = attack.planted(source.backdoors)
        plan = cls(
            config=config,
            defense=DEFENSES.build(config.defense),
            attack=attack,
            backdoors=tuple(BACKDOORS.build(settings_of(backdoor)) for backdoor in planted),
            source=source,
            model=MODELS.build(config.model),
            executor=EXECUTORS.build(config.executor),
            tracker=TRACKERS.build(config.tracker),
            pretrained=None if config.pretrained is None else _file_digest(config.pretrained),
        )
        try:
            plan.defense.check(config.n_clients)
        except ValueError as error:
            raise UserError(f"defense {config.defense['name']}: {error}") from error
        if source.spec is not None:
            plan.check_fit(source.spec)
        if attack.active and config.pmr > 0 and config.attack_start >= config.rounds:
            raise UserError(
                f"attack_start={config.attack_start}: must be below rounds={config.rounds}"
            )
        key = "n_clients" if config.malicious == "fixed" else "pool_size"
        n = getattr(config, key)
        if attack.active and config.pmr > 0 and not share(config.pmr, n):
            raise UserError(
                f"pmr={config.pmr}: of {key.removesuffix('_size')}={n} that is no client"
            )
        return plan

    def check_fit(self, spec: Spec) -> None:
        """A UserError for a part that does not fit the data set, or not the others."""
        natural = self.config.partition == "natural"
        if natural and not spec.natural:
            raise UserError(f"partition=natural: the samples of {spec.name} have no owners")
        if spec.is_sequences and not natural:
            raise UserError(
                f"partition={self.config.partition}: goes by the label of a sample, "
                f"those of {spec.name} are sequences; take natural"
            )
        try:
            self.model.check(spec)
        except ValueError as error:
            raise UserError(f"model {self.config.model['name']}: {error}") from error
        for backdoor in self.backdoors:
            try:
                backdoor.check(spec)
            except ValueError as error:
                raise UserError(f"backdoor on {spec.name}: {error}") from error
        try:
            self.attack.check(self.backdoors, spec)
        except ValueError as error:
            raise UserError(f"attack {self.config.attack['name']}: {error}") from error

    @property
    def folder(self) -> RunDir:
        versions: dict[str, int | str] = {
            "defense": self.defense.version,
            "attack": self.attack.version,
            **{f"backdoor {i}": b.version for i, b in enumerate(self.backdoors)},
        }
        if self.pretrained is not None:
            versions["pretrained"] = self.pretrained
        return RunDir(Path(self.config.out, self.config.name, self.config.run_id(versions)))


def run(config: RunConfig) -> Record:
    """The summary of the run: a finished one is read, an interrupted one goes on where it was."""
    plan = Plan.of(config)
    if (finished := _finished(plan)) is not None:
        return finished
    try:
        outcome = plan.executor.fabric().launch(_on_rank, config)  # type: ignore[arg-type]
    except KeyboardInterrupt:
        _interrupt_children()
        raise
    if isinstance(outcome, UserError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _finished(plan: Plan) -> Record | None:
    """The summary of a run that is finished already, and a line that says so."""
    summary = plan.folder.finished()
    if summary is not None:
        Display(plan.config.title, plan.config.rounds).close(summary, skipped=True)
    return summary


def _interrupt_children() -> None:
    """A terminal interrupts all processes of a command, but `kill -INT` only the one named."""
    children = multiprocessing.active_children()
    for patience, number in ((2, signal.SIGINT), (10, signal.SIGTERM)):
        deadline = time.monotonic() + patience
        for child in children:
            child.join(max(deadline - time.monotonic(), 0))
        for child in children:
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, number)


def _on_rank(fabric: Fabric, config: RunConfig) -> Record | UserError | None:
    """The run as one process sees it; a UserError is returned, to reach the parent as it is."""
    from fedbench.federation import Federation

    if fabric.global_rank > 0:
        # Rank 0 must not take the end of another rank for a failure of the run: it goes first.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = Plan.of(config)
    torch.set_num_threads(plan.executor.threads)
    try:
        dataset = plan.source.load().to(fabric.device)
        plan.check_fit(dataset.spec)
        population = population_of(plan, dataset, fabric)
        workforce = Workforce(plan.executor, fabric, population)
        if fabric.global_rank > 0:
            workforce.serve()
            return None
        try:
            federation = Federation(population, workforce, plan.defense)
            with plan.folder.locked():
                # Another process may have finished it while this one waited for the lock.
                return _finished(plan) or _rounds(plan, federation)
        finally:
            workforce.dismiss()
    except UserError as error:
        return error


def population_of(plan: Plan, dataset: Dataset, fabric: Fabric) -> Population:
    """All clients, with a model as initialised."""
    from fedbench.population import Population

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
    with Display(config.title, config.rounds, first_round) as display:
        session: Session | None = None  # opened late: the first round should not wait for it

        def end(summary: Record) -> Record:
            folder.finish(summary)
            (session or plan.tracker.open(about, display.say)).finish(summary)
            display.close(summary)
            return summary

        if (warning := plan.defense.warning(config.n_clients)) is not None:
            display.say(f"{config.title}  warning: {warning}")
        try:
            state = pretrained(config, federation, display) if start is None else start
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


def pretrained(config: RunConfig, federation: Federation, display: Display) -> Checkpoint:
    """The model before round 0: a given one, or trained once for all that would train the same."""
    if config.pretrained is not None:
        return _given(config.pretrained, federation)
    state = federation.initial()
    if not config.pretrain_rounds:
        return state
    path = Path(config.out, ".pretrained", f"{config.pretrain_id()}.pt")
    with locked(path.with_suffix(".lock")):
        if path.exists():
            state = load_checkpoint(path)
        while state.next_round < 0:
            state = federation.pretrain(state)
            save_checkpoint(path, replace(state, defense_state=None))  # other defenses read it too
            display.pretrain(config.pretrain_rounds + state.next_round, config.pretrain_rounds)
    return replace(state, defense_state=federation.defense.init())


def _given(path: str, federation: Federation) -> Checkpoint:
    """The model of a checkpoint as that before round 0."""
    try:
        given = load_checkpoint(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"pretrained={path}: no checkpoint of fedbench's") from error
    fresh = federation.initial()
    for what, have, want in (
        ("parameters", given.params, fresh.params),
        ("numbers in buffers", given.buffers, fresh.buffers),
    ):
        if have.shape != want.shape:
            raise UserError(
                f"pretrained={path}: a model of {have.numel():,} {what}, "
                f"this run's has {want.numel():,}"
            )
    return replace(
        fresh,
        next_round=0,
        params=given.params,
        buffers=given.buffers,
        initial_params=given.params,
        initial_buffers=given.buffers,
    )


def _file_digest(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"pretrained={path}: cannot be read ({error.strerror}), expected a checkpoint: "
            "checkpoint.pt of a run, or a file of <out>/.pretrained"
        ) from error
