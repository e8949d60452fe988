"""The panel of a sweep: counts, estimates, and whether it fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedbench.display.sweep_panel import (
    DONE,
    FAILED,
    RUNNING,
    RunState,
    SweepPanel,
    about,
    labels,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def panel_of(n: int, rounds: int = 10) -> tuple[SweepPanel, list[RunState], Clock]:
    clock = Clock()
    runs = {f"run-{i}": RunState(f"defense=d{i} pmr=0.2", rounds) for i in range(n)}
    return SweepPanel(runs, clock), [*runs.values()], clock


def drawn(panel: SweepPanel, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(panel)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "5 s"), (42, "40 s"), (57, "55 s"), (59, "1 min"), (725, "12 min"), (11100, "3 h 05 min")],
)
def test_about(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_runs_are_named_by_what_differs_among_them() -> None:
    runs = [[f"defense={d}", "rounds=2", f"pmr={p}"] for d in ("krum", "dp") for p in (0.2, 0.3)]
    assert labels(runs)[:2] == ["defense=krum pmr=0.2", "defense=krum pmr=0.3"]
    assert labels([["defense=krum"]]) == [""]
    assert labels([]) == []


def test_every_run_is_counted_once() -> None:
    panel, (a, b, c, d), _ = panel_of(4)
    panel.begin(a, 0)
    panel.pretrain(b, 3, 20)
    panel.end(c, DONE)
    panel.end(d, FAILED)
    assert panel.headline() == "done 1, running 2, failed 1, left 0"
    assert panel.line() == "sweep of 4: done 1, running 2, failed 1, left 0"


def test_a_running_run_shows_round_rates_and_time_left() -> None:
    panel, (run, other), clock = panel_of(2)
    panel.begin(run, 0)
    for index in range(5):
        clock.now += 6
        # Measured in every second round; the panel keeps the last value.
        panel.round(run, index, {"MA": None if index % 2 else 0.84, "BA": 0.998})
    panel.pretrain(other, 12, 20)
    _, first, second = drawn(panel)
    assert " ".join(first.split()) == ("defense=d0 pmr=0.2 round 5/10 MA 84.0 BA 99.8 30 s left")
    assert " ".join(second.split()) == "defense=d1 pmr=0.2 pretrain 12/20 MA - BA -"


def test_rounds_follow_pretraining() -> None:
    panel, (run,), _ = panel_of(1)
    for done in range(21):
        panel.pretrain(run, done, 20)
    assert (run.status, run.where()) == (RUNNING, "round 0/10")


def test_the_time_left_divides_the_rounds_among_the_running_runs() -> None:
    """4 runs of 10 rounds, 2 at a time, 10 s per round."""
    panel, (a, b, c, d), clock = panel_of(4)
    panel.begin(a, 0)
    panel.begin(b, 0)
    assert panel.seconds_left() is None
    clock.now += 500  # they wait for a pretrained model: no part of a round's time
    for index in range(5):
        clock.now += 10
        panel.round(a, index, {})
        panel.round(b, index, {})
    # 5 + 5 rounds of the running runs and 20 of the others, on 2
    assert panel.seconds_left() == pytest.approx(150)
    panel.trained(a, 0.5)
    panel.trained(b, 0.5)
    assert panel.seconds_left() == pytest.approx((4.5 + 10) * 40 / 4.5)
    for run in (a, b, c):
        panel.end(run, DONE)
    panel.begin(d, 4)  # has no pace of its own yet: that of the others
    assert panel.seconds_left() == pytest.approx(6 * 40 / 4.5)


def test_the_last_run_decides_when_the_sweep_ends() -> None:
    panel, (a, b), clock = panel_of(2)
    for run in (a, b):
        panel.begin(run, 0)
        panel.round(run, 0, {})
    clock.now += 10
    panel.round(a, 8, {})
    panel.round(b, 1, {})
    assert panel.seconds_left() == pytest.approx(80)


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_the_panel_fits_the_terminal(width: int) -> None:
    panel, runs, clock = panel_of(40)
    for run in runs:
        run.label = "defense=krum attack.backdoors=[{name:patch,size:3}] pmr=0.2 seed=17"
        panel.begin(run, 0)
        panel.round(run, 0, {"MA": 1.0, "BA": 1.0})
        clock.now += 100
        panel.round(run, 1, {"MA": 1.0, "BA": 1.0})
    lines = drawn(panel, width, height=12)
    assert len(lines) <= 11
    assert max(map(len, lines)) <= width - 2 or width < 40  # room for the ^C of Ctrl-C
    if width >= 80:
        assert "done 0, running 40, failed 0, left 0, about" in lines[0]
        assert lines[1].endswith("round 2/10 MA 100.0 BA 100.0 13 min left")
        assert lines[1].startswith("defense=krum attack.backdoors=[{name")
        assert lines[-1] == "... and 32 more running"
