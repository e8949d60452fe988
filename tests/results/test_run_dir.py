"""The run directory: whole files or none, and rounds that count only once checkpointed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.run_dir import (
    Checkpoint,
    RunDir,
    load_checkpoint,
    locked,
    save_checkpoint,
    summarise,
    write_atomically,
)

CHECKPOINT = Checkpoint(
    next_round=2,
    params=torch.arange(3.0),
    buffers=torch.zeros(0),
    initial_params=torch.ones(3),
    initial_buffers=torch.zeros(0),
    defense_state={"seen": {7: torch.ones(2)}, "rounds": [1, 2], "nothing": None},
)


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def record(index: int, **values: Any) -> dict[str, Any]:
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


def test_a_checkpoint_comes_back_as_it_was(folder: RunDir) -> None:
    folder.checkpoint(CHECKPOINT)
    again = load_checkpoint(folder.checkpoint_file)
    assert again.next_round == 2
    assert torch.equal(again.params, CHECKPOINT.params)
    assert again.defense_state["seen"][7].tolist() == [1, 1]
    assert again.defense_state["rounds"] == [1, 2]


def test_an_unreadable_checkpoint_is_told_in_one_line(folder: RunDir) -> None:
    folder.checkpoint_file.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"checkpoint.pt is unreadable.*delete it to start over"):
        folder.resume()


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path.joinpath("owned").touch, ())

    path = tmp_path / "checkpoint.pt"
    torch.save({"params": Evil()}, path)
    with pytest.raises(UserError):
        load_checkpoint(path)
    assert not (tmp_path / "owned").exists()


def test_resume_drops_the_rounds_after_the_checkpoint_and_torn_lines(folder: RunDir) -> None:
    for index in range(3):
        folder.record(record(index))
    with folder.rounds_file.open("ab") as file:
        file.write(b'{"round": 3, "MA": 0.')
    folder.checkpoint(CHECKPOINT)
    resumed = folder.resume()
    assert resumed is not None
    assert resumed.next_round == 2
    assert [line["round"] for line in folder.rounds()] == [0, 1]
    folder.record(record(2))
    assert [line["round"] for line in folder.rounds()] == [0, 1, 2]


def test_a_checkpoint_without_its_rounds_is_told(folder: RunDir) -> None:
    folder.record(record(0))
    folder.checkpoint(CHECKPOINT)
    with pytest.raises(UserError, match="has 1 rounds, its checkpoint 2; delete"):
        folder.resume()


def test_rounds_without_a_checkpoint_are_begun_anew(folder: RunDir) -> None:
    folder.record(record(0))
    assert folder.resume() is None
    assert folder.rounds() == []


def test_what_is_not_a_number_is_null(folder: RunDir) -> None:
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


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def half(file: Any) -> None:
        file.write(b"ne")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_config_yaml_is_complete_and_written_once(folder: RunDir) -> None:
    config = RunConfig(defense={"name": "krum", "f": None}, pmr=0.3)
    folder.start(config)
    written = (folder.path / "config.yaml").stat().st_mtime_ns
    read = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert read["pmr"] == 0.3
    assert read["defense"] == {"name": "krum", "f": None}
    assert set(read) == set(RunConfig.__dataclass_fields__)
    folder.start(config)
    assert (folder.path / "config.yaml").stat().st_mtime_ns == written


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with locked(tmp_path / "deep" / ".lock"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write to"),
        locked(tmp_path / "file" / "x" / ".lock"),
    ):
        pass


def test_the_lock_does_not_hide_errors_of_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(tmp_path / ".lock"):
        (tmp_path / "nothing").read_text()


class TestSummary:
    def test_final_accuracies_and_total_seconds(self) -> None:
        summary = summarise([record(0), record(1)])
        assert summary["MA"] == 0.6
        assert summary["rounds"] == 2
        assert summary["seconds"] == 3.5
        assert summary["seconds_by_step"] == {"train": 2.0, "aggregate": 1.0, "evaluate": 0.5}
        assert summary["versions"]["torch"] == torch.__version__

    def test_rates_add_up_over_the_attacked_rounds_only(self) -> None:
        missed = [{"malicious": True, "accepted": True}, {"malicious": False, "accepted": False}]
        quiet = record(
            0, attacked=False, AUC=None, clients=[{"malicious": False, "accepted": False}]
        )
        attacked = (
            record(1, clients=missed * 3),
            record(2, clients=[*missed, *record(2)["clients"]]),
        )
        summary = summarise([quiet, *attacked])
        # Poisoned: 1 of 5 rejected. Benign, in attacked rounds: 1 of 5 kept.
        assert (summary["TPR"], summary["TNR"]) == (0.2, 0.2)

    def test_without_an_attack_tnr_is_over_all_rounds(self) -> None:
        honest = [{"malicious": False, "accepted": True}] * 3
        rejected = [{"malicious": False, "accepted": False}]
        rounds = [record(i, attacked=False, AUC=None, clients=honest + rejected) for i in range(2)]
        summary = summarise(rounds)
        assert (summary["TPR"], summary["TNR"], summary["AUC"]) == (None, 0.75, None)

    def test_a_rule_that_judges_nobody_has_no_rates(self) -> None:
        unjudged = [{"malicious": bad, "accepted": None} for bad in (True, False)]
        summary = summarise([record(0, clients=unjudged, AUC=None)])
        assert (summary["TPR"], summary["TNR"], summary["AUC"]) == (None, None, None)


def test_checkpoints_replace_one_another(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for next_round in (1, 2):
        save_checkpoint(path, replace(CHECKPOINT, next_round=next_round))
    assert load_checkpoint(path).next_round == 2
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]
