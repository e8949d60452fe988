"""The folders of a sweep: removed by the sweep, or by the next one if it was killed."""

from __future__ import annotations

from pathlib import Path

from fedbench.multirun.scratch import LOCK_FILE, ScratchFolder


def test_a_folder_in_use_stays_and_others_are_removed(tmp_path: Path) -> None:
    first = ScratchFolder(tmp_path, ".sweep-")
    killed = tmp_path / ".sweep-killed"
    (killed / "folder").mkdir(parents=True)
    (killed / LOCK_FILE).touch()
    (tmp_path / "other").mkdir()
    (tmp_path / ".sweep-of-somebody" / "folder").mkdir(parents=True)  # without a lock file
    second = ScratchFolder(tmp_path, ".sweep-")
    assert {path.name for path in tmp_path.iterdir()} == {
        "other",
        ".sweep-of-somebody",
        first.path.name,
        second.path.name,
    }
    (first.path / "file").touch()
    first.remove()
    second.remove()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"other", ".sweep-of-somebody"}
