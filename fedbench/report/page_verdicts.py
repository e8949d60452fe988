"""The verdicts on clients for the report page: compressed, decoded when a reader opens a run."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path

from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds, Verdicts

BUDGET = 7_000_000  # characters of all verdicts, to keep the page below 15 MB
SCORE = "%.5g"  # five significant digits


def encode_verdicts(
    data: ReportData, budget: int = BUDGET
) -> tuple[list[str], dict[Path, int], int]:
    """Return the texts, the index of each run's text by folder, and the number of runs left out.

    Runs beyond the first seed of a row are left out first, then later rows.
    """
    texts: list[str] = []
    index: dict[Path, int] = {}
    left_out, size = 0, 0
    for folder in _by_priority(data):
        rounds = data.rounds.get(folder)
        if rounds is None or not any(verdicts.clients for verdicts in rounds.verdicts):
            continue
        if left_out == 0:
            text = encode(rounds)
            if size + len(text) <= budget:
                index[folder] = len(texts)
                texts.append(text)
                size += len(text)
                continue
        left_out += 1
    return texts, index, left_out


def _by_priority(data: ReportData) -> Iterable[Path]:
    """Return the folders of all runs: the first seed of every row, the second ones, ..., others."""
    counted = [[run.folder for run in row.runs] for row in data.rows]
    most = max(map(len, counted), default=0)
    first = [row[n] for n in range(most) for row in counted if n < len(row)]
    return dict.fromkeys([*first, *(run.folder for run in data.runs)])


def encode(rounds: RunRounds) -> str:
    """Return the verdicts of a run as base64 of gzipped JSON, equal for equal input."""
    entries = ",".join(map(_entry, rounds.verdicts))
    compressed = gzip.compress(f'{{"rounds":[{entries}]}}'.encode(), 6, mtime=0)
    return base64.b64encode(compressed).decode("ascii")


def _entry(verdicts: Verdicts) -> str:
    """Return a round as JSON. Written by hand: the standard encoder takes four times as long."""
    cut = verdicts.cut
    malicious = "".join(["1" if bad else "0" for bad in verdicts.malicious])
    limits = "null" if cut is None else "[" + ",".join(map(_number, cut)) + "]"
    return (
        f'{{"ids":{_ids(verdicts.clients)},"state":"{_states(verdicts)}",'
        f'"malicious":"{malicious}","scores":{_scores(verdicts.scores)},"cut":{limits},'
        f'"threshold":{_number(verdicts.threshold)}}}'
    )


def _number(value: float | None) -> str:
    return "null" if value is None or not math.isfinite(value) else f"{value:.6g}"


def _ids(clients: list[int]) -> str:
    if all(type(client) is int for client in clients):
        return "[" + ",".join(map(str, clients)) + "]"
    return json.dumps([str(client) for client in clients])


def _states(verdicts: Verdicts) -> str:
    """Return a letter per client: accepted, rejected, x for refused, - for not judged."""
    letters = ["a" if ok is True else "r" if ok is False else "-" for ok in verdicts.accepted]
    if any(verdicts.refused):
        pairs = zip(letters, verdicts.refused, strict=True)
        letters = ["x" if refused else letter for letter, refused in pairs]
    return "".join(letters)


def _scores(scores: list[float | None]) -> str:
    present = [score for score in scores if score is not None]
    if not present:
        return "null"
    if not math.isfinite(sum(present)):
        scores = [score if score is not None and math.isfinite(score) else None for score in scores]
        present = [score for score in scores if score is not None]
    shown = ",".join(["null" if score is None else SCORE for score in scores])
    return f"[{shown % tuple(present)}]"
