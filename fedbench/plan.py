"""Plan: a configuration with its plugins, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbench.attack import ATTACKS, Attack, Omniscient
from fedbench.backdoor import ADVICE, BACKDOORS, BY_KIND, Backdoor, settings_of
from fedbench.config import RunConfig, rounded_count
from fedbench.data import DATASETS, DataSource, Spec
from fedbench.datasets.partition import PARTITIONS
from fedbench.defense import DEFENSES, Defense
from fedbench.digests import file_digest, plugin_digest
from fedbench.engine.executors import EXECUTORS, Executor
from fedbench.errors import UserError
from fedbench.models import MODELS, Model
from fedbench.results.origin import Origin, title
from fedbench.results.provenance import started_at
from fedbench.results.run_dir import Record, RunDir
from fedbench.results.settings import flat
from fedbench.run_ids import pretrain_id, run_id
from fedbench.tracking.trackers import TRACKERS, Tracker


@dataclass(frozen=True)
class Plan:
    """Everything about a run except data and training."""

    config: RunConfig
    defense: Defense
    attack: Attack
    backdoor_settings: tuple[Any, ...]  # names, or mappings with settings
    backdoors: tuple[Backdoor, ...]
    source: DataSource
    model: Model
    executor: Executor
    tracker: Tracker
    pretrained: Path | None = None  # the checkpoint to start from
    origin: Origin | None = None  # how the user came to these settings; None: not known

    @classmethod
    def of(cls, config: RunConfig) -> Plan:
        """Build the plugins of a configuration; UserError for anything that cannot work."""
        attack = ATTACKS.build(config.attack)
        if isinstance(attack, Omniscient):  # recorded even if the user's file leaves it out
            config = replace(config, attack={**config.attack, "omniscient": attack.omniscient})
        executor = EXECUTORS.build(config.executor)
        # Results on a GPU differ in the last bits: `auto` must not share the run id of both.
        recorded = {**config.executor, "accelerator": executor.accelerator}
        config = replace(config, executor=recorded)
        source = DATASETS.build(config.dataset)
        backdoors = attack.backdoor_settings(source.backdoors or [])
        plan = cls(
            config=config,
            defense=DEFENSES.build(config.defense),
            attack=attack,
            backdoor_settings=tuple(backdoors),
            backdoors=_built(backdoors),
            source=source,
            model=MODELS.build(config.model),
            executor=executor,
            tracker=TRACKERS.build(config.tracker),
            pretrained=None if config.pretrained is None else _checkpoint_of(config.pretrained),
        )
        try:
            for n in config.client_counts:
                plan.defense.check(n)
        except ValueError as error:
            raise UserError(f"defense {config.defense['name']}: {error}") from error
        if source.spec is not None:
            plan = plan.fitted(source.spec)
        if attack.active and config.pmr > 0:
            plan._check_attackers()
        return plan

    def _check_attackers(self) -> None:
        """Raise a UserError if no client or no round is left to attack."""
        config = self.config
        if config.attack_start >= config.rounds:
            raise UserError(
                f"attack_start={config.attack_start}: must be below rounds={config.rounds}"
            )
        n, whole = config.fewest_clients, f"n_clients={config.n_clients}"
        if config.malicious == "sampled":
            n, whole = config.pool_size, f"pool={config.pool_size}"
        elif len(config.client_counts) > 1:
            whole = f"{n}, the fewest of {whole}"
        if not rounded_count(config.pmr, n):
            raise UserError(f"pmr={config.pmr}: rounds to no malicious client of {whole}")

    def warning(self) -> str | None:
        """The defense's warning about the smallest round it does not guarantee anything for."""
        warnings = map(self.defense.warning, self.config.client_counts)
        return next((line for line in warnings if line is not None), None)

    def fitted(self, spec: Spec) -> Plan:
        """Return the plan with backdoors for these samples, if none was named.

        Raise a UserError if a plugin does not fit the data set or the other plugins.
        """
        plan = self
        if self.source.backdoors is None:
            fitting = [{"name": BY_KIND[spec.kind]}] if spec.kind in BY_KIND else []
            backdoors = self.attack.backdoor_settings(fitting)
            plan = replace(self, backdoor_settings=tuple(backdoors), backdoors=_built(backdoors))
        plan._check_fit(spec)
        return plan

    def _check_fit(self, spec: Spec) -> None:
        natural = self.config.partition == "natural"
        if natural and not spec.natural:
            raise UserError(f"partition=natural: the samples of {spec.name} have no owners")
        if PARTITIONS[self.config.partition].by_label and not spec.kind.has_one_label:
            raise UserError(
                f"partition={self.config.partition}: splits samples by label, but {spec.name} has "
                f"{spec.kind}; use partition={'natural' if spec.natural else 'iid'}"
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
            advice = "" if self.backdoors else f"; {ADVICE[spec.kind]}"
            raise UserError(f"attack {self.config.attack['name']}: {error}{advice}") from error

    @property
    def title(self) -> str:
        """A readable name: `krum constrain_and_scale pmr=0.2 seed=0`."""
        return title(flat(asdict(self.config)), self.origin)

    @cached_property
    def folder(self) -> RunDir:
        return RunDir(self._path(self.config))

    def finished(self) -> Record | None:
        """The summary of the run if it has finished, and not before a command with `rerun`."""
        return None if self.starts_over(*self.folder.files) else self.folder.finished()

    def starts_over(self, *paths: Path) -> bool:
        """Whether an earlier command wrote one of the files and this one, with `rerun`, does not
        use it.
        """
        found = (path for path in paths if self.config.rerun and path.exists())
        return any(path.stat().st_mtime < started_at() for path in found)

    def shorter(self) -> Iterator[RunDir]:
        """Directories of the same run with fewer rounds, the longest first."""
        parent = self.folder.path.parent
        names = {path.name for path in parent.iterdir()} if parent.is_dir() else set()
        for rounds in range(self.config.rounds - 1, 0, -1) if names else ():
            path = self._path(replace(self.config, rounds=rounds))
            if path.name in names:
                yield RunDir(path)

    def finished_elsewhere(self) -> Iterator[RunDir]:
        """Directories under other names in `out` where the same run has finished."""
        out = Path(self.config.out)
        if self.config.rerun or not out.is_dir():
            return
        for other in sorted(out.iterdir()):
            run = RunDir(other / self.folder.id)
            if other.name != self.config.name and run.finished() is not None:
                yield run

    def _path(self, config: RunConfig) -> Path:
        return Path(config.out, config.name, run_id(config, self._versions))

    @cached_property
    def _versions(self) -> dict[str, int | str]:
        """Versions and digests of everything but settings that affects the results."""
        versions: dict[str, int | str] = {
            "defense": self.defense.version,
            "attack": self.attack.version,
            "defense code": plugin_digest(self.defense),
            "attack code": plugin_digest(self.attack),
            **self._versions_before_round_0,
        }
        for i, backdoor in enumerate(self._possible_backdoors()):
            versions[f"backdoor {i}"] = backdoor.version
            versions[f"backdoor {i} code"] = plugin_digest(backdoor)
        if self.pretrained is not None:
            versions["pretrained"] = file_digest(self.pretrained)
        return versions

    @cached_property
    def _versions_before_round_0(self) -> dict[str, str]:
        source = replace(self.source, backdoors=[])  # their files have no effect on the samples
        return {"model code": plugin_digest(self.model), "dataset code": plugin_digest(source)}

    @cached_property
    def pretrain_id(self) -> str:
        """Short hash of everything that affects the benign rounds before round 0."""
        return pretrain_id(self.config, self._versions_before_round_0)

    def _possible_backdoors(self) -> Sequence[Backdoor]:
        """The backdoors; all candidates if the samples decide, after loading."""
        if self.source.backdoors is not None:
            return self.backdoors
        fitting = [{"name": name} for name in BY_KIND.values()]
        return _built([*self.attack.backdoor_settings([]), *fitting])


def _built(backdoors: Sequence[Any]) -> tuple[Backdoor, ...]:
    return tuple(BACKDOORS.build(settings_of(backdoor)) for backdoor in backdoors)


def _checkpoint_of(path: str) -> Path:
    """Return the checkpoint that `pretrained` names: a file, or a folder with one finished run."""
    file = Path(path).expanduser()
    try:
        if file.is_dir():
            file = _only_run(path, file).checkpoint_file
        file_digest(file)
    except OSError as error:
        raise UserError(
            f"pretrained={path}: cannot be read ({error.strerror}); expected a "
            "checkpoint, such as checkpoint.pt of a run or a file in <out>/.pretrained, "
            "or a folder with one run"
        ) from error
    return file


def _only_run(path: str, folder: Path) -> RunDir:
    runs = map(RunDir, [folder, *sorted(folder.iterdir())])
    finished = [run for run in runs if run.checkpoint_file.exists() and run.finished() is not None]
    if len(finished) != 1:
        raise UserError(
            f"pretrained={path}: must hold one finished run, holds {len(finished)}; "
            "or name the checkpoint.pt of a run"
        )
    return finished[0]
