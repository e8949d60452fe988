"""The benchmarks run; what they measure is theirs to say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedbench

ROOT = Path(fedbench.__file__).parent.parent


def output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_round_of_some_defenses() -> None:
    settings = ["--repeats", "1", "--threads", "1", "--clients", "4"]
    told = output("benchmarks/aggregate.py", *settings, "--defense", "fedavg", "krum", "baybfed")
    names = [line.split()[0] for line in told.splitlines() if "." in line[:22]]
    assert names == ["fedavg", "krum", "baybfed"] * 2


@pytest.mark.slow
def test_recurrent_networks_side_by_side() -> None:
    told = output("benchmarks/recurrent.py", "--repeats", "1", "--clients", "2")
    assert [line.split()[0] for line in told.splitlines()] == ["gru", "lstm"]


@pytest.mark.slow
def test_reading_a_dump() -> None:
    told = output("benchmarks/posts.py", "--megabytes", "5", "--authors", "50", "--words", "5000")
    assert re.findall(r"^(RC_made\S*) .* ratio [0-9.]+$", told, re.MULTILINE) == [
        "RC_made",
        "RC_made.zst",
    ]
