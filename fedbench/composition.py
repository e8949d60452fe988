"""Compose a configuration from Python, as the command line does.

Settings are Hydra overrides (`"pmr=0.3"`) or keyword arguments (`pmr=0.3`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedbench.config import RunConfig, register_schema
from fedbench.errors import UserError
from fedbench.plugin_configs import config_groups

# Strings that need no quotes in an override, so that errors quote the user's own words
WORD = re.compile(r"(?!(null|true|false|inf|nan)$)[a-z_]\w*", re.IGNORECASE | re.ASCII)


def compose(overrides: Sequence[str]) -> RunConfig:
    """Compose and check the configuration of one run."""
    return compose_with_choices(overrides)[0]


def compose_with_choices(overrides: Sequence[str]) -> tuple[RunConfig, dict[str, str]]:
    """Return the checked configuration of one run, and the name chosen from each group."""
    register_schema()
    try:
        for override in OverridesParser.create().parse_overrides([*overrides]):
            check_choice(override)
        with hydra_initialized():
            composed = hydra.compose("config", overrides=[*overrides], return_hydra_config=True)
    except ValueError as error:  # Hydra raises it for a few user errors, e.g. `defense=null`
        raise UserError(f"{error}, in {' '.join(overrides)}") from error
    choices = {str(key): str(name) for key, name in composed.hydra.runtime.choices.items()}
    with open_dict(composed):
        del composed["hydra"]
    return RunConfig.from_hydra(composed), choices


def check_choice(override: Override) -> None:
    """Raise a UserError if an override gives a group anything but a plugin's name or settings."""
    line, key = override.input_line, override.key_or_group
    is_hydras = key.startswith("hydra/")
    if override.is_sweep_override() or not (is_hydras or key in config_groups()):
        return
    if override.is_delete():
        if key in RunConfig.__dataclass_fields__:
            raise UserError(f"{line}: a run needs a choice of {key}; write {key}=NAME")
        return
    value = override.value()
    if isinstance(value, str):
        value = _resolved(value)
    if isinstance(value, list):
        names = ",".join(map(str, value))
        raise UserError(f"{line}: must be one name; a sweep is -m {key}={names}")
    if not isinstance(value, str if is_hydras else str | dict) or not value:
        raise UserError(f"{line}: must be a name; fedbench --help lists those of {key}")


def _resolved(value: str) -> Any:
    """Resolve a reference such as `${oc.env:MODEL}`; leave to Hydra what has no value yet."""
    with suppress(OmegaConfBaseException):
        return OmegaConf.create({"value": value}).value
    return value


def is_sweep_file(name: str, folder: str | None) -> bool:
    """Whether a config, found in `folder` or in fedbench's own, starts a sweep.

    Also true if it cannot be composed: the command itself reports the error.
    """
    register_schema()
    with suppress(Exception), hydra_initialized(folder):
        found = overrides_of({"hydra.searchpath": ["pkg://fedbench.conf"] if folder else []})
        composed = hydra.compose(name, overrides=found, return_hydra_config=True)
        return bool(composed.hydra.mode == RunMode.MULTIRUN)
    return True


@contextmanager
def hydra_initialized(folder: str | None = None) -> Iterator[None]:
    """Initialize Hydra with fedbench's configs, or with those of a folder.

    Restores the Hydra application that calls it, if any.
    """
    caller = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with (
            hydra.initialize_config_module("fedbench.conf", version_base="1.3")
            if folder is None
            else hydra.initialize_config_dir(str(Path(folder).absolute()), version_base="1.3")
        ):
            yield
    finally:
        GlobalHydra.instance().hydra = caller


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as overrides of one run: {"pmr": 0.3} becomes ["pmr=0.3"]."""
    return [f"{key}={_element(key, value)}" for key, value in settings.items()]


def sweep_overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as overrides of a sweep: {"pmr": [0.2, 0.3]} becomes ["pmr=0.2,0.3"].

    A list, a range or an array holds the values to try; a tuple is one value.
    """
    overrides = []
    for key, value in settings.items():
        value = value.tolist() if hasattr(value, "tolist") else value
        choices = list(value) if isinstance(value, list | range) else [value]
        if not choices:
            raise UserError(f"{key}=[]: must have at least one value to try")
        overrides.append(f"{key}=" + ",".join(_element(key, choice) for choice in choices))
    return overrides


def _element(key: str, value: Any) -> str:
    """Write a value in Hydra's override grammar."""
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | PathLike):
        text = str(fspath(value))
        quoted = QuotedString(text=text, quote=Quote.single).with_quotes()
        return text if WORD.fullmatch(text) else quoted
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_element(key, item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{_escape(str(k))}:{_element(key, item)}" for k, item in value.items())
        return "{" + ",".join(items) + "}"
    raise UserError(f"{key}={value!r}: must be a number, a string, None, or a list or dict of them")


def _escape(text: str) -> str:
    r"""Escape the key of a dict, which the grammar does not allow to be quoted."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", text)
