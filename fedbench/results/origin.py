"""Origin: what the user chose and changed to get the settings of a run; and the run's title."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbench.results.sealed import unseal_json
from fedbench.results.settings import Value, group_of, idle, leading_first, show

ORIGIN_FILE = "origin.json"
ALWAYS_NAMED = ("defense", "attack", "pmr", "seed")  # by every title


@dataclass(frozen=True)
class Origin:
    """The content of origin.json. None of it affects the results."""

    # The config file of each group. `defense` is `baybfed_literal` where the plugin is `baybfed`.
    choices: Mapping[str, str | None] = field(default_factory=dict)
    # Flat settings that differ from what the choices bring along, and choices other than the
    # default ones; without UNNAMED settings. None: not known
    changed: Mapping[str, Value] | None = None
    # Flat settings that the command of a sweep names, whether changed or not
    given: tuple[str, ...] = ()


def read_origin(folder: Path, run: str | None = None) -> Origin | None:
    """Read origin.json; None if there is none. OSError or DamageError if it is not intact."""
    try:
        content = unseal_json((folder / ORIGIN_FILE).read_bytes(), run)
    except FileNotFoundError:
        return None
    return Origin(content["choices"], content["changed"], tuple(content["given"]))


def title(config: Mapping[str, Value], origin: Origin | None) -> str:
    """Return a readable name for a run: `krum constrain_and_scale pmr=0.2 lr=0.1 seed=0`.

    It names each setting that differs from the default, and all that the command of a sweep names.
    `config` is flat.
    """
    origin = origin or Origin()
    settings = {**config, **origin.choices}
    named = {*(origin.changed or ())} - idle(config) | {*origin.given}
    others = [key for key in settings if key in named and key not in ALWAYS_NAMED]
    others.sort(key=lambda key: (group_of(key) != "defense", leading_first(key)))
    keys = ["pmr", *others, "seed"]
    words = [f"{key}={show(settings.get(key)).removesuffix('.0')}" for key in keys]
    return " ".join([show(settings["defense"]), show(settings["attack"]), *words])
