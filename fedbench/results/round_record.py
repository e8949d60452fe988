"""The record of a round: one line of rounds.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench.defense import Aggregate
from fedbench.engine.client_selection import Participant, Round
from fedbench.metrics import auc, mean, rates, stealth
from fedbench.ops import norms_and_cosines
from fedbench.results.run_dir import Record
from fedbench.update_screening import Screened


def round_record(
    round_: Round,
    pdr: float,
    applied: bool,
    accuracies: tuple[float | None, Sequence[float | None]],
    threshold: float | None,
    clients: list[Record],
    seconds: dict[str, float],
) -> Record:
    """`accuracies` are MA and the BA of each backdoor, None if not measured in this round."""
    ma, ba = accuracies
    tpr, tnr = rates(clients)
    scored = [client for client in clients if client["score"] is not None]
    attacked = round_.n_malicious > 0
    return {
        "round": round_.index,
        "attacked": attacked,
        "pdr": pdr if attacked else None,
        "applied": applied,
        "MA": ma,
        "BA": mean(ba),
        "TPR": tpr,
        "TNR": tnr,
        "AUC": auc([c["score"] for c in scored], [c["malicious"] for c in scored]),
        "threshold": threshold,
        **stealth(clients),
        "BA_by_backdoor": {str(i): value for i, value in enumerate(ba)},
        "seconds": seconds,
        "clients": clients,
    }


def client_records(
    participants: Sequence[Participant], aggregate: Aggregate, screened: Screened
) -> list[Record]:
    """What the server did with each client, and how its update compares to the honest ones."""
    refused = screened.refused
    honest = [i for i, p in enumerate(participants) if not p.malicious and i not in refused]
    norms, cosines = norms_and_cosines(screened.updates, honest)
    columns = {
        "accepted": aggregate.accepted,
        "score": aggregate.scores,
        "weight": aggregate.weights,
        "norm": norms,
        "cosine": cosines,
    }
    records: list[Record] = [{"id": p.client, "malicious": p.malicious} for p in participants]
    for key, column in columns.items():
        values = [None] * len(records) if column is None else column.tolist()
        for record, value in zip(records, values, strict=True):
            record[key] = value
    if len(honest) < 2:  # no other honest client to compare with
        for i in honest or range(len(participants)):
            records[i]["cosine"] = None
    for key, column in aggregate.details.items():
        for i, value in enumerate(column.tolist()):
            if i not in refused:
                records[i].setdefault("details", {})[key] = value
    for i, reason in refused.items():
        records[i] |= {"refused": reason, "score": None, "norm": None, "cosine": None}
    return records


def without_accuracies(record: Record) -> Record:
    """The record of the same round if it had not been evaluated."""
    by_backdoor = dict.fromkeys(record["BA_by_backdoor"])
    return {**record, "MA": None, "BA": None, "BA_by_backdoor": by_backdoor}
