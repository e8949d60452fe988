"""Runs as pandas DataFrames: one row per run, per round or per client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.results.run_reader import (
    DURABILITY,
    METRICS,
    STEALTH,
    RunResult,
    read_rounds,
    read_runs,
)

if TYPE_CHECKING:  # the command line does without pandas
    import pandas as pd

    Rows = Iterable[Mapping[str, Any]]

IDENTITY = ("defense", "attack", "dataset", "pmr", "seed")  # settings that open every row
DEFAULT_FOLDERS = ("runs",)  # where runs are unless `out` is set


def load(*folders: str | Path) -> pd.DataFrame:
    """Load runs as a DataFrame, one row per run, whether finished or not.

    The columns are:

    - `status`: finished, failed, unfinished or unreadable
    - `BA`, `MA`, `TPR`, `TNR`, `AUC`: rates between 0 and 1, NaN if undefined or not finished
    - `seconds`, `norm_ratio`, `cosine`, `benign_cosine`, and `BA/0`, ... for each backdoor
    - `BA_cumulative`, `lifespan_50`, `lifespan_10`, `rounds_after_attack`: what follows the attack
    - every setting: `defense` is the name of the defense, `defense.f` its setting `f`. Lists are
      JSON, such as `[40, 90]`. A setting that a run lacks is missing.
    - `folder`, and the `reason` why a run failed or could not be read

    Args:
        folders: run directories, or folders with runs below them. Default: `runs`.

    Raises:
        UserError: if a folder does not exist or has no runs.

    Examples:
        >>> runs = fedbench.load("runs/default")
        >>> runs.pivot(index="pmr", columns="defense", values="status")
        defense      krum    median
        pmr
        0.2      finished  finished
        >>> runs.loc[:, runs.nunique() > 1].columns[0]  # the settings that differ
        'defense'
    """
    return frame_of(read_runs(folders or DEFAULT_FOLDERS))


def load_rounds(*folders: str | Path) -> pd.DataFrame:
    """Load rounds as a DataFrame, one row per run and round, also of unfinished runs.

    The columns are `defense`, `attack`, `dataset`, `pmr`, `seed`, the keys of
    [rounds.jsonl](run-directory.md#roundsjsonl) without `clients`, and `folder`. `seconds` is the
    duration of the round, `seconds.train` that of a step. For other settings, merge with `load` on
    `folder`.

    Args:
        folders: as for `load`.

    Examples:
        >>> rounds = fedbench.load_rounds("runs/default")
        >>> rounds.pivot(index="round", columns="defense", values="MA").shape
        (2, 2)
    """
    frame = _long(folders, lambda record: [_round_row(record)], _round_row({}))
    others = (*IDENTITY, "round", "attacked", "applied", "folder")
    return frame.astype({name: float for name in frame if name not in others})


def load_clients(*folders: str | Path) -> pd.DataFrame:
    """Load the verdicts on clients as a DataFrame, one row per run, round and client.

    The columns are `defense`, `attack`, `dataset`, `pmr`, `seed`, `round`, the keys of a client in
    [rounds.jsonl](run-directory.md#roundsjsonl), where `client` is its id, and `folder`.
    `accepted` and `score` are missing if the defense has none.

    Args:
        folders: as for `load`.

    Examples:
        >>> clients = fedbench.load_clients("runs/default")
        >>> krum = clients[(clients.defense == "krum") & clients.accepted]
        >>> krum["round"].tolist()  # Krum accepts one client in each round
        [0, 1]
    """
    frame = _long(folders, _client_rows, _client_row(0, {}))
    measured = dict.fromkeys(("score", "weight", "norm", "cosine"), float)
    return frame.astype({"accepted": "boolean", **measured})


def frame_of(runs: Sequence[RunResult]) -> pd.DataFrame:
    """Return one row per run."""
    by_backdoor = sorted({name for run in runs for name in run.metrics if "/" in name})
    measured = [*METRICS, *STEALTH, *DURABILITY, *by_backdoor]
    settings = dict.fromkeys(key for run in runs for key in run.config)
    rows = [
        {**run.config, **run.metrics, "status": run.status, **_place(run), "reason": run.reason}
        for run in runs
    ]
    columns = [*IDENTITY, "status", *measured, *settings, "folder", "reason"]
    return _frame(rows, columns).astype(dict.fromkeys(measured, float))


def _long(
    folders: Sequence[str | Path],
    rows_of: Callable[[dict[str, Any]], Rows],
    columns: Iterable[str],
) -> pd.DataFrame:
    """Return the rows of every round of every run; `columns` are those that all rounds have."""
    rows = []
    for run in read_runs(folders or DEFAULT_FOLDERS, check_rounds=False):
        identity = {key: run.config.get(key) for key in IDENTITY}
        for record in read_rounds(run):
            rows += [{**identity, **row, **_place(run)} for row in rows_of(record)]
    found = dict.fromkeys(key for row in rows for key in row)
    return _frame(rows, [*IDENTITY, *columns, *(key for key in found if key != "folder"), "folder"])


def _round_row(record: Mapping[str, Any]) -> dict[str, Any]:
    rates = ("MA", "BA", "TPR", "TNR", "AUC")
    plain = ("round", "attacked", "pdr", "applied", *rates, "threshold", *STEALTH)
    seconds: dict[str, float] = record.get("seconds", {})
    return {
        **{key: record.get(key) for key in plain},
        **{f"BA/{name}": value for name, value in record.get("BA_by_backdoor", {}).items()},
        "seconds": sum(seconds.values()),
        **{f"seconds.{step}": value for step, value in seconds.items()},
    }


def _client_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_client_row(record["round"], client) for client in record["clients"]]


def _client_row(index: int, client: Mapping[str, Any]) -> dict[str, Any]:
    plain = ("malicious", "accepted", "score", "weight", "norm", "cosine", "refused")
    return {
        "round": index,
        "client": client.get("id"),
        **{key: client.get(key) for key in plain},
        **{f"details.{name}": value for name, value in client.get("details", {}).items()},
    }


def _place(run: RunResult) -> dict[str, str]:
    return {"folder": str(run.folder)}


def _frame(rows: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(dict.fromkeys(columns)))
