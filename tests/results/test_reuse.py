"""A run that has finished under another name is copied instead of computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end import RUN_FILES, fedbench, fedbench_in_this_process, files, result, summary
from test_checkpoint import CHECKPOINT, CPU
from test_run_dir import record
from wandb_server import ENTITY, WandbServer

from fedbench import upload
from fedbench.config import RunConfig
from fedbench.results import reuse
from fedbench.results.atomic_files import write_atomically
from fedbench.results.origin import Origin, read_origin
from fedbench.results.reuse import take_over
from fedbench.results.run_dir import RunDir
from fedbench.results.run_reader import read_runs
from fedbench.results.summary import summarise

TINY = ["model.hidden=[4]", "defense=foolsgold", "rounds=2"]
CONFIG = RunConfig(defense={"name": "krum"}, name="new")
N_ROUNDS = CHECKPOINT.next_round


def finished_run(top: Path, name: str) -> RunDir:
    """A run with all its files, without training."""
    folder = RunDir(top / name / "krum-1")
    folder.path.mkdir(parents=True)
    folder.start(RunConfig(defense={"name": "krum"}, name=name), Origin({"defense": name}))
    for index in range(N_ROUNDS):
        folder.record(record(index))
    folder.checkpoint(CHECKPOINT)
    (folder.path / "partition.png").write_bytes(b"picture")
    folder.finish(summarise(folder.rounds()))
    return folder


def copied(target: RunDir, *sources: RunDir) -> list[str]:
    with target.locked():
        return take_over(target, sources, CONFIG, Origin({"defense": "new"}))


def content(folder: RunDir) -> dict[str, bytes]:
    """The files of a run apart from its lock, by name."""
    paths = [path for path in folder.path.iterdir() if path.name != ".lock"]
    return {path.name: path.read_bytes() for path in paths}


def test_the_copy_is_a_finished_run_of_the_new_name(tmp_path: Path) -> None:
    source, target = finished_run(tmp_path, "old"), RunDir(tmp_path / "new" / "krum-1")
    before = content(source)
    assert copied(target, source) == [f"taken over from {source.path.parent}"]
    assert files(target.path) == RUN_FILES
    own = ("config.yaml", "origin.json")
    same = {name: data for name, data in before.items() if name not in own}
    assert {name: data for name, data in content(target).items() if name not in own} == same
    assert target.finished() == source.finished()
    assert target.load_checkpoint(CPU).next_round == N_ROUNDS
    (run,) = read_runs([target.path])
    assert (run.status, run.config["name"]) == ("finished", "new")
    assert read_origin(target.path, "krum-1") == Origin({"defense": "new"})
    assert content(source) == before


def test_a_finished_run_is_not_replaced(tmp_path: Path) -> None:
    source, target = finished_run(tmp_path, "old"), finished_run(tmp_path, "new")
    before = {path: path.stat().st_mtime_ns for path in target.path.iterdir()}
    assert copied(target, source) == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_a_failed_or_killed_attempt_left_is_replaced(tmp_path: Path) -> None:
    source, target = finished_run(tmp_path, "old"), RunDir(tmp_path / "new" / "krum-1")
    target.path.mkdir(parents=True)
    target.record(record(0))
    target.finish({"status": "failed", "error": "boom"})
    target.keep_traceback(ValueError("boom"))
    (target.path / ".checkpoint.pt.partial").write_bytes(b"a part")
    copied(target, source)
    assert files(target.path) == RUN_FILES
    assert target.finished() == source.finished()


def test_a_deleted_checkpoint_leaves_no_older_one(tmp_path: Path) -> None:
    source, target = finished_run(tmp_path, "old"), RunDir(tmp_path / "new" / "krum-1")
    source.checkpoint_file.unlink()
    target.path.mkdir(parents=True)
    target.checkpoint(CHECKPOINT)
    copied(target, source)
    assert not target.checkpoint_file.exists()
    assert target.finished() is not None


@pytest.mark.parametrize("damaged", ["summary.json", "rounds.jsonl", "checkpoint.pt"])
def test_a_damaged_source_is_passed_over(damaged: str, tmp_path: Path) -> None:
    source, other = finished_run(tmp_path, "a"), finished_run(tmp_path, "b")
    target = RunDir(tmp_path / "new" / "krum-1")
    whole = (source.path / damaged).read_bytes()
    (source.path / damaged).write_bytes(whole[:40] + b"?" + whole[41:])
    (reason,) = copied(target, source)
    assert reason.startswith(f"cannot take over {source.path}: ")
    assert reason.endswith("; the run is computed")
    assert target.finished() is None
    assert not [name for name in content(target) if name.endswith(".partial")]
    assert copied(target, source, other)[1:] == [f"taken over from {other.path.parent}"]
    assert target.finished() is not None


def test_a_source_that_another_process_runs_is_passed_over(tmp_path: Path) -> None:
    source, target = finished_run(tmp_path, "old"), RunDir(tmp_path / "new" / "krum-1")
    with source.locked():
        assert copied(target, source) == [f"cannot take over {source.path}, which is still running"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


@pytest.mark.parametrize("n", range(4))  # rounds, checkpoint, figure, summary
def test_a_kill_leaves_a_run_that_has_not_finished(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = finished_run(tmp_path, "old"), RunDir(tmp_path / "new" / "krum-1")
    target.path.mkdir(parents=True)
    target.record(record(0))  # of a run that was interrupted after its first round
    target.checkpoint(replace(CHECKPOINT, next_round=1))
    written: list[Path] = []

    def write_or_die(path: Path, write: Any) -> None:
        if len(written) == n:
            raise Killed
        write_atomically(path, write)
        written.append(path)

    monkeypatch.setattr(reuse, "write_atomically", write_or_die)
    with pytest.raises(Killed):
        copied(target, source)
    monkeypatch.undo()
    assert target.finished() is None
    assert [run.status for run in read_runs([target.path])] == ["unfinished"]
    resumed = target.resume(CPU)  # what the next command does if the source is gone
    assert resumed is not None
    assert len(target.rounds()) == resumed.next_round
    copied(target, source)
    assert target.finished() == source.finished()
    assert target.summary_file not in written


def command(top: Path, *overrides: str) -> list[str]:
    ended = fedbench_in_this_process(*TINY, *overrides, cwd=top)
    assert (ended.code, ended.err) == (0, []), ended
    return ended.out


def origin_of(folder: Path) -> Origin:
    origin = read_origin(folder, folder.name)
    assert origin is not None
    return origin


def only_run(top: Path, name: str) -> Path:
    (folder,) = (path.parent for path in top.glob(f"runs/{name}/*/config.yaml"))
    return folder


def test_a_single_run_is_taken_over(tmp_path: Path) -> None:
    command(tmp_path, "name=old")
    lines = command(tmp_path, "name=new")
    assert lines[0].endswith("seed=0  taken over from runs/old")
    assert "already finished, skipped: BA " in lines[1]
    assert len(lines) == 2, "nothing was computed"
    assert files(only_run(tmp_path, "new")) == RUN_FILES
    assert result(only_run(tmp_path, "new")) == result(only_run(tmp_path, "old"))
    assert summary(only_run(tmp_path, "new")) == summary(only_run(tmp_path, "old"))
    again = command(tmp_path, "name=new")
    assert not any("taken over" in line for line in again)


def test_a_damaged_run_is_computed_again_under_the_new_name(tmp_path: Path) -> None:
    command(tmp_path, "name=old")
    whole = result(only_run(tmp_path, "old"))
    (only_run(tmp_path, "old") / "rounds.jsonl").write_text("{}\n")
    lines = command(tmp_path, "name=new")
    assert not any("taken over" in line for line in lines)
    assert any("round 2/2" in line for line in lines)
    assert result(only_run(tmp_path, "new")) == whole


def test_rerun_takes_nothing_over(tmp_path: Path) -> None:
    command(tmp_path, "name=old")
    lines = command(tmp_path, "name=new", "--force")
    assert not any("taken over" in line for line in lines)
    assert any("round 2/2" in line for line in lines)
    assert result(only_run(tmp_path, "new")) == result(only_run(tmp_path, "old"))


def test_a_sweep_shows_what_it_takes_over_as_done(tmp_path: Path) -> None:
    command(tmp_path, "name=old")
    sweep = ["-m", "defense=foolsgold,krum", "name=new", "hydra/launcher=basic"]
    lines = command(tmp_path, *sweep)
    assert lines[:4] == [
        "defense=foolsgold  taken over from runs/old",
        "1 of 2 runs already finished",
        "starting 1 runs",
        lines[3],
    ]
    assert [line.partition(" in ")[0] for line in lines if "finished in" in line] == [
        "defense=krum  finished"
    ]
    assert len([line for line in lines if line.split()[:1] in (["foolsgold"], ["krum"])]) == 2
    copy, computed = sorted((tmp_path / "runs" / "new").glob("*-*"))
    assert result(copy) == result(only_run(tmp_path, "old"))
    copied, own = origin_of(copy), origin_of(computed)
    assert copied.changed == {**(own.changed or {}), "defense": "foolsgold"}
    assert copied.given == own.given, "as the sweep names them"
    assert "defense" in copied.given


@pytest.mark.slow
def test_a_parallel_sweep_takes_over_what_another_has_finished(tmp_path: Path) -> None:
    sweep = [*TINY[::2], "-m", "defense=foolsgold,krum,median"]
    for name, values in (("old", sweep), ("new", sweep)):
        ended = fedbench(*values, f"name={name}", cwd=tmp_path)
        assert (ended.code, ended.err) == (0, []), ended
    labels = [f"defense={name}  taken over from runs/old" for name in ("foolsgold", "krum")]
    assert ended.out[:2] == labels
    assert "3 of 3 runs already finished" in ended.out
    assert not any("finished in" in line for line in ended.out)
    for folder in (tmp_path / "runs" / "new").glob("*-*"):
        assert result(folder) == result(tmp_path / "runs" / "old" / folder.name)


@pytest.mark.usefixtures("logged_out")
def test_upload_sends_a_run_that_was_taken_over(
    tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command(tmp_path, "name=old")
    command(tmp_path, "name=new", "tracker=wandb")
    run = only_run(tmp_path, "new")
    assert not server.runs, "a run that is taken over is not logged"
    assert not (run / "wandb").exists()
    assert upload.main([str(run)]) == 0
    url = f"{server.url}/{ENTITY}/fedbench/runs/new-{run.name}"
    assert capsys.readouterr().out == f"{run}  2 rounds, {url}\n"
    assert server.runs[f"new-{run.name}"].group == "new"
    assert server.runs[f"new-{run.name}"].summary["MA"] == summary(run)["MA"]
