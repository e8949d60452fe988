"""Events: what runs of a sweep hand over to the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedbench.display import run_events
from fedbench.display.run_display import SweepDisplay
from fedbench.display.run_events import EventReader, relayed, send


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(run_events.FOLDER, str(tmp_path))
    return tmp_path


def test_a_reader_returns_each_event_once_and_no_incomplete_line(folder: Path) -> None:
    reader = EventReader(folder)
    send(event="say", line="ä\n")
    assert [*reader.new()] == [{"event": "say", "line": "ä\n"}]
    assert [*reader.new()] == []
    (file,) = folder.iterdir()
    with file.open("a") as end:
        end.write('{"event": "ov')
        end.flush()
        assert [*reader.new()] == []
        end.write('er", "job": 0}\nnot JSON\n17\n')
    assert [*reader.new()] == [{"event": "over", "job": 0}]


def test_a_reader_follows_several_processes(folder: Path) -> None:
    reader = EventReader(folder)
    for n in range(2):
        child = os.fork()
        if not child:
            send(event="over", job=n)
            os._exit(0)
        os.waitpid(child, 0)
    assert len([*folder.iterdir()]) == 2
    assert sorted(event["job"] for event in reader.new()) == [0, 1]


def test_a_missing_folder_stops_neither_writer_nor_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_events.FOLDER, str(tmp_path / "gone"))
    send(event="over", job=0)
    assert [*EventReader(tmp_path / "gone").new()] == []


def test_output_of_a_run_is_handed_over_line_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with relayed(3):
        print("by a plugin")
        print("a", end="")
        print("b")
        print("no end", end="", file=sys.stderr)
    print("after it")
    assert [*EventReader(folder).new()] == [
        {"event": "output", "lines": ["by a plugin"], "error": False},
        {"event": "output", "lines": ["ab"], "error": False},
        {"event": "output", "lines": ["no end"], "error": True},
        {"event": "over", "job": 3},
    ]
    assert capsys.readouterr() == ("after it\n", "")


def test_an_interrupted_worker_starts_no_further_run(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), relayed(0):
        raise KeyboardInterrupt
    assert [*EventReader(folder).new()] == [], "the run has not failed: it can be resumed"
    with pytest.raises(KeyboardInterrupt), relayed(1):
        pytest.fail("started")


def test_without_a_panel_output_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(run_events.FOLDER, raising=False)
    with relayed(None):
        print("by a plugin")
    assert capsys.readouterr().out == "by a plugin\n"


def test_a_run_hands_over_its_rounds_but_few_of_its_clients(folder: Path) -> None:
    with SweepDisplay("krum-1", first_round=2) as display:
        display.describe("sequential on 1 process")
        for n in range(100):
            display.trained(n / 100)
        display.round({"round": 2, "MA": 0.8, "BA": None, "clients": [{}] * 30, "seconds": {}})
        display.close({"status": "failed", "error": "boom", "versions": {}})
    begin, trained, completed, end = EventReader(folder).new()
    assert begin == {"event": "begin", "run": "krum-1", "first_round": 2}
    assert (trained["event"], trained["share"]) == ("trained", 0.0)
    assert completed == {"event": "round", "run": "krum-1", "round": 2, "MA": 0.8, "BA": None}
    assert end["summary"] == {"status": "failed", "error": "boom"}
