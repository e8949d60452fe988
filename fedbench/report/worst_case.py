"""The worst case of each defense: the highest BA over all attacks that were run against it.

As in RobustBench, a defense is as strong as its worst result, and a result without an adaptive
attack, one designed against this very defense, is an upper bound on its strength.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import isclose
from pathlib import Path

from fedbench.registry import find_plugins
from fedbench.report.comparison import Comparison, TableRow
from fedbench.report.run_labels import value_of
from fedbench.report.statistics import Estimate, Seed, estimate
from fedbench.results.run_reader import RunResult
from fedbench.results.settings import group_of, show

BENIGN = "none"  # the attack of runs without one


@dataclass(frozen=True)
class WorstCase:
    """The attack with the highest mean BA against one defense in one setting."""

    defense: str  # label: `krum`, or `krum m=5`
    setting: Mapping[str, str]  # the keys that tell rows apart, without the attack; labels
    attack: str  # label; the first in the table's order if several tie
    BA: Estimate
    MA: Estimate | None  # under the same attack
    ties: tuple[str, ...]  # other attacks with the same mean BA
    is_adaptive: bool  # the worst attack, or one that ties, is adaptive to this defense
    n_attacks: int  # attacks with a BA; other parameters make another attack
    adaptive: tuple[str, ...]  # those that are adaptive to this defense; empty: none was tried
    missing: tuple[str, ...]  # without a BA here, though another defense has one in this setting
    peak: float  # the highest BA of a single seed, over all attacks
    peak_seed: Seed


@dataclass(frozen=True)
class _Attacked:
    """The BA of one row."""

    attack: str
    row: TableRow
    BA: Estimate
    is_adaptive: bool


def worst_cases(comparison: Comparison) -> list[WorstCase]:
    """Return the worst case of each defense in each setting, settings in the table's order.

    Attacks without a backdoor have no BA and do not count; nor do runs without an attack.
    """
    attacked: dict[tuple[str, ...], dict[str, list[_Attacked]]] = {}  # by setting and defense
    places = [i for i, key in enumerate(comparison.keys) if group_of(key) != "attack"]
    for row in comparison.rows:
        ba = _over_seeds(row, "BA")
        if ba is not None and value_of(row.runs[0], "attack") != BENIGN:
            label = _attack_label(comparison.keys, row)
            case = _Attacked(label, row, ba, _is_adaptive(row.finished[0]))
            by_defense = attacked.setdefault(tuple(row.setting[i] for i in places), {})
            by_defense.setdefault(row.defense, []).append(case)
    found = []
    for cells, by_defense in attacked.items():
        setting = {comparison.keys[i]: cell for i, cell in zip(places, cells, strict=True)}
        attacks = dict.fromkeys(case.attack for cases in by_defense.values() for case in cases)
        found += [_worst(name, setting, cases, [*attacks]) for name, cases in by_defense.items()]
    return found


def _worst(
    defense: str, setting: Mapping[str, str], cases: Sequence[_Attacked], attacks: Sequence[str]
) -> WorstCase:
    highest = max(case.BA.mean for case in cases)
    # Equal means may differ in the last bit.
    worst, *ties = [case for case in cases if isclose(case.BA.mean, highest, abs_tol=1e-9)]
    by_seed = [case.BA.worst(lower_is_better=True) for case in cases]
    seed, peak = max(by_seed, key=lambda found: found[1])
    tried = {case.attack for case in cases}
    return WorstCase(
        defense=defense,
        setting=setting,
        attack=worst.attack,
        BA=worst.BA,
        MA=_over_seeds(worst.row, "MA"),
        ties=tuple(case.attack for case in ties),
        is_adaptive=any(case.is_adaptive for case in (worst, *ties)),
        n_attacks=len(tried),
        adaptive=tuple(case.attack for case in cases if case.is_adaptive),
        missing=tuple(attack for attack in attacks if attack not in tried),
        peak=peak,
        peak_seed=seed,
    )


def _over_seeds(row: TableRow, metric: str) -> Estimate | None:
    return estimate({run.value("seed"): run.metrics.get(metric) for run in row.finished})


def _attack_label(keys: Sequence[str], row: TableRow) -> str:
    """Return the attack with its parameters, also those that have a column of their own."""
    cells = dict(zip(keys, row.setting, strict=True))
    label = cells.pop("attack", show(value_of(row.runs[0], "attack")))
    parameters = {key: cell for key, cell in cells.items() if key.startswith("attack.")}
    words = [f"{k.removeprefix('attack.')}={v}" for k, v in parameters.items() if v != "-"]
    return " ".join([label, *words])


def _is_adaptive(run: RunResult) -> bool:
    """Whether the attack is adaptive to the defense of its run."""
    return run.value("defense") in adaptive_to(run)


def adaptive_to(run: RunResult) -> tuple[str, ...]:
    """Return the defenses that the run's attack was designed to evade, as summary.json says.

    For runs of older versions, the source of the attack says it, if the attack is installed.
    """
    declared = run.summary.get("adaptive_to")
    if isinstance(declared, list):
        return tuple(map(str, declared))
    return _declared_in_source(str(run.value("attack")))


@cache
def _declared_in_source(attack: str) -> tuple[str, ...]:
    """Read `adaptive_to` from a plugin's file, without importing the plugin and torch with it."""
    try:
        plugin = find_plugins("attack", "fedbench.attacks")[attack]
        spec = find_spec(plugin.module)
        if spec is None or spec.origin is None:
            return ()
        return _declared_in(ast.parse(Path(spec.origin).read_text("utf-8")))
    except Exception:  # not installed, or broken
        return ()


def _declared_in(tree: ast.Module) -> tuple[str, ...]:
    """Return the value that the first class with `adaptive_to` assigns to it."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for statement in (statement for cls in classes for statement in cls.body):
        match statement:
            case (
                ast.AnnAssign(target=ast.Name("adaptive_to"), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name("adaptive_to")], value=value)
            ):
                return tuple(ast.literal_eval(value))
    return ()
