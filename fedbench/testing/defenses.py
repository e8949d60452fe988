"""The contract of a defense."""

from __future__ import annotations

from typing import Any

from fedbench.defense import DEFENSES, Defense
from fedbench.testing.contract import Contract, Inspection, raise_if_broken
from fedbench.testing.defense_invariants import (
    client_order,
    precision,
    tied_clients,
    unanimity,
    update_precision,
)
from fedbench.testing.defense_memory import checkpoint, memory, same_seed, state
from fedbench.testing.defense_results import (
    few_clients,
    huge_rows,
    inputs,
    later_rounds,
    plugin_class,
    result,
    unusual_rows,
    warning,
)

DEFENSE: Contract[Defense] = Contract(
    DEFENSES,
    plugin_class,
    warning,
    result,
    inputs,
    state,
    same_seed,
    memory,
    checkpoint,
    unusual_rows,
    huge_rows,
    later_rounds,
    few_clients,
    unanimity,
    client_order,
    tied_clients,
    precision,
    update_precision,
)


def check_defense(defense: Defense | type[Defense] | str | dict[str, Any]) -> None:
    """Run all checks on a defense: an instance, a class, a registered name or settings.

    Raises one AssertionError that explains every broken check.
    """
    raise_if_broken(Inspection(DEFENSE, defense))
