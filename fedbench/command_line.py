"""The words of the command line: subcommands, options, and settings for Hydra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from fedbench.composition import check_choice, is_sweep_file
from fedbench.config import RunConfig
from fedbench.errors import UserError, did_you_mean, nearest
from fedbench.multirun.sweeper import owner_of
from fedbench.plugin_configs import config_groups, options_of

# Subcommand -> module, whose `main(arguments)` returns the exit code, and what it does
COMMANDS = {
    "run": ("fedbench.__main__", "run or, with -m, sweep; `run` may be left out"),
    "list": ("fedbench.plugin_list", "list defenses, attacks, backdoors, data sets, models"),
    "report": ("fedbench.report.__main__", "make tables, figures and a page of runs"),
    "upload": ("fedbench.upload", "send finished runs to Weights & Biases"),
    "dashboard": ("fedbench.dashboard", "make a workspace and a report page in W&B"),
    "preview": ("fedbench.preview", "draw clean and poisoned samples of an attack"),
    "testing": ("fedbench.testing.__main__", "check your own defense, attack or backdoor"),
    "selfcheck": ("fedbench.selfcheck.__main__", "compare the GPUs and processes of this machine"),
}
# Options of Hydra: those without a value, and those with one, with its possible values
FLAGS = {
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
}
SHOWN = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
WITH_VALUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--info", "-i"), SHOWN),
    **dict.fromkeys(("--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), ()),
    **dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun"), ()),
}
MODES = {"-m", "--multirun", "-r", "--run", "-c", "--cfg", "-i", "--info", "--hydra-help"}
# Options of fedbench, and the settings that they stand for
OWN = {"--force": "rerun=true", "--dry-run": "+hydra.callbacks.sweep.dry_run=true"}
NO_SETTINGS = {"--shell-completion", "-sc", "--experimental-rerun"}  # what follows is none
# Groups whose settings depend on the choice: Hydra cannot apply them before a run of a sweep
CHOSEN = ("attack", "dataset", "defense", "model")


def hydra_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: options first, then the settings, which are checked."""
    options, settings = split(words)
    if not NO_SETTINGS.isdisjoint(options):
        return [*options, *settings]
    parsed = parse_settings(settings)
    sweep = _is_sweep(options, parsed)
    for override in parsed:
        _check(override, sweep)
    if sweep and MODES.isdisjoint(options):  # or Hydra mistakes errors in a sweep file for others
        options.append("--multirun")
    return [*options, *(_postponed(o) if sweep else str(o.input_line) for o in parsed)]


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into options, with their values, and settings; UserError for other options."""
    options, settings, rest = [], [], [*words]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in OWN:
            settings.append(OWN[word])
        elif not word.startswith("-"):
            settings.append(word)
        elif name in WITH_VALUE:
            allowed = WITH_VALUE[name]
            if not equals and rest and (not allowed or rest[0] in allowed):
                value = rest.pop(0)
            elif not equals and allowed:
                value = allowed[0]
            if value == "" or (allowed and value not in allowed):
                raise UserError(f"{word}: needs a value" + (f", {_or(allowed)}" if allowed else ""))
            options += [name, value]
        elif word in FLAGS:
            options.append(word)
        else:
            raise UserError(_unknown_option(name, value or (rest[0] if rest else "")))
    return options, settings


def _unknown_option(name: str, value: str) -> str:
    key = name.lstrip("-").replace("-", "_")
    if key.partition(".")[0] in setting_names():
        return f"{name}: is a setting, without dashes: {key}={value}"
    known = [*FLAGS, *WITH_VALUE, *OWN]
    return f"{name}: no such option{did_you_mean(name, known) or ';'} fedbench --help lists all"


def parse_settings(words: Sequence[str]) -> list[Override]:
    """Parse words that should be `key=value`; UserError that says what is right."""
    parsed = []
    for i, word in enumerate(words):
        if ("=" not in word or word.startswith("=")) and not word.startswith("~"):
            before = words[i - 1] if i else ""
            raise UserError(_not_a_setting(word, before, words[i + 1 : i + 2]))
        try:
            parsed += OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            raise UserError(f"{word}: {_mistake(word)}") from error
    return parsed


def _not_a_setting(word: str, before: str, after: Sequence[str]) -> str:
    """Say what is wrong with a word without `=`, given the words next to it."""
    following = after[0] if after else ""
    if before.endswith("=") or following.startswith("="):
        first = before or word
        return f"{first} {word if before else following}: write key=value without spaces"
    if word in COMMANDS:
        return f"{word}: must come first, as in fedbench {word} ..."
    if Path(word).suffix in (".yaml", ".yml"):
        file = Path(word)
        return (
            f"{word}: a sweep file is run by --config-dir {file.parent} --config-name {file.stem}"
        )
    if word.partition(".")[0] in setting_names():
        return f"{word}: needs a value, {word}={following or '...'}"
    if "=" in before:
        values = f"{before.rstrip(',')},{word.strip(',')}"
        return (
            f"{before} {word}: several values are a sweep, with commas and no spaces: -m {values}"
        )
    owners = [group for group in config_groups() if word in options_of(group)]
    if owners:
        return f"{word}: must follow its group, {owners[0]}={word}"
    known = [*COMMANDS, *setting_names()]
    return f"{word}: no such command, and settings are key=value{did_you_mean(word, known)}"


def _mistake(word: str) -> str:
    """Say what is wrong with a `key=value` that Hydra cannot parse."""
    key, _, value = word.partition("=")
    if not re.fullmatch(r"(\+{0,2}|~)[\w./@$-]+", key):
        return f"{key!r} is no name of a setting; write key=value"
    if re.fullmatch(r"(choice|range|glob)\(\s*\)", value):
        return f"has no values; write {key}=A,B"
    values = [part.strip() for part in value.split(",")]
    if "" in values and "[" not in value:
        return f"has a comma too many; write {key}={','.join(filter(None, values))}"
    if any(value.count(mark) % 2 for mark in "'\"") or any(
        value.count(left) != value.count(right) for left, right in ("[]", "{}", "()")
    ):
        return "has a bracket or quote without its partner; quote the whole, 'n_clients=[15,30]'"
    return f"has special characters; quote the value twice, \"{key}='{value}'\""


def _is_sweep(options: Sequence[str], settings: Sequence[Override]) -> bool:
    """Whether the command is a sweep: -m, hydra.mode=MULTIRUN, or a sweep file."""
    if {"-m", "--multirun"} & {*options}:
        return True
    if any(o.input_line == "hydra.mode=MULTIRUN" for o in settings):
        return True
    values = dict(pairwise(options))
    name = values.get("--config-name", values.get("-cn"))
    folder = values.get("--config-dir", values.get("-cd"))
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--config-dir {folder}: no such folder")
    if name is not None and folder is not None:
        found = {path.stem for path in Path(folder).glob("*.yaml")}
        if name.removesuffix(".yaml") not in found:
            raise UserError(f"--config-name {name}: no such file in {folder}{nearest(name, found)}")
    return name is not None and is_sweep_file(name, folder)


def _check(override: Override, sweep: bool) -> None:
    """Raise a UserError for what Hydra would report in words of its own."""
    line, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        if not sweep:
            raise UserError(f"{line}: several values are a sweep; add -m: fedbench -m {line}")
        return
    check_choice(override)
    owner = owner_of(key, {group: options_of(group) for group in config_groups()})
    if owner is not None and not sweep:
        plain = line.replace(key, owner[2], 1)
        raise UserError(f"{line}: belongs in a sweep, -m; for a single run write {plain}")


def _postponed(override: Override) -> str:
    """Write a setting of a chosen plugin as a sweep of one value, which each run applies.

    Hydra first composes the default choices: these may lack the setting.
    """
    key = override.get_key_element()
    group, *inner = key.lstrip("+").split(".")
    belongs = (group in CHOSEN and inner) or (group in config_groups() and len(inner) > 1)
    if not belongs or override.is_sweep_override() or override.is_delete():
        return str(override.input_line)
    if override.value() is None:  # which `choice` refuses
        return f"+hydra.sweeper.params={{{key}:'null'}}"
    return f"{key}=choice({override.get_value_element_as_str() or repr('')})"


def setting_names() -> set[str]:
    """Return the names of all settings and groups."""
    return {*(field.name for field in fields(RunConfig)), *config_groups()}


def _or(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"
