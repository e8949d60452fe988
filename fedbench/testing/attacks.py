"""The contract of an attack."""

from __future__ import annotations

from typing import Any

from fedbench.attack import ATTACKS, Attack
from fedbench.testing.attack_rounds import round_loop
from fedbench.testing.attack_samples import (
    backdoors,
    plugin_class,
    poison_draw,
    poison_inputs,
    poison_seed,
    poison_share,
    training_settings,
)
from fedbench.testing.attack_updates import collude, craft, objective, project
from fedbench.testing.contract import Contract, Inspection, raise_if_broken

ATTACK: Contract[Attack] = Contract(
    ATTACKS,
    plugin_class,
    training_settings,
    backdoors,
    poison_inputs,
    poison_seed,
    poison_draw,
    poison_share,
    objective,
    project,
    craft,
    collude,
    round_loop,
)


def check_attack(attack: Attack | type[Attack] | str | dict[str, Any]) -> None:
    """Run all checks on an attack: an instance, a class, a registered name or settings.

    Raises one AssertionError that explains every broken check.
    """
    raise_if_broken(Inspection(ATTACK, attack))
