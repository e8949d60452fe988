"""The folders of a sweep: removed by the sweep, or by the next one if it was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fedbench.multirun.scratch import LOCK_FILE, ScratchFolder, temporary_files_removed


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


def test_temporary_files_are_removed_and_the_folder_for_them_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "mine")
    monkeypatch.delenv("JOBLIB_TEMP_FOLDER", raising=False)
    with temporary_files_removed():
        tempfile.mkdtemp()
        (folder,) = tmp_path.iterdir()
        assert os.environ["TMPDIR"] == os.environ["JOBLIB_TEMP_FOLDER"] == str(folder)
    assert [*tmp_path.iterdir()] == []
    assert (tempfile.gettempdir(), os.environ["TMPDIR"]) == (str(tmp_path), "mine")
    assert "JOBLIB_TEMP_FOLDER" not in os.environ
