"""What the command of a sweep prints while its runs report events."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbench.display import run_events
from fedbench.display.run_display import SweepDisplay
from fedbench.display.sweep_panel import DONE, RunState
from fedbench.multirun import sweep_watch
from fedbench.multirun.sweep_watch import SweepWatch

FINISHED = {"status": "finished", "seconds": 7.4, "MA": 0.84, "BA": 0.123, "TPR": 1.0, "TNR": None}
ENDING = "finished in 7.4 s: BA 12.3  MA 84.0  TPR 100.0  TNR -"


def console(terminal: bool) -> Console:
    environ = {"TERM": "xterm"}
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=80, height=24, _environ=environ
    )


def lines_of(output: Console) -> list[str]:
    file: Any = output.file
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / ".sweep"
    path.mkdir()
    monkeypatch.setenv(run_events.FOLDER, str(path))
    monkeypatch.setattr(sweep_watch, "POLL_INTERVAL", 1000.0)  # the tests themselves poll
    return path


def watch(folder: Path, output: Console, *names: str, done: int = 0) -> SweepWatch:
    states = {name: RunState(f"defense={name}", 10) for name in names}
    for name in names[:done]:
        states[name].status = DONE
    return SweepWatch(folder, states, names, output)


def test_a_pipe_gets_a_line_for_each_run_that_ends(folder: Path) -> None:
    output = console(terminal=False)
    sweep = watch(folder, output, "krum", "flame", "dp", done=1)
    sweep.start()
    SweepDisplay("krum").close(FINISHED, skipped=True)
    with SweepDisplay("flame", first_round=6) as display:
        display.say("wandb: offline [bold]")
        for index in range(6, 10):
            display.round({"round": index, "MA": 0.84, "BA": 0.1})
        display.close(FINISHED)
    with SweepDisplay("dp") as display:
        display.close({"status": "failed", "error": "boom"})
    sweep.close()
    sweep.close()
    assert lines_of(output) == [
        "1 of 3 runs already finished",
        "starting 2 runs",
        "defense=flame  resumes after round 6/10",
        "wandb: offline [bold]",
        f"defense=flame  {ENDING}",
        "defense=dp  failed: boom",
    ]


def test_a_pipe_gets_a_line_about_the_sweep_now_and_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_watch, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(sweep_watch, "LINE_INTERVAL", 0.0)
    output = console(terminal=False)
    sweep = watch(folder, output, "krum", "flame")
    sweep.start()
    SweepDisplay("krum").__enter__()
    wanted = "sweep of 2: done 0, running 1, failed 0, left 1"
    while wanted not in lines_of(output):
        assert sweep._thread.is_alive()
    sweep.close()
    assert lines_of(output)[-1] == "stopped: 0 of 2 runs done; the same command resumes the others"


def test_a_terminal_shows_a_panel_and_erases_it(folder: Path) -> None:
    output = console(terminal=True)
    sweep = watch(folder, output, "krum", "flame")
    sweep.start()
    with SweepDisplay("krum") as display:
        display.round({"round": 0, "MA": 0.84, "BA": 0.1})
        sweep.poll()
        assert sweep._live is not None
        sweep._live.refresh()
        with run_events.relayed(1):
            print("printed by a plugin")
        display.close(FINISHED)
    sweep.close()
    text = "\n".join(lines_of(output))
    assert "done 0, running 1, failed 0, left 1" in text
    assert re.search(r"defense=krum +round 1/10 MA 84.0 BA 10.0", text)
    assert text.count("printed by a plugin") == 1
    assert text.count(ENDING) == 1
    file: Any = output.file
    raw = file.getvalue()
    assert raw.rindex("\x1b[2K") > raw.rindex("running"), "the panel is erased"
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor is visible again"


def test_a_run_that_ends_before_it_begins_has_failed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = console(terminal=False)
    sweep = watch(folder, output, "krum", "flame")
    sweep.start()
    with run_events.relayed(1):
        print("fedbench: no such file", file=sys.stderr)
    sweep.poll()
    assert sweep.panel.headline() == "done 0, running 0, failed 1, left 1"
    assert capsys.readouterr().err == "fedbench: no such file\n"
    sweep.close()


def test_a_closed_pipe_does_not_end_the_watch(folder: Path) -> None:
    output = console(terminal=False)
    sweep = watch(folder, output, "krum")
    output.file.close()
    sweep.start()
    SweepDisplay("krum").close(FINISHED)
    sweep.close()
    assert sweep.panel.count(DONE) == 1
