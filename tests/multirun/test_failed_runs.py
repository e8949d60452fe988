"""The end of a sweep: failed runs are listed and the exit code tells, whatever else breaks."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handmade_runs import seal

from fedbench.multirun.failed_runs import SHOWN, failed_runs, print_failed_runs
from fedbench.multirun.hydra_callback import SweepCallback
from fedbench.results.run_reader import METRICS

FINISHED = json.dumps({"status": "finished", **dict.fromkeys(METRICS, 0.5)})
FAILED = json.dumps({"status": "failed", "error": "RuntimeError: boom"})


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the folders of a sweep, by the state of its runs."""
    states = {"good": FINISHED, "failed": FAILED, "damaged": "{", "wrong": "[]", "killed": None}
    folders = {}
    for state, summary in states.items():
        folders[state] = tmp_path / state
        folders[state].mkdir()
        (folders[state] / "config.yaml").write_text("defense: {name: krum}\nseed: 0\n")
        if summary is not None:
            (folders[state] / "summary.json").write_text(summary)
        seal(folders[state])
    folders["absent"] = tmp_path / "absent"
    return folders


def ending(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> int:
    """Exit code of a sweep of these runs."""
    monkeypatch.setattr(SweepCallback, "runs", {folder: folder.name for folder in folders})
    config: Any = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir="runs")))
    try:
        SweepCallback().on_multirun_end(config)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_every_run_that_has_not_finished_is_listed(sweep: dict[str, Path]) -> None:
    found = failed_runs({folder: f"seed={state}" for state, folder in sweep.items()})
    assert [line.partition(" (")[0] for line in found] == [
        f"seed={state}" for state in ("failed", "damaged", "wrong", "killed", "absent")
    ]
    assert found[0] == "seed=failed (failed): failed: RuntimeError: boom"
    assert "summary.json has no checksum" in found[1]
    assert found[4].endswith("did not start, see above")


def test_the_list_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    print_failed_runs([f"seed={seed}: failed" for seed in range(100)], 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "100 of 200 runs failed:"
    assert len(lines) == SHOWN + 2
    assert lines[-1] == "  and 80 more"


@pytest.mark.parametrize("state", ["failed", "damaged", "wrong", "killed", "absent"])
def test_a_sweep_with_a_failed_run_ends_with_an_error(
    state: str,
    sweep: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ending(monkeypatch, sweep["good"], sweep[state]) == 1
    output = capsys.readouterr()
    assert "krum" in output.out
    assert output.err.startswith(f"1 of 2 runs failed:\n  {state} ({state}): ")
    assert ending(monkeypatch, sweep["good"]) == 0


@pytest.mark.parametrize("error", [ValueError("broken"), OSError(28, "No space left on device")])
def test_a_table_that_cannot_be_printed_hides_no_failed_run(
    error: Exception,
    sweep: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("fedbench.report.table.print_comparison", broken)
    assert ending(monkeypatch, sweep["good"]) == 1
    assert ending(monkeypatch, sweep["good"], sweep["failed"]) == 1
    _, listed, reason = capsys.readouterr().err.splitlines()[1:]
    assert listed == "  failed (failed): failed: RuntimeError: boom"
    assert reason.startswith("fedbench: ")


def test_a_closed_pipe_hides_no_failed_run(
    sweep: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`| head` has read enough; the job files of a sweep without failures are still removed."""
    jobs = tmp_path / "jobs"
    for folders, code in (([sweep["good"]], 0), ([sweep["good"], sweep["failed"]], 1)):
        reader, writer = os.pipe()
        os.close(reader)
        jobs.mkdir()
        monkeypatch.setattr(SweepCallback, "job_files", jobs)
        with io.TextIOWrapper(open(writer, "wb", buffering=0), write_through=True) as closed:
            monkeypatch.setattr("sys.stdout", closed)
            assert ending(monkeypatch, *folders) == code
            monkeypatch.undo()
        assert jobs.exists() == (code == 1)


def test_a_sweep_of_no_runs_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweeper picked its runs one by one, and picked none."""
    assert ending(monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fedbench: no folder runs"
