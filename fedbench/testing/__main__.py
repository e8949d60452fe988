"""Check plugins: `python -m fedbench.testing defense=mine defense.factor=3`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedbench.composition import compose
from fedbench.errors import UserError, nearest, one_line
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
USAGE = "name a plugin, for example: python -m fedbench.testing defense=krum defense.m=3"


def plugins_of(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each kind of plugin that the arguments name."""
    found: dict[str, dict[str, Any]] = {}
    for override in OverridesParser.create().parse_overrides([*arguments]):
        kind, _, setting = override.key_or_group.partition(".")
        if kind not in INSPECT:
            raise UserError(f"{override.input_line}: no such plugin{nearest(kind, INSPECT)}")
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
    try:
        config = compose([f"{kind}={name}"])
        CONTRACTS[kind].build(getattr(config, kind))
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
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
    try:
        plugins = plugins_of(sys.argv[1:] if arguments is None else arguments)
        passed = [report(kind, settings) for kind, settings in plugins.items()]
    except Exception as error:
        line = one_line(error)
        if line is None or os.environ.get("FEDBENCH_TRACEBACK") == "1":
            raise
        print(line, file=sys.stderr)
        return 1
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
