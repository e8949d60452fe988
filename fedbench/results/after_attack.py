"""What follows an attack: rounds until a backdoor fades or a model recovers, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Lifespans of a backdoor (Neurotoxin, Zhang et al., ICML 2022), and the BA below which they end
LIFESPANS = {"lifespan_50": 0.5, "lifespan_10": 0.1}
ROUNDS_AFTER = "rounds_after_attack"


@dataclass(frozen=True)
class Wait:
    """Number of rounds from the last attacked round to an event."""

    rounds: int
    censored: bool  # the run ended before the event, so that `rounds` is a lower bound


def rounds_after_attack(attacked: Sequence[bool]) -> int | None:
    """Return the number of rounds after the last attacked one; None without an attack."""
    if not any(attacked):
        return None
    return next(n for n, flag in enumerate(reversed(attacked)) if flag)


def wait_after_attack(attacked: Sequence[bool], happened: Sequence[bool | None]) -> Wait | None:
    """Wait for the first round, from the last attacked one on, in which the event has happened.

    `happened` is None in rounds without evaluation. The wait is None if nothing was observed: no
    attack, an attack until the last round, or no evaluation.
    """
    n_after = rounds_after_attack(attacked)
    if not n_after:
        return None
    observed = happened[len(attacked) - 1 - n_after :]
    if all(flag is None for flag in observed):
        return None
    return next((Wait(n, False) for n, flag in enumerate(observed) if flag), Wait(n_after, True))


def lifespan(
    attacked: Sequence[bool], accuracies: Sequence[float | None], threshold: float
) -> int | None:
    """Return the number of rounds until BA is below the threshold."""
    below = [None if ba is None else ba < threshold for ba in accuracies]
    wait = wait_after_attack(attacked, below)
    return wait.rounds if wait else None


def censored_lifespans(metrics: Mapping[str, float | None]) -> frozenset[str]:
    """Return the lifespans that are lower bounds: BA was never below the threshold.

    A lifespan that ends with the run's last round is no such bound.
    """
    ba, span = metrics.get("BA"), metrics.get(ROUNDS_AFTER)
    return frozenset(
        key
        for key, threshold in LIFESPANS.items()
        if metrics.get(key) is not None and metrics[key] == span
        if ba is not None and ba >= threshold
    )
