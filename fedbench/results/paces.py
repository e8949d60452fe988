"""How long a round of finished runs took, to estimate runs that cost about the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from fedbench.results.run_reader import Loader
from fedbench.results.sealed import unseal_json, unseal_text
from fedbench.results.settings import Value, flat, group_of

Config = Mapping[str, Value]  # flat settings

# Settings that decide what a round costs. Of a group, all of its settings count. The first level
# on which a finished run has the same values is used.
GROUPS = ("dataset", "model", "executor")
SIZES = ("n_clients", "pool", "local_epochs")
LEVELS = (
    (GROUPS, ("defense", "attack", *SIZES, "batch_size", "evaluate_every")),
    (GROUPS, ("attack", *SIZES, "batch_size", "evaluate_every")),
    ((), ("dataset", "model", *SIZES)),
)
FREE = "dataset.root"  # of a group, but costs nothing


@dataclass(frozen=True)
class Pace:
    """Seconds of a round."""

    whole: float
    train: float  # of `whole`; a benign round before round 0 does little else


class Paces:
    """The paces of finished runs, by what decides them."""

    def __init__(self, measured: Iterable[tuple[Config, Pace]]) -> None:
        self._by_cost: dict[Sequence[object], list[Pace]] = defaultdict(list)
        for config, pace in measured:
            for level in range(len(LEVELS)):
                self._by_cost[_cost(config, level)].append(pace)

    def estimate(self, config: Config) -> Pace | None:
        """The median of the most similar finished runs; None if none is comparable."""
        for level in range(len(LEVELS)):
            if found := self._by_cost.get(_cost(config, level)):
                return Pace(median(p.whole for p in found), median(p.train for p in found))
        return None


def read_paces(outs: Iterable[str]) -> Paces:
    """Read all finished runs in folders of results."""
    folders = [path.parent for out in outs for path in Path(out).glob("*/*/summary.json")]
    return Paces(found for found in map(_read, folders) if found is not None)


def _read(folder: Path) -> tuple[Config, Pace] | None:
    """The settings and the pace of a run; None if it has not finished or is damaged."""
    try:
        summary = unseal_json((folder / "summary.json").read_bytes())
        if summary["status"] != "finished":
            return None
        n = summary["rounds"]
        pace = Pace(summary["seconds"] / n, summary["seconds_by_step"]["train"] / n)
        settings = yaml.load(unseal_text((folder / "config.yaml").read_bytes())[0], Loader)
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return flat(settings), pace


def _cost(config: Config, level: int) -> Sequence[object]:
    groups, names = LEVELS[level]
    own = sorted(key for key in config if group_of(key) in groups and key != FREE)
    settings = {**config, "pool": config.get("pool") or config.get("n_clients")}
    return (level, *((key, settings.get(key)) for key in (*own, *names)))
