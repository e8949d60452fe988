"""What W&B stores of a run: its settings; per round: numbers, score histograms, client rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.results.run_reader import STEALTH
from fedbench.results.settings import Value, flat

if TYPE_CHECKING:
    import wandb

# Columns of the table of clients that a session logs at its end.
RECORDED = ("malicious", "accepted", "score", "weight", "norm", "cosine")
CLIENT_COLUMNS = ("round", "client", *RECORDED)
# Keys of a round that are logged under their own names.
LOGGED = ("MA", "BA", "TPR", "TNR", "AUC", "pdr", *STEALTH)
# Keys whose least and greatest value over the rounds are in the summary: `BA_min`, `BA_max`.
RANGED = ("MA", "BA", "TPR", "TNR", "AUC")
# Groups named by the user's choice. `defense=baybfed_literal` is a variant of the plugin `baybfed`.
CHOSEN = ("defense", "attack", "dataset", "model")
N_BINS = 64  # as many as W&B shows


def config_key(key: str) -> str:
    """Return the W&B name of a flat setting: `attack__alpha` for `attack.alpha`.

    W&B reads a dot as a step into a nested value, and its filters accept letters, digits and
    underscores only. Two underscores, since `attack_start` is a setting of its own.
    """
    return key.replace(".", "__")


def config_values(
    settings: Mapping[str, Any], choices: Mapping[str, str | None]
) -> dict[str, Value]:
    """Return all settings as plain strings and numbers, which W&B can group and filter by."""
    values = flat(settings)
    chosen = {group: choices.get(group) for group in CHOSEN}
    values |= {group: name for group, name in chosen.items() if name is not None}
    return {config_key(key): value for key, value in values.items()}


def ranges(known: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Return the least and the greatest value so far, given those before this round.

    W&B's `define_metric` does the same, but it replaces `BA` in the summary by a dictionary, which
    tables, scatter plots and bar charts cannot show.
    """
    found = dict(known)
    for key in RANGED:
        if key in values:
            found[f"{key}_min"] = min(values[key], known.get(f"{key}_min", values[key]))
            found[f"{key}_max"] = max(values[key], known.get(f"{key}_max", values[key]))
    return found


def history(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round by their W&B names, without those that are undefined."""
    values = {name: record.get(name) for name in LOGGED}
    values |= {f"BA/{name}": value for name, value in record.get("BA_by_backdoor", {}).items()}
    values |= {f"seconds/{step}": value for step, value in record["seconds"].items()}
    judged = [c["accepted"] for c in record["clients"] if c["accepted"] is not None]
    values["n_accepted"] = sum(judged) if judged else None
    numbers = {name: _finite(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def score_histograms(record: Mapping[str, Any]) -> dict[str, wandb.Histogram]:
    """Return the scores of the benign and of the malicious clients as histograms of equal bins.

    Side by side they show whether the defense can tell the clients apart. One number per client
    would be one chart per client.
    """
    import wandb

    scores: dict[str, list[float]] = {"scores/benign": [], "scores/malicious": []}
    for client in record["clients"]:
        score = _finite(client["score"])
        if score is not None:
            scores["scores/malicious" if client["malicious"] else "scores/benign"] += [float(score)]
    edges = _bin_edges([score for group in scores.values() for score in group])
    return {
        name: wandb.Histogram(np_histogram=np.histogram(group, bins=edges))
        for name, group in scores.items()
        if group
    }


def client_rows(record: Mapping[str, Any]) -> list[list[Any]]:
    """Return the rows of a round for the table of clients, in the order of CLIENT_COLUMNS."""
    return [
        [record["round"], c["id"], *(_finite(c[key]) for key in RECORDED)]
        for c in record["clients"]
    ]


def _finite(value: Any) -> Any:
    """Return the value, or None for NaN and infinity, which rounds.jsonl records as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bin_edges(scores: Sequence[float]) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return np.histogram_bin_edges(scores, bins=N_BINS)
    except (ValueError, FloatingPointError):
        # The range is too wide or too narrow to divide, like -1e308 to 1e308.
        return np.array([min(scores), max(scores)])
