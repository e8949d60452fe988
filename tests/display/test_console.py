"""The progress display: on a terminal, in a pipe, and after its reader is gone."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbench.display.console import Display, duration, kept, percent

ROOT = Path(__file__).parents[2]
TITLE = "krum constrain_and_scale pmr=0.2"


def record(index: int, **changes: Any) -> dict[str, Any]:
    clients = [
        {"id": i, "malicious": i < 6, "accepted": i >= 6, "score": 0.5, "weight": 1 / 24}
        for i in range(30)
    ]
    measured = {"MA": 0.841, "BA": 0.998, "TPR": 1.0, "TNR": 1.0, "AUC": None}
    seconds = {"train": 0.4, "aggregate": 0.1, "evaluate": 0.1}
    return {"round": index, **measured, "seconds": seconds, "clients": clients, **changes}


def summary(**changes: Any) -> dict[str, Any]:
    numbers = {"MA": 0.84, "BA": 0.123, "TPR": 1.0, "TNR": 0.042, "AUC": None}
    return {"status": "finished", **numbers, "rounds": 10, "seconds": 7.4, **changes}


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=20)


def terminal(width: int = 120, **environ: str) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=25,
        color_system="standard",
        _environ={"TERM": "xterm", **environ},
    )


def written(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


def live_line(display: Display) -> str:
    (line,) = display._console.render_lines(display._progress.get_renderable(), pad=False)
    return "".join(segment.text for segment in line)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_percent_is_a_dash_for_none() -> None:
    assert [percent(rate) for rate in (0.8412, 0.0, 1.0, None)] == ["84.1", "0.0", "100.0", "-"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (723, "12 min 03 s"),
        (3599.6, "1 h 00 min"),
        (11100, "3 h 05 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_kept_counts_accepted_clients_and_is_a_dash_if_none_are_judged() -> None:
    assert kept(record(0)["clients"]) == "24/30"
    assert kept([{"accepted": False}, {"accepted": False}]) == "0/2"
    assert kept([{"accepted": None}, {"accepted": None}]) == "-"


def test_a_pipe_gets_one_plain_line_per_round() -> None:
    console = pipe()
    unjudged = [{"id": 0, "malicious": False, "accepted": None, "score": None, "weight": 1.0}]
    with Display(TITLE, 10, console=console) as display:
        display.say("executor [bold]vectorized")
        display.round(record(2))
        display.round(record(3, BA=None, clients=unjudged))
        display.close(summary(TNR=None))
    assert written(console).splitlines() == [
        "executor [bold]vectorized",
        f"{TITLE}  round 3/10  MA 84.1  BA 99.8  kept 24/30  0.6 s",
        f"{TITLE}  round 4/10  MA 84.1  BA -  kept -  0.6 s",
        f"{TITLE}  finished in 7.4 s: BA 12.3  MA 84.0  TPR 100.0  TNR -",
    ]


def rounds_shown(n_rounds: int, clock: list[float]) -> list[str]:
    """The rounds with a line in a pipe; each round takes `clock[0]` seconds."""
    console, now = pipe(), 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.monotonic", lambda: now)
        with Display("krum", n_rounds, console=console) as display:
            for index in range(n_rounds):
                now += clock[0]
                display.round(record(index))
    return re.findall(r"round (\d+)/", written(console))[:-1]  # the last is of the ending


def test_many_short_rounds_print_a_line_every_ten_seconds_in_a_pipe() -> None:
    assert rounds_shown(10, [0.01]) == [str(n) for n in range(1, 11)]
    assert rounds_shown(1000, [0.5]) == [*map(str, range(1, 1000, 20)), "1000"]
    assert rounds_shown(30, [60.0]) == [str(n) for n in range(1, 31)]


def test_the_bar_moves_within_a_round_but_the_round_counts_when_it_ends() -> None:
    console, now = terminal(), 100.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.monotonic", lambda: now)
        with Display("krum", 4, first_round=1, console=console) as display:
            filled = []
            for share in (0.25, 0.5, 1.0):
                now += 1
                display.trained(share)
                line = live_line(display)
                assert "round 1/4" in line
                filled.append(display._task.completed)
            display.trained(0.7)  # too soon after the last
            filled.append(display._task.completed)
            display.round(record(1))
            assert "round 2/4" in live_line(display)
    assert filled == [1.25, 1.5, 1.99, 1.99]


def test_the_bar_moves_within_the_first_round_of_pretraining() -> None:
    with Display("krum", 10, console=terminal()) as display:
        display.begin_pretraining(0, 20)
        display.trained(0.5)
        assert "pretrain 0/20" in live_line(display)
        assert display._task.completed == 0.5


def test_in_a_pipe_pretraining_prints_its_first_and_last_round() -> None:
    console = pipe()
    with Display("krum", 10, console=console) as display:
        for done in range(1, 21):
            display.pretrain(done, 20)
        display.close(summary(status="failed", error="a\nb\x1b[31m"))
    assert written(console).splitlines() == [
        "krum  pretrain 1/20",
        "krum  pretrain 20/20",
        "krum  failed: a b [31m",
    ]


def test_the_other_endings() -> None:
    console = pipe()
    Display("krum", 10, console=console).close(summary(), skipped=True)
    with Display("flame", 10, first_round=5, console=console):
        pass
    assert written(console).splitlines() == [
        "krum  already finished, skipped: BA 12.3  MA 84.0  TPR 100.0  TNR 4.2",
        "flame  resumes after round 5/10",
        "flame  stopped after round 5/10; the same command resumes it",
    ]


def test_an_interrupt_propagates() -> None:
    before = sys.stdout
    with pytest.raises(KeyboardInterrupt), Display("krum", 10, console=terminal()):
        raise KeyboardInterrupt
    assert sys.stdout is before  # not rich's proxy for the live line


def test_a_terminal_shows_one_live_line_and_keeps_only_the_ending() -> None:
    console = terminal()
    for name in ("krum", "flame"):
        with Display(name, 10, console=console) as display:
            display.round(record(2))
            display.say("a line in between [bold]")
            display.close(summary())
    text = without_codes(written(console))
    assert re.search(
        r"krum +━━━━━+╸?━+ round 3/10  MA 84.1  BA 99.8  kept 24/30 0:00:00 left --:--", text
    )
    assert "a line in between [bold]" in text
    assert text.count("flame  finished in 7.4 s: BA 12.3") == 1
    # The live line is erased before the ending is printed.
    assert written(console).rindex("\x1b[2K") < written(console).rindex("finished in")


@pytest.mark.parametrize("width", [1, 10, 40, 60, 80, 120])
def test_the_live_line_fits_the_terminal(width: int) -> None:
    display = Display(TITLE, 10, console=terminal(width))
    display.round(record(2))
    line = live_line(display)
    assert len(line) <= width
    assert line.startswith("roun") == (10 <= width <= 40)
    assert ("round 3/10  MA 84.1  BA 99.8" in line) == (width >= 40)
    assert ("kept 24/30 0:00:00 left --:--" in line) == (width >= 60)
    assert line.startswith("krum ") == (width >= 80)
    assert (line.count("━") + line.count("╸") >= 10) == (width >= 80)  # the bar can be seen to move


def test_time_left_uses_the_pace_since_the_resumed_round() -> None:
    console, now = terminal(), 100.0
    console.get_time = lambda: now
    display = Display("krum", 10, first_round=4, console=console)
    now = 120.0
    display.round(record(4))
    assert live_line(display).endswith("0:00:20 left --:--")
    now = 160.0
    display.round(record(5))  # a round in 40 s, 4 to go
    assert live_line(display).endswith("0:01:00 left 02:40")
    now = 260.0
    display.round(record(7))  # 3 rounds in 140 s, 2 to go
    assert live_line(display).endswith("0:02:40 left 01:34")


def test_rounds_replace_pretraining_in_the_live_line() -> None:
    console, now = terminal(), 100.0
    console.get_time = lambda: now
    display = Display("krum", 10, console=console)
    display.pretrain(1, 20)
    now = 110.0
    display.pretrain(2, 20)
    assert live_line(display).endswith("pretrain 2/20 0:00:10 left 03:00")
    display.pretrain(20, 20)
    assert live_line(display).endswith("round 0/10 0:00:10 left --:--")


def test_no_color_is_respected() -> None:
    console = terminal(NO_COLOR="1")
    with Display("krum", 10, console=console) as display:
        display.round(record(2))
        display.close(summary())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", written(console))


def test_an_ascii_pipe_gets_question_marks() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=False)
    Display("krum", 10, console=console).close(summary(status="failed", error="± 3"))
    assert raw.getvalue() == b"krum  failed: ? 3\n"


def test_a_closed_file_silences_the_display() -> None:
    console = pipe()
    with Display("krum", 10, console=console) as display:
        console.file.close()
        display.round(record(2))
        display.close(summary())


SCRIPT = """
import sys
from fedbench.display.console import Display
record = {"MA": 1, "BA": 0, "seconds": {"train": 1}, "clients": [{"accepted": True}]}
for name in ("krum", "flame"):
    with Display(name, 5000) as display:
        for i in range(5000):
            display.round({**record, "round": i})
        print("printed by other code")
print("survived", "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("tail", ["| head -1", ">&-", "| cat > /dev/null"])
def test_a_closed_pipe_does_not_end_the_run(tail: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = f'set -o pipefail; FORCE_COLOR=1 "{sys.executable}" "{tmp_path}/script.py" {tail}'
    done = subprocess.run(
        ["bash", "-c", command],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "survived False\n"
    assert done.returncode == 0
    if "head" in tail:
        assert done.stdout == "krum  round 1/5000  MA 100.0  BA 0.0  kept 1/1  1.0 s\n"
