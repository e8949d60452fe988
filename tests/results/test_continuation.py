"""A run with more rounds continues the same run with fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end import fedbench_in_this_process, result, rounds, run_folders, summary

from fedbench.results.run_dir import RunDir

TINY = ["model.hidden=[4]", "defense=foolsgold", "evaluate_every=2"]  # with a memory


def run(folder: Path, *overrides: str) -> list[str]:
    ended = fedbench_in_this_process(*TINY, *overrides, cwd=folder)
    assert ended.code == 0, ended
    return ended.out


def folder_of(top: Path, n_rounds: int) -> Path:
    text = f"\nrounds: {n_rounds}\n"
    found = (f for f in run_folders(top / "runs") if text in (f / "config.yaml").read_text())
    return next(found)


def test_a_longer_run_ends_as_if_it_had_run_in_one_go(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for top in (whole, parts):
        top.mkdir()
    run(whole, "rounds=5")
    for n_rounds in (1, 3):
        run(parts, f"rounds={n_rounds}")
    last = summary(folder_of(parts, 3))
    lines = run(parts, "rounds=5")
    assert any(f"continues {folder_of(parts, 3).name} after its 3 rounds" in s for s in lines)
    assert result(folder_of(parts, 5)) == result(folder_of(whole, 5))
    # Round 3 was evaluated in the shorter run only; that run is untouched.
    assert rounds(folder_of(parts, 5))[2]["MA"] is None
    assert last == summary(folder_of(parts, 3))
    assert last["MA"] is not None


def test_an_unfinished_shorter_run_is_continued(tmp_path: Path) -> None:
    run(tmp_path, "rounds=2")
    (folder_of(tmp_path, 2) / "summary.json").unlink()
    assert any("after its 2 rounds" in line for line in run(tmp_path, "rounds=3"))


def test_nothing_is_continued_if_anything_else_differs(tmp_path: Path) -> None:
    run(tmp_path, "rounds=1")
    lines = run(tmp_path, "rounds=2", "lr=0.01")
    assert not any("continue" in line for line in lines)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "it has no checkpoint.pt"),
        ("unreadable", "checkpoint.pt has no checksum"),
        ("short", "its checkpoint is of round 2, its last record 1"),
        ("running", "which is still running"),
    ],
)
def test_one_line_says_why_a_run_cannot_be_continued(
    tmp_path: Path, damage: str, reason: str
) -> None:
    run(tmp_path, "rounds=2")
    source = folder_of(tmp_path, 2)
    if damage == "missing":
        (source / "checkpoint.pt").unlink()
    elif damage == "unreadable":
        (source / "checkpoint.pt").write_bytes(b"?")
    elif damage == "short":
        first = (source / "rounds.jsonl").read_text().splitlines(keepends=True)[0]
        (source / "rounds.jsonl").write_text(first)
    if damage == "running":
        with RunDir(source).locked():
            lines = run(tmp_path, "rounds=3")
    else:
        lines = run(tmp_path, "rounds=3")
    told = [line for line in lines if "cannot continue" in line]
    assert len(told) == 1
    assert source.name in told[0]
    assert reason in told[0]
    assert summary(folder_of(tmp_path, 3))["rounds"] == 3
