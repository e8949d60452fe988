"""The garbage collector pauses where it is told to, and ignores what imports leave behind."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbench.collector import fast_imports, paused_collector


@pytest.fixture(autouse=True)
def running_collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_pauses_and_goes_on() -> None:
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(KeyError), fast_imports():
        raise KeyError
    assert gc.isenabled()


def test_it_stays_off_if_it_was_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_imports_are_frozen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs one configuration after another must not keep what each one leaves."""
    (tmp_path / "imported_for_a_test.py").write_text("OBJECTS = [[] for _ in range(1000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    for _ in range(2):
        with fast_imports():
            module = importlib.import_module("imported_for_a_test")
        frozen = gc.get_freeze_count()
        assert frozen >= before + 1000
        assert not any(item is module.OBJECTS for item in gc.get_objects())
        later: list[list[int]] = [[] for _ in range(1000)]
    assert any(item is later for item in gc.get_objects())
    del sys.modules["imported_for_a_test"]
