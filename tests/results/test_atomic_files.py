"""Atomic writes and file locks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import UserError
from fedbench.results.atomic_files import WriteError, locked, remove, write_atomically


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def half(file: Any) -> None:
        file.write(b"ne")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing that would keep a disk full
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_leaves_nothing(tmp_path: Path, raised: type[BaseException]) -> None:
    def interrupted(file: Any) -> None:
        file.write(b"ne")
        raise raised

    with pytest.raises(raised):
        write_atomically(tmp_path / "file", interrupted)
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def fill(file: Any) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"1")

    with pytest.raises(WriteError) as caught:
        write_atomically(path, fill)
    line = f"no space left on the disk of {tmp_path}; free some and repeat the command"
    assert str(caught.value) == line
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(WriteError, match=r"^cannot write .*file: Is a directory$"):
        write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    remove(tmp_path / "file")
    remove(tmp_path / "file")
    assert [*tmp_path.iterdir()] == []


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
