"""What an attack or a defense costs: each run against the benign run of the same seed.

The benign run has defense=fedavg, attack=none and otherwise the same settings, except for those
that only concern the attack. So both met the same data and began with the same model.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from fedbench.results.after_attack import Wait, wait_after_attack
from fedbench.results.run_reader import RunResult
from fedbench.results.run_rounds import RunRounds
from fedbench.results.settings import is_named

PAIRED = ("MA_lost", "recovery")  # metrics that need the benign run
RECOVERED = 0.01 + 1e-9  # largest loss of MA after a recovery; 0.8 - 0.79 is above 0.01
BENIGN = {"defense": "fedavg", "attack": "none"}
# Settings of the attack also decide who takes part if clients are drawn from a larger pool.
ROLES = ("pmr", "malicious")
IGNORED = (
    *(*BENIGN, *ROLES, "dataset.backdoors"),
    *("pdr", "pdr_step", "pdr_end", "attack_start", "attack_rounds"),
)


def with_benign_pairs(
    runs: Sequence[RunResult], rounds: Mapping[Path, RunRounds]
) -> list[RunResult]:
    """Return the runs with the metrics PAIRED, which are None without a benign run.

    Of several benign runs, the last with the same ROLES counts, otherwise the last one.
    """
    settings = [_setting(run) if run.status == "finished" else None for run in runs]
    benign: dict[Hashable, RunResult] = {}
    for run, setting in zip(runs, settings, strict=True):
        if setting is not None and all(run.value(key) == BENIGN[key] for key in BENIGN):
            benign[setting] = benign[setting, _roles(run)] = run
    found = []
    for run, setting in zip(runs, settings, strict=True):
        pair = benign.get((setting, _roles(run)), benign.get(setting))
        found.append(run if setting is None else _paired(run, pair, rounds))
    return found


def _setting(run: RunResult) -> Hashable:
    """Return what a run shares with its benign run, the seed included."""
    return frozenset((key, value) for key, value in run.config.items() if _is_shared(key))


@cache
def _is_shared(key: str) -> bool:
    ignored = any(key == name or key.startswith(f"{name}.") for name in IGNORED)
    return not ignored and (key == "seed" or is_named(key))


def _roles(run: RunResult) -> Hashable:
    return tuple(map(run.value, ROLES))


def _paired(
    run: RunResult, benign: RunResult | None, rounds: Mapping[Path, RunRounds]
) -> RunResult:
    if benign is None:
        return replace(run, metrics={**run.metrics, **dict.fromkeys(PAIRED)})
    usual, reached = benign.metrics.get("MA"), run.metrics.get("MA")
    lost = None if usual is None or reached is None else usual - reached
    wait = None
    if run.folder in rounds and benign.folder in rounds:
        wait = _recovery(rounds[run.folder], rounds[benign.folder])
    return replace(
        run,
        metrics={**run.metrics, "MA_lost": lost, "recovery": wait.rounds if wait else None},
        censored=run.censored | {"recovery"} if wait and wait.censored else run.censored,
    )


def _recovery(run: RunRounds, benign: RunRounds) -> Wait | None:
    """Wait until MA is at most a point below that of the benign run in the same round."""
    recovered = [
        None if usual is None or reached is None else usual - reached <= RECOVERED
        for reached, usual in zip(run.rates["MA"], benign.rates["MA"], strict=False)
    ]
    return wait_after_attack(run.attacked, recovered)
