"""The run directory: a round counts only once it is checkpointed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_checkpoint import CHECKPOINT, CPU

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.run_dir import RunDir
from fedbench.results.summary import summarise


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def record(index: int, **values: Any) -> dict[str, Any]:
    """Return a line of rounds.jsonl; `values` replace some of its keys."""
    clients = [
        {"id": 0, "malicious": False, "accepted": True, "score": 0.1, "weight": 1.0},
        {"id": 1, "malicious": True, "accepted": False, "score": 0.9, "weight": 0.0},
    ]
    return {
        "round": index,
        "attacked": True,
        "MA": 0.5 + index / 10,
        "BA": 0.1,
        "TPR": 1.0,
        "TNR": 1.0,
        "AUC": 1.0,
        "norm_ratio": 2.0,
        "cosine": 0.5,
        "benign_cosine": 0.7,
        "BA_by_backdoor": {"0": 0.1},
        "seconds": {"train": 1.0, "aggregate": 0.5, "evaluate": 0.25},
        "clients": clients,
    } | values


def test_resume_drops_torn_lines_and_rounds_after_the_checkpoint(folder: RunDir) -> None:
    for index in range(3):
        folder.record(record(index))
    with folder.rounds_file.open("ab") as file:
        file.write(b'{"round": 3, "MA": 0.')
    folder.checkpoint(CHECKPOINT)
    resumed = folder.resume(CPU)
    assert resumed is not None
    assert resumed.next_round == 2
    assert [line["round"] for line in folder.rounds()] == [0, 1]
    folder.record(record(2))
    assert [line["round"] for line in folder.rounds()] == [0, 1, 2]


def test_an_unreadable_checkpoint_is_a_user_error_on_resume(folder: RunDir) -> None:
    folder.checkpoint_file.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"checkpoint.pt is unreadable.*delete it to start over"):
        folder.resume(CPU)


def test_a_checkpoint_without_its_rounds_is_a_user_error(folder: RunDir) -> None:
    folder.record(record(0))
    folder.checkpoint(CHECKPOINT)
    with pytest.raises(UserError, match="has 1 rounds, its checkpoint 2; delete"):
        folder.resume(CPU)


def test_rounds_without_a_checkpoint_are_discarded(folder: RunDir) -> None:
    folder.record(record(0))
    assert folder.resume(CPU) is None
    assert folder.rounds() == []


def test_nan_and_infinity_are_written_as_null(folder: RunDir) -> None:
    folder.record(record(0, MA=float("nan"), clients=[{"score": float("inf"), "weight": -0.5}]))
    line = json.loads(folder.rounds_file.read_text())
    assert line["MA"] is None
    assert line["clients"] == [{"score": None, "weight": -0.5}]


def test_only_a_finished_summary_counts_as_finished(folder: RunDir) -> None:
    assert folder.finished() is None
    folder.finish({"status": "failed", "error": "boom"})
    assert folder.finished() is None
    folder.finish(summarise([record(0)]))
    assert folder.finished() is not None


def test_config_yaml_is_complete_and_written_once(folder: RunDir) -> None:
    config = RunConfig(defense={"name": "krum", "f": None}, pmr=0.3)
    folder.start(config)
    written = (folder.path / "config.yaml").stat().st_mtime_ns
    read = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert read["pmr"] == 0.3
    assert read["defense"] == {"name": "krum", "f": None}
    assert set(read) == set(RunConfig.__dataclass_fields__) - {"rerun"}  # of the command
    folder.start(config)
    assert (folder.path / "config.yaml").stat().st_mtime_ns == written
