"""SIGTERM and SIGHUP end a command as Ctrl-C does; later signals change nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# What a command does: clean up after the first signal, `late` for longer than the grace period.
COMMAND = """
import os, signal, sys, time
from fedbench import termination
termination.GRACE = 0.5
if "ignored" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with termination.termination_handled():
    try:
        print("ready", flush=True)
        input()
        print("not ended", flush=True)
    except KeyboardInterrupt as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        if "late" in sys.argv:
            time.sleep(60)
        print("stopped", flush=True)
        termination.leave(stop)
"""


def ended(number: int, *words: str) -> tuple[int, str]:
    """Exit code and output of a command that gets a signal and then its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate("\n" if "ignored" in words else None, timeout=60)
    return process.returncode, out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_command_with_its_code(number: int, code: int) -> None:
    assert ended(number) == (code, "stopped\n")


def test_a_command_that_hangs_ends_after_the_grace_period() -> None:
    assert ended(signal.SIGTERM, "late") == (143, "")


def test_a_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    assert ended(signal.SIGHUP, "ignored") == (0, "not ended\n")


@pytest.mark.slow
def test_these_tests_pass_where_signals_are_ignored() -> None:
    """As under `nohup` and in the background of a script; the commands would inherit it."""
    ignoring = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "with_its_code",
    ]
    done = subprocess.run([*ignoring, *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
