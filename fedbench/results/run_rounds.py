"""The rounds of a run, column by column: what reports draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench.results.run_reader import RunResult, read_rounds

RATES = ("BA", "MA", "TPR", "TNR", "AUC")  # of a round


@dataclass(frozen=True)
class Verdicts:
    """What a defense did with the clients of one round; entry i of each list is one client."""

    clients: list[int]  # ids
    malicious: list[bool]
    accepted: list[bool | None]  # None if the defense judges no client
    refused: list[bool]  # by the screening, before the defense
    scores: list[float | None]  # higher is more suspicious
    threshold: float | None  # no accepted client scores above it; None if the rule has none

    @property
    def cut(self) -> tuple[float, float] | None:
        """Where the scores separate the verdicts: twice the threshold, if the rule has one.

        Otherwise the highest score of an accepted client and the lowest one of a rejected client,
        or None if verdicts do not follow the scores.
        """
        if self.threshold is not None:
            return self.threshold, self.threshold
        judged = [
            (score, accepted)
            for score, accepted in zip(self.scores, self.accepted, strict=True)
            if score is not None and accepted is not None
        ]
        kept = [score for score, accepted in judged if accepted]
        rejected = [score for score, accepted in judged if not accepted]
        if not kept or not rejected or max(kept) > min(rejected):
            return None
        return max(kept), min(rejected)


@dataclass(frozen=True)
class RunRounds:
    """All rounds of a run so far."""

    index: list[int]  # number of each round, from 0
    attacked: list[bool]
    rates: Mapping[str, list[float | None]]  # RATES by round; None where not measured or undefined
    seconds: Mapping[str, float]  # total by step: train, aggregate, ...
    verdicts: list[Verdicts]  # by round

    def __len__(self) -> int:
        return len(self.index)


def read_run_rounds(run: RunResult) -> RunRounds:
    """Read rounds.jsonl; ValueError or UserError, in one line, if it is damaged."""
    records = read_rounds(run)
    try:
        return _columns(records)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"rounds.jsonl: not a record of a round ({reason})") from error


def _columns(records: Sequence[Mapping[str, Any]]) -> RunRounds:
    seconds: dict[str, float] = {}
    for record in records:
        for step, value in record["seconds"].items():
            seconds[step] = seconds.get(step, 0.0) + value
    return RunRounds(
        index=[int(record["round"]) for record in records],
        attacked=[bool(record["attacked"]) for record in records],
        rates={key: [_number(record[key]) for record in records] for key in RATES},
        seconds=seconds,
        verdicts=[_verdicts(record) for record in records],
    )


def _verdicts(record: Mapping[str, Any]) -> Verdicts:
    clients = record["clients"]
    return Verdicts(
        clients=[client["id"] for client in clients],
        malicious=[client["malicious"] is True for client in clients],
        accepted=[client["accepted"] for client in clients],
        refused=["refused" in client for client in clients],
        scores=[_number(client["score"]) for client in clients],
        threshold=_number(record.get("threshold")),
    )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
