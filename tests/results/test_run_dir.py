"""The run directory: a round counts only once it is checkpointed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_checkpoint import CHECKPOINT, CPU

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.atomic_files import WriteError
from fedbench.results.origin import Origin
from fedbench.results.run_dir import RunDir
from fedbench.results.summary import summarise


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    (tmp_path / "krum-1").mkdir()
    return RunDir(tmp_path / "krum-1")


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
    with folder.rounds_file.path.open("ab") as file:
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
    with pytest.raises(UserError, match=r"checkpoint.pt has no checksum.*; delete .* and repeat"):
        folder.resume(CPU)


def test_a_checkpoint_without_its_rounds_is_a_user_error(folder: RunDir) -> None:
    folder.record(record(0))
    folder.checkpoint(CHECKPOINT)
    with pytest.raises(UserError, match="has 1 rounds, the checkpoint 2; delete"):
        folder.resume(CPU)


def test_rounds_without_a_checkpoint_are_discarded(folder: RunDir) -> None:
    folder.record(record(0))
    assert folder.resume(CPU) is None
    assert folder.rounds() == []


def test_nan_and_infinity_are_written_as_null(folder: RunDir) -> None:
    folder.record(record(0, MA=float("nan"), clients=[{"score": float("inf"), "weight": -0.5}]))
    line = json.loads(folder.rounds_file.path.read_text())
    assert line["MA"] is None
    assert line["clients"] == [{"score": None, "weight": -0.5}]


def test_only_a_finished_summary_counts_as_finished(folder: RunDir) -> None:
    assert folder.finished() is None
    folder.finish({"status": "failed", "error": "boom"})
    assert folder.finished() is None
    folder.record(record(0))
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


def test_files_are_those_of_the_run_or_are_made_again(folder: RunDir) -> None:
    """What the settings decide can be written again; the rest of a run starts from it."""
    config, origin = RunConfig(defense={"name": "krum"}), Origin({}, {"lr": 1}, ())
    assert folder.start(config, origin) == []
    folder.record(record(0))
    folder.finish(summarise(folder.rounds()))
    names = ("config.yaml", "origin.json", "summary.json")
    whole = {name: (folder.path / name).read_bytes() for name in names}
    other = RunDir(folder.path.parent / "other")
    other.path.mkdir()
    other.start(config, origin)
    other.finish({"status": "failed"})
    for damage in (b"", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"check": 5}', None, "other"):
        for name in names:
            path = folder.path / name
            if damage is None:
                path.unlink()
                path.mkdir()
            else:
                foreign = (other.path / name).read_bytes()
                path.write_bytes(foreign if isinstance(damage, str) else damage)
        lines = folder.start(config, origin)
        assert len(lines) == 3
        assert not any("\n" in line for line in lines)
        assert folder.finished() is None
        for name in names[:2]:
            assert (folder.path / name).read_bytes() == whole[name]
        assert not folder.summary_file.exists()
        folder.finish(summarise(folder.rounds()))
        assert folder.summary_file.read_bytes() == whole["summary.json"]
        assert folder.start(config, origin) == []


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: [lines[0], *lines], "line 2 is damaged, or does not follow line 1"),
        (swapped, "line 1 is damaged, or does not begin the run"),
        (lambda lines: [lines[0], lines[2]], "line 2 is damaged, or does not follow line 1"),
        (lambda lines: [lines[0], lines[1].replace(b"0.6", b"0.9"), lines[2]], "line 2 is damaged"),
        (lambda lines: [lines[0], b"{}\n", lines[2]], "line 2 has no checksum"),
        (lambda lines: lines[:1], "has 1 rounds, the checkpoint 2"),
        (lambda lines: [b""], "has 0 rounds, the checkpoint 2"),
    ],
)
def test_rounds_that_are_not_those_written_are_never_used(
    folder: RunDir, change: Any, reason: str
) -> None:
    for index in range(3):
        folder.record(record(index))
    folder.checkpoint(CHECKPOINT)
    folder.finish(summarise(folder.rounds()))
    path = folder.rounds_file.path
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    assert folder.finished() is None
    with pytest.raises(UserError) as caught:
        folder.resume(CPU)
    assert str(caught.value).startswith(f"{path} {reason}")
    assert str(caught.value).endswith(f"; delete {folder.path} and repeat the command")
    assert path.read_bytes() == before


def test_records_of_another_run_are_refused(folder: RunDir) -> None:
    other = RunDir(folder.path.parent / "other")
    other.path.mkdir()
    other.record(record(0))
    folder.rounds_file.path.write_bytes(other.rounds_file.path.read_bytes())
    with pytest.raises(UserError, match="line 1 is damaged, or does not begin the run"):
        folder.rounds()


def test_rounds_are_numbered(folder: RunDir) -> None:
    folder.record(record(0))
    folder.record(record(2))
    with pytest.raises(UserError, match="line 2 is round 2, expected 1"):
        folder.rounds()


def test_what_killed_processes_left_is_removed(folder: RunDir) -> None:
    for name in (".summary.json.partial", ".checkpoint.pt.partial"):
        (folder.path / name).write_bytes(b"half")
    folder.resume(CPU)
    assert [*folder.path.iterdir()] == []


def test_a_full_disk_keeps_the_rounds_so_far(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.record(record(0))
    folder.record(record(1))
    folder.checkpoint(CHECKPOINT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match=f"no space left on the disk of {folder.path}; free"):
            folder.record(record(2))
        with pytest.raises(WriteError, match=f"no space left on the disk of {folder.path}; free"):
            folder.checkpoint(CHECKPOINT)
    assert folder.resume(CPU) is not None
    assert len(folder.rounds()) == 2


def full(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
