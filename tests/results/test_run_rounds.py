"""The rounds of a run as columns, and where scores separate verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import seal

from fedbench.errors import UserError
from fedbench.results.run_reader import RunResult
from fedbench.results.run_rounds import RunRounds, Verdicts, read_run_rounds


def client(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "malicious": False, "accepted": True, "score": 0.5, **more}


def record(index: int, *clients: dict[str, Any], **more: Any) -> dict[str, Any]:
    rates = {"BA": 0.25 * index, "MA": None, "TPR": 1, "TNR": 0.5, "AUC": None}
    seconds = {"train": 2.0, "aggregate": 0.25}
    return {
        **{"round": index, "attacked": index > 0, **rates, "seconds": seconds},
        "clients": list(clients),
        **more,
    }


def write(folder: Path, *records: dict[str, Any] | str) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    (folder / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
    seal(folder)
    return folder


def rounds_of(folder: Path) -> RunRounds:
    return read_run_rounds(RunResult(folder, "unfinished", {}, {}, id=folder.name))


def test_columns_by_hand(tmp_path: Path) -> None:
    refused = client(9, accepted=False, score=None, malicious=True, refused="not finite")
    write(tmp_path, record(0, client(4), refused), record(1, client(4, score=2), threshold=1.5))
    rounds = rounds_of(tmp_path)
    assert len(rounds) == 2
    assert rounds.index == [0, 1]
    assert rounds.attacked == [False, True]
    assert rounds.rates["BA"] == [0, 0.25]
    assert rounds.rates["MA"] == [None, None]
    assert rounds.seconds == {"train": 4.0, "aggregate": 0.5}
    assert rounds.verdicts[0] == Verdicts(
        clients=[4, 9],
        malicious=[False, True],
        accepted=[True, False],
        refused=[False, True],
        scores=[0.5, None],
        threshold=None,  # as in runs of older versions, which record none
    )
    assert rounds.verdicts[1].threshold == 1.5


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, record(0, client(1)))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1, "MA"')
    assert rounds_of(tmp_path).index == [0]


def test_a_run_without_rounds_has_none(tmp_path: Path) -> None:
    assert len(rounds_of(tmp_path)) == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{}", "not the record of a round"),
        ('{"round": 0}', "no 'seconds'"),
        ("[1]", "has no checksum"),
        ("null", "has no checksum"),
        (json.dumps(record(0, BA="high")), "'high' is no number"),
        (json.dumps(record(0, MA=True)), "True is no number"),
        (json.dumps(record(0, {"id": 1})), "no 'malicious'"),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, line: str, reason: str) -> None:
    write(tmp_path, line)
    with pytest.raises((ValueError, UserError), match=r"rounds\.jsonl") as caught:
        rounds_of(tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def verdicts(accepted: list[Any], scores: list[Any], threshold: float | None = None) -> Verdicts:
    n = len(scores)
    return Verdicts([*range(n)], [False] * n, accepted, [False] * n, scores, threshold)


def test_the_cut_is_the_threshold_of_the_rule() -> None:
    assert verdicts([True, False], [1, 2], threshold=1.25).cut == (1.25, 1.25)


def test_without_a_threshold_the_cut_lies_between_the_verdicts() -> None:
    assert verdicts([True, True, False, False], [1, 3, 8, 5]).cut == (3, 5)
    assert verdicts([True, False], [3, 3]).cut == (3, 3)


@pytest.mark.parametrize(
    ("accepted", "scores"),
    [
        ([True, False, True], [1, 2, 3]),  # verdicts do not follow the scores
        ([True, True], [1, 2]),  # nobody was rejected
        ([False, False], [1, 2]),
        ([None, None], [1, 2]),  # the rule judges nobody
        ([True, False], [None, None]),
        ([], []),
    ],
)
def test_no_cut(accepted: list[Any], scores: list[Any]) -> None:
    assert verdicts(accepted, scores).cut is None
