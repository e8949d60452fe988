"""The default settings of a run: what its choice of defense, attack, data set, ... brings along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from fedbench.composition import hydra_initialized, overrides_of
from fedbench.config import RunConfig, register_schema
from fedbench.results.origin import Origin
from fedbench.results.settings import Value, flat, is_named

CHOSEN = ("defense", "attack", "dataset", "scenario", "size", "executor")
FOLLOWING = ("model", "sized", "tuned", "tuned_attack")  # chosen by those, unless the user does

GROUPS = (*CHOSEN, *FOLLOWING)

Choices = Mapping[str, str | None]


def origin_of(config: RunConfig, job: HydraConf) -> Origin:
    """Compare a run with its default settings; `job` is Hydra's own part of the configuration."""
    choices = {
        str(group): None if choice is None else str(choice)
        for group, choice in job.runtime.choices.items()
        if not str(group).startswith("hydra/")
    }
    # The folders of `--config-dir` and `hydra.searchpath` may have choices of their own.
    folders = [
        f"{source.schema}://{source.path}"
        for source in job.runtime.config_sources
        if source.provider == "command-line" or "hydra.searchpath" in source.provider
    ]
    settings = flat(asdict(config))
    defaults = _defaults(choices, folders)
    changed = None if defaults is None else defaults.changed(settings)
    named = job.overrides.task if job.mode == RunMode.MULTIRUN or changed is None else []
    return Origin(choices, changed, _given(settings, choices, named))


def guessed_origin(config: Mapping[str, Value]) -> Origin:
    """Reconstruct the origin of a run without origin.json; `config` is flat."""
    named = [group for group in GROUPS if isinstance(config.get(group), str)]
    defaults = _defaults({group: str(config[group]) for group in named})
    if defaults is None:
        return Origin()
    # A setting without a default may be of an older version. config.yaml names the accelerator that
    # `auto` stood for.
    known = {*defaults.settings} - {"executor.accelerator"}
    return Origin(changed=defaults.changed({k: v for k, v in config.items() if k in known}))


@dataclass(frozen=True)
class Defaults:
    """What a run with certain choices and no other overrides would be."""

    choices: Choices  # only those that are not the default ones
    settings: Mapping[str, Value]  # flat; `???` for what the user has to set

    def changed(self, settings: Mapping[str, Value]) -> dict[str, Value]:
        """Return the choices and settings that differ from the default, of those that are named."""
        missing = object()
        defaults = {**self.settings, **_auto(self.settings, settings)}
        differing = {
            key: value
            for key, value in settings.items()
            if key not in GROUPS and is_named(key) and defaults.get(key, missing) != value
        }
        return {**self.choices, **differing}


def _auto(defaults: Mapping[str, Value], settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return what `clip_grad=auto` stands for in a run with these settings."""
    if defaults.get("clip_grad") != "auto":
        return {}
    keys = ["partition", "non_iid", "n_clients", "pool"]
    keys += ["pretrained", "pretrain_rounds", "pretrain_non_iid"]
    known = {key: settings[key] for key in keys if key in settings}
    known["n_clients"] = yaml.safe_load(str(known.get("n_clients", 30)))  # a range is JSON
    return {"clip_grad": RunConfig(**known).clip_grad}  # type: ignore[arg-type]


def _defaults(choices: Choices, folders: Sequence[str] = ()) -> Defaults | None:
    """Return the defaults for these choices; None if they cannot be composed."""
    chosen = overrides_of({"hydra.searchpath": folders}) if folders else []
    chosen += [_override(group, choices) for group in CHOSEN if group in choices]
    if (composed := _composed(*chosen)) is None:
        return None
    usual = {**_usual_choices(), **{group: composed.choices.get(group) for group in FOLLOWING}}
    others = {g: choices[g] for g in GROUPS if g in choices and choices[g] != usual[g]}
    following = [_override(group, choices) for group in FOLLOWING if group in others]
    return (whole := _composed(*chosen, *following)) and replace(whole, choices=others)


def _override(group: str, choices: Choices) -> str:
    return f"{group}={'null' if choices[group] is None else choices[group]}"


@cache
def _composed(*overrides: str) -> Defaults | None:
    """Return a run with these overrides and all its choices; its settings are not checked."""
    register_schema()
    try:
        with hydra_initialized():
            composed = hydra.compose("config", [*overrides], return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        settings = OmegaConf.to_container(composed, resolve=True)
    except Exception:  # including any that a plugin raises when it is imported for its defaults
        return None
    assert isinstance(settings, dict)
    return Defaults(choices, flat(settings))


@cache
def _usual_choices() -> dict[str, str]:
    """Return the choices of conf/config.yaml."""
    text = files("fedbench.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    entries = [entry for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict)]
    return {group: choice for entry in entries for group, choice in entry.items()}


def _given(
    settings: Mapping[str, Value], choices: Choices, overrides: Sequence[str]
) -> tuple[str, ...]:
    """Return the settings that overrides name: `attack`, `lr`, `model.arguments.width`."""
    named = [override.partition("=")[0].lstrip("+~") for override in overrides]
    inside = tuple(f"{key}." for key in named if key not in choices)
    keys = dict.fromkeys([*choices, *settings])
    return tuple(key for key in keys if is_named(key) and (key in named or key.startswith(inside)))
