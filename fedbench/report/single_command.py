"""The command that starts one run of a sweep, or any other run, again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from fedbench.composition import overrides_of
from fedbench.config import NO_EFFECT
from fedbench.default_settings import GROUPS
from fedbench.errors import UserError
from fedbench.results.run_reader import RunResult
from fedbench.results.settings import Value, flat

PROGRAM = ("python", "-m", "fedbench")
# Settings that origin.json does not name, with their default values; see `_tracker` for others
UNNAMED_DEFAULTS: Mapping[str, Value] = {
    "seed": 0,
    "name": "default",
    "out": "runs",
    "dataset.root": None,
    "executor.devices": None,
    "executor.capture": True,
}
USUAL_TRACKER = "wandb"
# Strings that Hydra reads as they are: names and paths, but no number
PATH = re.compile(r"(?!\.\d)(?!(null|true|false|nan|inf)$)[a-z_/.][\w./-]*", re.A | re.I)
CONFIG_DIR = ("--config-dir", "-cd")
SEARCH_PATH = "hydra.searchpath="


def single_command(run: RunResult) -> str:
    """Return the command line; empty if the settings are unknown.

    It names the choices and settings that differ from the default, and always the seed. If nobody
    knows which do, it names every setting.
    """
    if not run.config:
        return ""
    with suppress(UserError):  # a value that no command line can hold
        words = [_override(key, value) for key, value in _settings(run).items()]
        return shlex.join([*PROGRAM, *_config_folders(run), *words])
    return ""


def _override(key: str, value: Any) -> str:
    """Write `key=value` without quotes for Hydra, which a shell would quote again, if possible."""
    if isinstance(value, str) and PATH.fullmatch(value):
        return f"{key}={value}"
    return overrides_of({key: value})[0]


def _settings(run: RunResult) -> dict[str, Any]:
    choices = {} if run.origin is None else run.origin.choices
    changed = None if run.origin is None else run.origin.changed
    if changed is None:
        named = [group for group in GROUPS if run.config.get(group) is not None]
        found: dict[str, Any] = {group: choices.get(group, run.config[group]) for group in named}
        found |= {key: value for key, value in run.config.items() if _is_free(key)}
    else:
        found = {group: changed[group] for group in GROUPS if group in changed}
        found |= {key: value for key, value in changed.items() if key not in GROUPS}
    found |= _tracker(run)
    for key, usual in UNNAMED_DEFAULTS.items():
        if run.config.get(key, usual) != usual or key == "seed":
            found[key] = run.config.get(key, usual)
    return {key: _parsed(value) for key, value in found.items()}


def _is_free(key: str) -> bool:
    """Whether a setting is to be named if it is not known which ones differ from the default."""
    hidden = (*GROUPS, *NO_EFFECT, "executor.accelerator")  # of the machine, not of the user
    return key not in hidden and not key.startswith("tracker.")


def _parsed(value: Any) -> Any:
    """Return a list or mapping, which flat settings hold as JSON; other values as they are."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _tracker(run: RunResult) -> dict[str, Value]:
    """Return the choice of tracker and its settings, without defaults."""
    choice = str(run.config.get("tracker", USUAL_TRACKER))
    usual = _tracker_defaults(choice)
    found = {} if choice == USUAL_TRACKER else {"tracker": choice}
    inside = {key: value for key, value in run.config.items() if key.startswith("tracker.")}
    return found | {key: value for key, value in inside.items() if usual.get(key) != value}


def _config_folders(run: RunResult) -> list[str]:
    """Return the folders of configs in the run's own command if a choice may come from there."""
    command = run.summary.get("command")
    choices = {} if run.origin is None else run.origin.choices
    if not isinstance(command, str) or all(map(_is_shipped, choices.items())):
        return []
    found = []
    with suppress(ValueError):  # quotes without an end
        words = shlex.split(command)
        for word, following in zip(words, [*words[1:], ""], strict=True):
            option, equals, value = word.partition("=")
            if option in CONFIG_DIR:
                found += [CONFIG_DIR[0], value if equals else following]
            elif word.startswith(SEARCH_PATH):
                found.append(word)
    return found


@cache
def _tracker_defaults(choice: str) -> dict[str, Value]:
    path = files("fedbench.conf").joinpath("tracker", f"{choice}.yaml")
    try:
        return flat({"tracker": yaml.safe_load(path.read_text(encoding="utf-8"))})
    except (OSError, ValueError):  # a name of another version
        return {}


@cache
def _is_shipped(chosen: tuple[str, str | None]) -> bool:
    """Whether a choice of a group is one of fedbench's own."""
    group, choice = chosen
    if choice is None or group not in GROUPS or group.startswith("tuned"):
        return True  # nothing is chosen, or an optional file that may not exist
    return files("fedbench.conf").joinpath(group, f"{choice}.yaml").is_file()
