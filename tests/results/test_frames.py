"""Runs as DataFrames: every run, round and client is there, whatever became of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from handmade_runs import seal

import fedbench

Write = Callable[..., Path]
STEALTH = {"norm_ratio": 1.5, "cosine": 0.5, "benign_cosine": 0.9}
SUMMARY = {
    "status": "finished",
    **{"MA": 0.8, "BA": 0.1, "TPR": None, "TNR": None, "AUC": None, "seconds": 2.0},
    "BA_by_backdoor": {"0": 0.05, "1": 0.15},
}


def record(index: int, *clients: dict[str, Any]) -> dict[str, Any]:
    rates = {"MA": index / 4, "BA": None, "TPR": None, "TNR": 1.0, "AUC": None}
    return {
        **{"round": index, "attacked": index > 0, "pdr": None, "applied": True, **rates, **STEALTH},
        "BA_by_backdoor": {"0": None, "1": None},
        "seconds": {"train": 1.0, "evaluate": 0.5},
        "clients": list(clients),
    }


def client(number: int, **more: Any) -> dict[str, Any]:
    verdict = {"accepted": None, "score": None, "weight": 0.5, "norm": 2.0, "cosine": None}
    return {"id": number, "malicious": number == 0, **verdict, **more}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a run directory."""

    def write(
        name: str, summary: dict[str, Any] | None, *rounds: dict[str, Any], **settings: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {
            "defense": {"name": name.partition("-")[0]},
            "attack": {"name": "dba", "parts": 4},
            "dataset": {"name": "mnist"},
            **{"pmr": 0.2, "n_clients": 30, "pool": None, "seed": 0},
            **settings,
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        seal(folder)
        lines = "".join(json.dumps(line) + "\n" for line in rounds)
        (folder / "rounds.jsonl").write_text(lines)
        seal(folder)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
            seal(folder)
        return folder

    return write


def test_a_row_has_status_metrics_and_every_setting(tmp_path: Path, write: Write) -> None:
    folder = write("krum-1", SUMMARY, defense={"name": "krum", "f": 2}, n_clients=[40, 90])
    (row,) = fedbench.load(tmp_path).to_dict("records")
    assert (row["status"], row["reason"], row["folder"]) == ("finished", "", str(folder))
    assert (row["MA"], row["BA"], row["seconds"]) == (0.8, 0.1, 2.0)  # not percent
    assert (row["BA/0"], row["BA/1"]) == (0.05, 0.15)
    assert (row["defense"], row["defense.f"], row["attack.parts"]) == ("krum", 2, 4)
    assert row["n_clients"] == "[40, 90]"
    assert pd.isna([row["TPR"], row["pool"], row["norm_ratio"]]).all()


def test_columns_start_with_what_identifies_a_run(tmp_path: Path, write: Write) -> None:
    write("krum-1", SUMMARY)
    columns = list(fedbench.load(tmp_path))
    assert columns[:8] == ["defense", "attack", "dataset", "pmr", "seed", "status", "BA", "MA"]
    assert columns[-2:] == ["folder", "reason"]
    assert len(set(columns)) == len(columns)


def test_failed_unfinished_and_damaged_runs_are_rows(tmp_path: Path, write: Write) -> None:
    write("krum-1", {"status": "failed", "error": "RuntimeError: boom"}, record(0))
    write("flame-1", None, record(0), record(1))
    write("afa-1", SUMMARY)
    (write("dp-1", None) / "config.yaml").write_text("[")
    runs = fedbench.load(tmp_path).set_index("defense").sort_index()
    assert (
        runs.status.to_dict() | {"krum": "failed", "flame": "unfinished"} == runs.status.to_dict()
    )
    assert runs.loc["krum", "reason"] == "RuntimeError: boom"
    assert sorted(runs.status) == ["failed", "finished", "unfinished", "unreadable"]
    assert runs.MA.count() == 1
    assert str(runs.MA.dtype) == str(runs.TPR.dtype) == "float64"
    assert len(fedbench.load_rounds(tmp_path / "krum-1", tmp_path / "flame-1")) == 3
    with pytest.raises(fedbench.UserError, match=r"dp-1.*config\.yaml has no checksum"):
        fedbench.load_rounds(tmp_path)


def test_several_folders_a_single_run_and_the_default(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write("runs/a/krum-1", SUMMARY), write("runs/b/flame-1", SUMMARY)
    assert list(fedbench.load(first).folder) == [str(first)]
    assert list(fedbench.load(second, str(first), second).folder) == [str(second), str(first)]
    monkeypatch.chdir(tmp_path)
    assert len(fedbench.load()) == 2
    with pytest.raises(fedbench.UserError, match="no folder nowhere"):
        fedbench.load("nowhere")


def test_settings_of_one_plugin_are_missing_for_the_others(tmp_path: Path, write: Write) -> None:
    write("krum-1", SUMMARY, defense={"name": "krum", "f": 2})
    write("median-1", SUMMARY)
    by_defense = fedbench.load(tmp_path).set_index("defense")["defense.f"]
    assert by_defense["krum"] == 2
    assert pd.isna(by_defense["median"])


def test_rounds_have_a_row_each(tmp_path: Path, write: Write) -> None:
    folder = write("krum-1", SUMMARY, record(0), record(1), pmr=0.3)
    rounds = fedbench.load_rounds(tmp_path)
    assert list(rounds["round"]) == [0, 1]
    assert list(rounds.attacked) == [False, True]
    assert list(rounds.MA) == [0, 0.25]
    assert rounds.BA.isna().all()
    assert str(rounds.BA.dtype) == str(rounds["BA/1"].dtype) == "float64"
    assert set(rounds.seconds) == {1.5}
    assert set(rounds["seconds.train"]) == {1.0}
    assert set(rounds.defense) == {"krum"}
    assert set(rounds.pmr) == {0.3}
    assert set(rounds.folder) == {str(folder)}
    assert "clients" not in rounds


def test_clients_have_a_row_for_each_round(tmp_path: Path, write: Write) -> None:
    judged = client(1, accepted=True, score=0.5, details={"cluster": 3})
    write("krum-1", SUMMARY, record(0, client(0), judged), record(1, client(0, refused="nan")))
    clients = fedbench.load_clients(tmp_path)
    assert list(zip(clients["round"], clients.client, strict=True)) == [(0, 0), (0, 1), (1, 0)]
    assert list(clients.malicious) == [True, False, True]
    assert str(clients.accepted.dtype) == "boolean"
    assert list(clients.accepted.isna()) == [True, False, True]
    assert clients.score.sum() == 0.5
    assert clients["details.cluster"].sum() == 3
    assert clients.refused.dropna().tolist() == ["nan"]


def test_runs_without_rounds_give_empty_frames(tmp_path: Path, write: Write) -> None:
    write("krum-1", None)
    for frame in (fedbench.load_rounds(tmp_path), fedbench.load_clients(tmp_path)):
        assert len(frame) == 0
        assert {"defense", "round", "folder"} <= set(frame)


def test_an_incomplete_last_line_is_dropped_and_damage_is_named(
    tmp_path: Path, write: Write
) -> None:
    lines = write("krum-1", None, record(0), record(1)) / "rounds.jsonl"
    lines.write_text(lines.read_text()[:-10])  # killed while writing
    assert list(fedbench.load_rounds(tmp_path)["round"]) == [0]
    lines.write_text("{]\n")
    assert list(fedbench.load(tmp_path).status) == ["unreadable"]
    with pytest.raises(fedbench.UserError, match=r"rounds\.jsonl line 1 has no checksum"):
        fedbench.load_rounds(tmp_path)
