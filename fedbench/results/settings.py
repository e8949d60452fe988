"""Flat settings: `attack` is the attack's name, `attack.x` one of its parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fedbench.config import NO_EFFECT

Value = str | int | float | None

# Settings in the order of interest: the first columns of the table. The caption lists those that
# all runs have in common.
LEADING = (
    *("dataset", "model", "attack", "pmr", "pdr", "non_iid", "pretrain_non_iid", "n_clients"),
    "rounds",
)
# Settings that no title and no table names. A checkpoint to start from does change the results.
UNNAMED = frozenset({*NO_EFFECT, "seed"} - {"pretrained"})


def flat(settings: Mapping[Any, Any]) -> dict[str, Value]:
    """Flatten {"attack": {"name": "dba", "parts": 4}} to {"attack": "dba", "attack.parts": 4}."""
    return dict(_items(settings))


def _items(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in tree.items():
        path = prefix[:-1] if prefix and key == "name" else f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _items(value, f"{path}.")
        elif value is None or isinstance(value, str | int | float):
            yield path, value
        else:
            yield path, json.dumps(value, default=str)


def show(value: Value) -> str:
    """Format a setting as on the command line."""
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def group_of(key: str) -> str:
    return key.partition(".")[0]


def is_named(key: str) -> bool:
    """Whether titles and tables name the setting where it differs."""
    steps = key.split(".")
    return UNNAMED.isdisjoint(".".join(steps[:n]) for n in range(1, len(steps) + 1))


def leading_first(key: str) -> int:
    """Sort key: LEADING with their parameters first; other keys keep their order."""
    group = group_of(key)
    return LEADING.index(group) if group in LEADING else len(LEADING)


def idle(config: Mapping[str, Value]) -> set[str]:
    """Return settings that have no effect because of others, such as `partition`."""
    partition = config.get("partition", "main_class")
    keys = {"non_iid", "dirichlet_alpha"}
    keys -= {"main_class": {"non_iid"}, "dirichlet": {"dirichlet_alpha"}}.get(str(partition), set())
    pretrains = config.get("pretrain_rounds") and config.get("pretrained") is None
    if not pretrains or partition == "natural":
        keys.add("pretrain_non_iid")
    return keys
