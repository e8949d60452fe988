"""Hydra's basic sweeper, which also understands settings of one plugin alone.

    -m defense=krum,flame pmr=0.2,0.3 defense.flame.noise=0.001,0.01

is two runs of krum and four of flame: `defense.flame.noise` is `defense.noise` in the runs of flame
and absent from all others. A run gets plain settings, so its id is that of the same run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from fedbench.errors import PREFIX, UserError, nearest, one_line

CONFIG = "variants"  # its file in conf/hydra/sweeper
TARGET = "hydra_plugins.fedbench.VariantSweeper"  # there; Hydra allows this package only

Choices = Callable[[Sequence[str]], Mapping[str, str]]
"""Returns the name chosen from each group by the overrides of a run."""


class VariantSweeper(Sweeper):
    """Runs what `expand` returns. Otherwise as Hydra's basic sweeper."""

    def __init__(
        self,
        max_batch_size: int | None,
        params: Mapping[str, str] | None = None,
        values: Mapping[str, str] | None = None,
    ) -> None:
        """`values` are lists for `params`, which refers to them by interpolation."""
        self.max_batch_size = max_batch_size
        self.params = params or {}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        assert self.config is not None  # `setup` came before
        assert self.hydra_context is not None
        assert self.launcher is not None
        loader = self.hydra_context.config_loader
        runs = runs_of(parsed(self.params, arguments, loader), loader, self.config)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        n = self.max_batch_size or len(runs)
        done: list[Sequence[JobReturn]] = []
        for start in range(0, len(runs), n):
            batch = runs[start : start + n]
            self.validate_batch_is_legal(batch)
            results = self.launcher.launch(batch, initial_job_idx=start)
            for result in results:
                _ = result.return_value  # raises the exception of a run that failed
            done.append(results)
        return done


def parsed(
    params: Mapping[str, str] | None, arguments: Iterable[str], loader: ConfigLoader
) -> list[Override]:
    """Parse the overrides of a sweep: the params of its file, then the command line's."""
    overrides = [f"{key}={value}" for key, value in (params or {}).items()]
    return OverridesParser.create(loader).parse_overrides([*overrides, *arguments])


def runs_of(
    overrides: Iterable[Override], loader: ConfigLoader, config: DictConfig
) -> list[list[str]]:
    """Return the overrides of each run of the sweep that `config` describes."""

    def choices(run: Sequence[str]) -> Mapping[str, str]:
        chosen: Mapping[str, str] = composed(config, run, loader).hydra.runtime.choices
        return chosen

    groups = [group for group in config.hydra.runtime.choices if not group.startswith("hydra/")]
    options = {group: loader.get_group_options(group) for group in groups}
    return expand(overrides, options, choices)


def composed(config: DictConfig, run: Sequence[str], loader: ConfigLoader) -> DictConfig:
    """Compose a run of a sweep; an error says how to set what only some of its plugins have."""
    try:
        return loader.load_sweep_config(config, [*run])
    except HydraException as error:
        if (explained := _explained(error, run, loader)) is None:
            raise
        raise UserError(explained) from error


def expand(
    overrides: Iterable[Override],
    options: Mapping[str, Sequence[str]],
    choices: Choices,
) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in the order of Hydra's basic sweeper.

    `a=1,2 b=3,4` expands to [a=1 b=3], [a=1 b=4], [a=2 b=3], [a=2 b=4]. Of two overrides with the
    same key the last one counts. `options` are the names in each group: settings of one of them
    alone vary fastest.
    """
    shared: dict[str, list[str]] = {}
    own: dict[tuple[str, str], dict[str, list[str]]] = {}  # of a group and a name
    for override in overrides:
        key = override.get_key_element()
        if (found := owner_of(key, options)) is None:
            shared[key] = [f"{key}={value}" for value in _values(override)]
        else:
            group, name, plain = found
            settings = own.setdefault((group, name), {})
            settings[plain] = [f"{plain}={value}" for value in _values(override)]
    bases = [[*run] for run in product(*shared.values())]
    if not own:
        return bases
    chosen = [choices(base) for base in bases]
    for group, name in own:
        if all(names.get(group) != name for names in chosen):
            key = next(iter(own[group, name])).replace(group, f"{group}.{name}", 1)
            raise UserError(f"{key}: no run of the sweep has {group}={name}")
    runs = []
    for base, names in zip(bases, chosen, strict=True):
        variants = [own.get((group, str(name)), {}) for group, name in names.items()]
        values = [choice for settings in variants for choice in settings.values()]
        runs += [[*base, *variant] for variant in product(*values)]
    return runs


def _explained(error: HydraException, run: Sequence[str], loader: ConfigLoader) -> str | None:
    """Say how to set what the plugin of a run lacks; None for any other error."""
    cause = error.__cause__
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return None
    group, *settings = str(cause.full_key).split(".")
    if len(settings) != 1:
        return None
    if any(override.lstrip("+").startswith(f"{cause.full_key}.") for override in run):
        names = loader.get_group_options(group)
        return f"{cause.full_key}: no such {group}{nearest(settings[0], names)}"
    line = str(one_line(error)).removeprefix(PREFIX)
    return f"{line}; for one {group} alone: {group}.NAME.{settings[0]}=..."


def owner_of(key: str, options: Mapping[str, Sequence[str]]) -> tuple[str, str, str] | None:
    """Split `defense.flame.noise` into defense, flame and `defense.noise`; None for other keys."""
    bare = key.lstrip("+")
    group, name, setting = [*bare.split(".", 2), "", ""][:3]
    if not setting or name not in options.get(group, ()):
        return None
    return group, name, f"{key[: len(key) - len(bare)]}{group}.{setting}"


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: must be a list or a range of values")
    if values := [*override.sweep_string_iterator()]:
        return values
    raise UserError(f"{override.input_line}: matches nothing")
