"""Atomic writes and file locks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import UserError
from fedbench.results.atomic_files import locked, write_atomically


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


def test_one_thread_at_a_time_holds_a_lock(tmp_path: Path) -> None:
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


def test_an_unwritable_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write to"),
        locked(tmp_path / "file" / "x" / ".lock"),
    ):
        pass


def test_an_error_inside_the_lock_is_not_reworded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(tmp_path / ".lock"):
        (tmp_path / "nothing").read_text()
