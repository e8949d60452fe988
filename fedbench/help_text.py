"""`fedbench --help`: commands, groups and settings, as the comments of the config files say."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbench import __version__
from fedbench.command_line import COMMANDS, parse_settings
from fedbench.composition import compose_with_choices
from fedbench.config import RunConfig
from fedbench.config_comments import comments, group_comments, sections
from fedbench.plugin_configs import options_of

WIDTH, INDENT = 80, 26
USAGE = """\
usage: fedbench [-m] [KEY=VALUE ...]     run, or sweep with -m
       fedbench COMMAND ...              `fedbench COMMAND --help` explains it
       python -m fedbench ...            the same\
"""
EXAMPLES = {
    "fedbench": "one run with the defaults",
    "fedbench defense=krum pmr=0.3": "one run with other settings",
    "fedbench -m defense=krum,flame seed=0,1,2": "a sweep over all combinations",
    "fedbench -m defense=krum,flame defense.flame.noise=0.001,0.01": "krum once, flame twice",
    "fedbench 'n_clients=[15,30]'": "quote brackets",
    "fedbench --config-dir sweeps --config-name defenses": "a sweep from a file",
    "fedbench defense=flame --help": "explain the settings of flame, too",
}
OPTIONS = {
    "-m, --multirun": "sweep over the values that commas separate",
    "--force": "short for rerun=true: do finished runs anew",
    "--dry-run": "list what would run, what is done and the time left; run nothing",
    "--config-dir FOLDER --config-name NAME": "run NAME.yaml of FOLDER, such as a sweep",
    "--cfg job": "print all settings of the run as YAML, and do not run",
    "--version": "print the version",
    "--hydra-help": "explain all other options, which are Hydra's",
}


def help_text(settings: Sequence[str]) -> str:
    """Return the help, with the values that these settings give; a sweep shows the defaults."""
    single = [o.input_line for o in parse_settings(settings) if not o.is_sweep_override()]
    config, choices = compose_with_choices([str(line) for line in single])
    blocks = [f"fedbench {__version__}: which defenses stop which backdoors, at what cost", USAGE]
    blocks.append(_block("Examples", EXAMPLES, indent=4))
    blocks.append(_block("Commands", {name: about for name, (_, about) in COMMANDS.items()}))
    blocks.append(_block("Options", OPTIONS))
    title = "Groups: GROUP=NAME chooses, `fedbench list` describes the names"
    blocks.append(_block(title, _groups(choices)))
    explained = comments("config")
    for heading, keys in sections("config").items():
        values = {f"{key}={_text(getattr(config, key))}": explained[key] for key in keys}
        blocks.append(_block(heading, values))
    blocks += _plugin_settings(config, choices)
    return "\n\n".join(blocks)


def _groups(choices: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{group}={choices[group]}": f"{about}. One of {', '.join(options_of(group))}"
        for group, about in group_comments().items()
    }


def _plugin_settings(config: RunConfig, choices: Mapping[str, str]) -> Iterator[str]:
    """One block per group whose choice has settings of its own."""
    for group in group_comments():
        values: Mapping[str, Any] = getattr(config, group, {})
        explained = comments(f"{group}/{choices[group]}")
        settings = {
            f"{group}.{key}={_text(value)}": explained.get(key) or explained.get(f"{group}.{key}")
            for key, value in values.items()
            if key != "name"
        }
        if settings:
            yield _block(f"Settings of {group}={choices[group]}", settings)


def _block(title: str, rows: Mapping[str, str | None], indent: int = INDENT) -> str:
    """Write a title and its rows: a name on the left, what it means on the right."""
    lines = [*textwrap.wrap(title, WIDTH)]
    for name, about in rows.items():
        label = f"  {name}"
        fits = len(label) < indent and about
        text = f"{label:<{indent}}{about}" if fits else about or ""
        lines += [] if fits else [label]
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent="" if fits else " " * indent,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Write a value as on the command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return str(value) if isinstance(value, str) else json.dumps(value)
