"""summary.json says where a result comes from; a failed run keeps its traceback."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from end_to_end import fedbench, fedbench_in_this_process, run_folder, run_folders, summary

from fedbench.results import provenance
from fedbench.results.provenance import announce_command, git_state, started_at

BROKEN = """
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("broken")
@dataclass(frozen=True)
class Broken(Defense):
    def aggregate(self, updates, state, view):
        if view.index == 1:
            raise ValueError("two rounds are too many")
        return mean_of(updates, view.client_ids >= 0), state
"""


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    git_state.cache_clear()
    yield
    git_state.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    names = {
        f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def repository(folder: Path) -> str:
    """Make a repository with one commit; return its name."""
    git(folder, "init", "--quiet")
    (folder / "notes.txt").write_text("first\n")
    git(folder, "add", "notes.txt")
    git(folder, "commit", "--quiet", "--message", "first")
    return git(folder, "rev-parse", "HEAD")


def test_a_summary_names_command_commit_versions_and_processor(tmp_path: Path) -> None:
    commit = repository(tmp_path)
    fedbench_in_this_process("model.hidden=[4]", "+attack.note='a b'", "~attack.note", cwd=tmp_path)
    found = summary(run_folder(tmp_path / "runs"))
    assert found["command"].startswith("fedbench 'model.hidden=[4]' '+attack.note='\"'\"'a b'")
    assert found["command"].endswith("local_epochs=1")
    assert found["git"] == {"commit": commit, "dirty": False}  # runs/ holds no code
    assert found["versions"]["torch"] == version("torch")
    assert torch.backends.cpu.get_cpu_capability() in found["processor"]
    assert (found["processes"], found["threads"]) == (1, 1)
    assert found["fedbench_code"] == provenance.code_of_fedbench()


def test_changed_files_and_new_code_make_a_repository_dirty(tmp_path: Path) -> None:
    commit = repository(tmp_path)
    for name, dirty in (("results.csv", False), ("mine.py", True)):
        (tmp_path / name).write_text("")
        git_state.cache_clear()
        assert git_state(tmp_path) == {"commit": commit, "dirty": dirty}
    (tmp_path / "mine.py").unlink()
    (tmp_path / "notes.txt").write_text("second\n")
    git_state.cache_clear()
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_without_git_or_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    repository(tmp_path)
    git_state.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_the_command_is_recorded_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (provenance.COMMAND, provenance.STARTED):
        monkeypatch.setenv(variable, "0")
    listing = "+hydra.callbacks.sweep.listing='/tmp/x'"
    for argv0, program in (
        ("/x/fedbench/__main__.py", "python -m fedbench"),
        ("/x/fedbench", "fedbench"),
    ):
        announce_command([argv0, "-m", "pmr=0.2,0.3", "attack_rounds=[1,2]", listing])
        assert os.environ[provenance.COMMAND] == f"{program} -m pmr=0.2,0.3 'attack_rounds=[1,2]'"
    assert started_at() > 0


@pytest.mark.slow
def test_every_run_of_a_sweep_has_the_command(tmp_path: Path) -> None:
    ended = fedbench("-m", "pmr=0.2,0.4", "model.hidden=[4]", cwd=tmp_path)
    assert ended.code == 0, ended
    commands = {summary(folder)["command"] for folder in run_folders(tmp_path / "runs")}
    (command,) = commands
    assert command.startswith("python -m fedbench -m pmr=0.2,0.4 'model.hidden=[4]' ")


@pytest.mark.slow
def test_a_failed_run_keeps_its_traceback_until_it_finishes(tmp_path: Path) -> None:
    (tmp_path / "defenses").mkdir()
    file = tmp_path / "defenses" / "broken.py"
    file.write_text(BROKEN)
    assert fedbench("defense=broken", cwd=tmp_path).code == 1
    folder = run_folder(tmp_path / "runs")
    text = (folder / "traceback.txt").read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert "defenses/broken.py" in text
    assert text.endswith("ValueError: two rounds are too many\n")
    failed = summary(folder)
    assert (failed["status"], failed["processes"]) == ("failed", 1)
    assert failed["command"].startswith("python -m fedbench defense=broken ")


def test_a_run_that_finishes_at_last_drops_the_traceback(tmp_path: Path) -> None:
    fedbench_in_this_process("model.hidden=[4]", cwd=tmp_path)
    folder = run_folder(tmp_path / "runs")
    (folder / "summary.json").unlink()
    (folder / "traceback.txt").write_text("earlier")
    assert fedbench_in_this_process("model.hidden=[4]", cwd=tmp_path).code == 0
    assert not (folder / "traceback.txt").exists()


def test_the_processor_names_gpus_and_survives_a_broken_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = provenance.processor()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert provenance.processor() == f"{without}, GPU 0, GPU 1"

    def broken(index: int) -> str:
        raise RuntimeError("driver")

    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    assert provenance.processor() == without
