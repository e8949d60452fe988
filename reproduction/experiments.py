"""Experiments: what the page shows, in order, as reproduction/experiments.yaml lists it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reproduction.claims import Claim, Verdict

FILE = Path(__file__).with_name("experiments.yaml")


@dataclass(frozen=True)
class Reason:
    """Why numbers differ: the first that fits a claim explains it."""

    why: str
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)  # metric, dataset, defense, ...

    def fits(self, claim: Claim) -> bool:
        value = claim.reported
        known: dict[str, str | None] = {
            **{"metric": claim.metric, "ours_on": claim.dataset, "dataset": value.dataset},
            **{"defense": value.defense, "attack": value.attack},
            **{key: str(setting) for key, setting in value.settings.items()},
        }
        return all(known.get(key) in {*map(str, allowed)} for key, allowed in self.only.items())


@dataclass(frozen=True)
class Experiment:
    title: str
    sweeps: Sequence[str]
    folder: str = "sweeps/paper"
    where: Sequence[str] = ()  # places in the paper whose numbers it measures
    text: str = ""
    results: Sequence[str] = ()  # settings that name the rows of the table of our results
    metrics: Sequence[str] = ("BA", "MA", "TPR", "TNR")
    breaking: str = ""  # the setting of which the breaking points are shown
    shows_stopped: bool = False  # whether to list which rules stop the attack
    figure: str = ""  # caption
    reasons: Sequence[Reason] = ()

    def why(self, claim: Claim) -> str:
        """Return the likely reason for another number; empty if there is none, or no reason."""
        if claim.agreement in (Verdict.REPRODUCED, Verdict.UNTESTED):
            return ""
        return next((reason.why for reason in self.reasons if reason.fits(claim)), "")


def read_experiments() -> list[Experiment]:
    entries: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [
        Experiment(**{**entry, "reasons": [_reason(r) for r in entry.get("reasons", ())]})
        for entry in entries
    ]


def _reason(entry: Mapping[str, Any]) -> Reason:
    only = {
        key: value if isinstance(value, list) else [value]
        for key, value in entry.items()
        if key != "why"
    }
    return Reason(entry["why"], only)
