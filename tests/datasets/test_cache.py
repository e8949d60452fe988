"""fedbench.datasets.cache: build once, rebuild after a change or damage."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pooch  # type: ignore[import-untyped]
import pytest
import torch

from fedbench.datasets.cache import cached, fingerprint
from fedbench.errors import UserError

CONTENT: dict[str, Any] = {
    "x": torch.arange(6).view(2, 3),
    "words": ["a", "b"],
    "sizes": {"a": 1, "b": 2.5},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)
    return tmp_path / "fedbench" / "made"


class Builder:
    """Counts its calls."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self) -> dict[str, Any]:
        self.n_calls += 1
        return CONTENT


def same(found: dict[str, Any]) -> bool:
    rest = {key: value for key, value in found.items() if key != "x"}
    return torch.equal(found["x"], CONTENT["x"]) and rest == {
        key: value for key, value in CONTENT.items() if key != "x"
    }


def test_the_same_key_builds_once(folder: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert same(cached("made", [1, {"length": 5, "path": None}], build))
    assert build.n_calls == 1
    assert cached("made", [1, {"path": None, "length": 5}], build)  # key order does not matter
    assert build.n_calls == 1
    assert [path.suffix for path in sorted(folder.iterdir())] in ([".pt"], [".lock", ".pt"])


def test_any_other_key_rebuilds(folder: Path) -> None:
    build = Builder()
    parts: list[list[Any]] = [[1], [2], ["1"], [1, 1], [[1]], [None], [1.5], [{"a": 1}], [{"a": 2}]]
    for key in parts:
        cached("made", key, build)
    assert build.n_calls == len(parts)
    cached("other", [1], build)
    assert build.n_calls == len(parts) + 1


def test_a_file_truncated_anywhere_is_rebuilt(folder: Path) -> None:
    build = Builder()
    cached("made", [1], build)
    (path,) = folder.glob("*.pt")
    whole = path.read_bytes()
    for length in range(0, len(whole), 50):
        path.write_bytes(whole[:length])
        before = build.n_calls
        assert same(cached("made", [1], build))
        assert build.n_calls == before + 1
        assert path.read_bytes() == whole


def test_a_changed_bit_is_detected(folder: Path) -> None:
    build = Builder()
    cached("made", [1], build)
    (path,) = folder.glob("*.pt")
    data = path.read_bytes()
    at = data.index(CONTENT["x"].numpy().tobytes()) + 8  # in the tensor: 1 becomes 3
    path.write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
    assert same(cached("made", [1], build))
    assert build.n_calls == 2


def test_a_file_with_other_content_is_rebuilt(folder: Path) -> None:
    build = Builder()
    cached("made", [1], build)
    (path,) = folder.glob("*.pt")
    others: list[Any] = [{"key": "[2]", "content": {}}, {"content": {}}, [1, 2], "text"]
    for wrong in others:
        torch.save(wrong, path)
        before = build.n_calls
        assert same(cached("made", [1], build))
        assert build.n_calls == before + 1


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_code_in_a_file_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    cached("made", [1], build)
    (path,) = folder.glob("*.pt")
    monkeypatch.chdir(folder)
    torch.save({"key": "[1]", "content": Evil()}, path)
    assert same(cached("made", [1], build))
    assert not (folder / "ran").exists()


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail() -> dict[str, Any]:
        raise UserError("no captures")

    with pytest.raises(UserError, match="no captures"):
        cached("made", [1], fail)
    assert not list(folder.glob("*.pt"))
    assert same(cached("made", [1], Builder()))


def _build_in_process(home: str, log: str) -> None:
    pooch.os_cache = lambda project: Path(home) / project

    def build() -> dict[str, Any]:
        with open(log, "a") as file:
            file.write("built\n")
        return CONTENT

    assert same(cached("made", [1], build))


def test_only_one_of_several_processes_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_build_in_process, args=(str(tmp_path), str(log))) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "built\n"


def test_without_a_writable_cache_every_run_builds(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file in place of the folder")
    build = Builder()
    for n_calls in (1, 2):
        assert same(cached("made", [1], build))
        assert build.n_calls == n_calls


def test_a_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    assert same(cached("made", [1], Builder()))
    assert not list(folder.glob("*.pt"))


def test_cached_tensors_are_memory_mapped(folder: Path) -> None:
    """Concurrent processes share the pages of the file."""
    large = {"x": torch.zeros(2**22, dtype=torch.uint8)}
    cached("made", ["large"], lambda: large)
    again = cached("made", ["large"], Builder())
    (path,) = folder.glob("*.pt")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    ranges = [line.split()[0] for line in maps.read_text().splitlines() if str(path) in line]
    assert any(
        int(start, 16) <= again["x"].data_ptr() < int(end, 16)
        for start, end in (line.split("-") for line in ranges)
    )


def test_a_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(b"12")
    first = fingerprint(path)
    assert first[:2] == (str(path), 2)
    assert fingerprint(path) == first
    os.utime(path, ns=(0, 5))
    assert fingerprint(path) == (str(path), 2, 5)
    path.write_bytes(b"123")
    assert fingerprint(path)[1] == 3
    with pytest.raises(UserError, match=r"b\.pcap: cannot be read \(No such file or directory\)"):
        fingerprint(tmp_path / "b.pcap")
