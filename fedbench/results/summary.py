"""The results in summary.json, computed from rounds.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench.metrics import mean, rates
from fedbench.results.after_attack import LIFESPANS, ROUNDS_AFTER, lifespan, rounds_after_attack
from fedbench.results.run_dir import Record
from fedbench.results.run_reader import STEALTH


def summarise(rounds: Sequence[Record]) -> Record:
    """Return MA and BA after the last round, TPR and TNR over the attacked rounds.

    A run without an attack has no poisoned updates. Its TPR is None; its TNR is the share of
    accepted updates over all rounds.
    """
    judged = [record for record in rounds if record["attacked"]] or rounds
    tpr, tnr = rates(client for record in judged for client in record["clients"])
    last = rounds[-1]
    # Rounds of an older version may lack a step.
    steps = dict.fromkeys(step for record in reversed(rounds) for step in record["seconds"])
    seconds = {step: sum(record["seconds"].get(step, 0) for record in rounds) for step in steps}
    return {
        "status": "finished",
        "MA": last["MA"],
        "BA": last["BA"],
        "TPR": tpr,
        "TNR": tnr,
        "AUC": mean(record["AUC"] for record in judged),
        **{key: mean(record[key] for record in judged) for key in STEALTH},
        "BA_by_backdoor": last["BA_by_backdoor"],
        **_durability(rounds),
        "rounds": len(rounds),
        "seconds": sum(seconds.values()),
        "seconds_by_step": seconds,
    }


def _durability(rounds: Sequence[Record]) -> Record:
    """Return BA over all rounds since the attack began, and how long it outlives the attack."""
    attacked = [record["attacked"] for record in rounds]
    accuracies = [record["BA"] for record in rounds]
    first = attacked.index(True) if any(attacked) else len(rounds)
    return {
        "BA_cumulative": mean(accuracies[first:]),
        **{key: lifespan(attacked, accuracies, limit) for key, limit in LIFESPANS.items()},
        ROUNDS_AFTER: rounds_after_attack(attacked),
    }
