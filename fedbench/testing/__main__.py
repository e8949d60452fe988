"""Check plugins: `python -m fedbench.testing defense=mine defense.factor=3`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedbench.composition import compose
from fedbench.errors import UserError, nearest, one_line, print_error
from fedbench.testing.attacks import ATTACK
from fedbench.testing.backdoors import inspect_backdoor
from fedbench.testing.contract import Contract, Finding, Inspection
from fedbench.testing.defenses import DEFENSE

CONTRACTS: dict[str, Contract[Any]] = {"defense": DEFENSE, "attack": ATTACK}
INSPECT: dict[str, Callable[[dict[str, Any]], Inspection[Any]]] = {
    "defense": lambda settings: Inspection(DEFENSE, settings),
    "attack": lambda settings: Inspection(ATTACK, settings),
    "backdoor": inspect_backdoor,
}
USAGE = "name a plugin, for example: fedbench testing defense=krum defense.m=3"
HELP = """\
usage: fedbench testing KIND=NAME [KIND.SETTING=VALUE ...]

Check a plugin against its contract. KIND is defense, attack or backdoor.

  fedbench testing defense=krum defense.m=3
  fedbench testing attack=dba backdoor=patch"""


def plugins_of(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each kind of plugin that the arguments name."""
    found: dict[str, dict[str, Any]] = {}
    for override in OverridesParser.create().parse_overrides([*arguments]):
        kind, _, setting = override.key_or_group.partition(".")
        if kind not in INSPECT:
            raise UserError(f"{override.input_line}: no such plugin{nearest(kind, INSPECT)}")
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: give one value, to check one {kind}")
        found.setdefault(kind, {})[setting or "name"] = override.value()
    for kind, settings in found.items():
        if "name" not in settings:
            raise UserError(f"{kind}.{next(iter(settings))}: name the {kind}, as in {kind}=NAME")
    if not found:
        raise UserError(USAGE)
    return found


def check_config(kind: str, name: str) -> Finding:
    """Check the settings that the command line composes, from the plugin's YAML if it has one."""
    meaning = f"`python -m fedbench {kind}={name}` builds the plugin"
    contract = CONTRACTS[kind]
    try:
        settings = getattr(compose([f"{kind}={name}"]), kind)
        built = type(contract.build(settings))
        if built is not contract.registry.get(name):
            raise UserError(f"builds {built.__name__}; the config must say `name: {name}`")
    except Exception as error:
        line = one_line(error) or " ".join(f"raised {type(error).__name__}: {error}".split())
        return Finding("config", "failed", meaning, line)
    return Finding("config", "ok", meaning)


def report(kind: str, settings: dict[str, Any]) -> bool:
    """Print the finding of every check; return whether none failed."""
    inspection = INSPECT[kind](settings)
    cls = type(inspection.plugin)
    print(f"{kind} {inspection} ({cls.__module__}.{cls.__qualname__})\n")
    findings = inspection.findings()
    if kind != "backdoor":  # backdoors have no config group
        findings.append(check_config(kind, settings["name"]))
    for finding in findings:
        print(finding)
    counts = Counter(finding.status for finding in findings)
    print("\n" + ", ".join(f"{n} {status}" for status, n in counts.items()) + "\n")
    return not counts["failed"]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & {*arguments}:
        print(HELP)
        return 0
    try:
        plugins = plugins_of(arguments)
        passed = [report(kind, settings) for kind, settings in plugins.items()]
    except Exception as error:
        print_error(error)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
