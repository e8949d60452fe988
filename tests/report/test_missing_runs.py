"""A report names every run that it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from handmade_runs import seal
from sweep_folders import add_sweep

from fedbench.report.comparison import compare
from fedbench.report.missing_runs import missing_runs
from fedbench.report.report_data import read_report_data
from fedbench.results.planned_runs import write_planned_runs
from fedbench.results.run_dir import RunDir
from fedbench.results.run_reader import read_runs

HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def lines(top: Path) -> list[str]:
    runs = read_runs([top])
    return [str(run) for run in missing_runs(runs, compare(runs))]


def test_a_complete_sweep_misses_nothing(tmp_path: Path) -> None:
    folders = add_sweep(tmp_path, "defense=krum,median", "seed=0,1")
    write_planned_runs(tmp_path, {folder.name: "some run" for folder in folders})
    assert lines(tmp_path) == []


def test_each_missing_run_is_one_line(tmp_path: Path) -> None:
    failed, unfinished, damaged, old, _ = add_sweep(tmp_path, "defense=krum", "seed=0,1,2,3,3")
    (failed / "summary.json").write_text('{"status": "failed", "error": "out of\\nmemory"}')
    seal(failed)
    (unfinished / "summary.json").unlink()
    (damaged / "summary.json").write_text("{")
    planned = {old.name: "seed=3", "krum-00": "defense=krum seed=4", "krum-01": "seed=5"}
    write_planned_runs(tmp_path, planned)
    found = lines(tmp_path)
    assert found[0] == f"failed: {failed}: out of memory"
    assert found[1] == f"unfinished: {unfinished}"
    assert found[2].startswith(f"unreadable: {damaged}: summary.json has ")
    assert found[3] == f"not counted: {old}: a newer run has the same settings and seed"
    assert found[4].startswith("not started: defense=krum seed=4: ")
    assert [line.partition(":")[0] for line in found[5:]] == ["not started"]


def test_a_run_in_progress_is_running(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, "defense=krum", "seed=0")
    (folder / "summary.json").unlink()
    lock = folder / ".lock"
    lock.touch()
    assert lines(tmp_path) == [f"unfinished: {folder}"]
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert lines(tmp_path) == [f"running: {folder}"]
    finally:
        holder.kill()
        holder.wait()
    assert lines(tmp_path) == [f"unfinished: {folder}"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_lock_of_somebody_else_is_no_error(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, "defense=krum", "seed=0")
    (folder / "summary.json").unlink()
    (folder / ".lock").touch(mode=0o400)
    assert lines(tmp_path) == [f"unfinished: {folder}"]


def test_a_run_with_damaged_rounds_has_no_results(tmp_path: Path) -> None:
    folder, other, lost = add_sweep(tmp_path, "defense=krum,median,flame", "seed=0")
    (folder / "rounds.jsonl").write_text('garbage\n{"round": 0}\n')
    (other / "rounds.jsonl").write_bytes(b"\xff\xfe\n")
    RunDir(lost).record({"round": 0})
    RunDir(lost).finish(json.loads((lost / "summary.json").read_text()))
    (lost / "rounds.jsonl").unlink()
    data = read_report_data([tmp_path])
    assert [run.status for run in data.missing] == ["unreadable"] * 3
    assert data.missing[0].folder == folder
    reasons = [run.reason for run in data.missing]
    assert reasons[0].startswith("rounds.jsonl line 1 has no checksum")
    assert reasons[2].startswith("rounds.jsonl has 0 rounds, but not those in summary.json")
    assert not data.rounds
    assert not any(row.finished for row in data.rows)
    assert [(run.status, run.reason) for run in read_runs([tmp_path])] == [
        ("unreadable", reason) for reason in reasons
    ]


def test_reading_leaves_no_files(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, "defense=krum", "seed=0")
    (folder / "summary.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    read_report_data([tmp_path])
    assert sorted(tmp_path.rglob("*")) == before
