"""The benchmarks run; what they measure is theirs to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedbench

ROOT = Path(fedbench.__file__).parent.parent


@pytest.mark.slow
def test_one_round_of_some_defenses() -> None:
    command = ["benchmarks/aggregate.py", "--repeats", "1", "--threads", "1", "--clients", "4"]
    done = subprocess.run(
        [sys.executable, *command, "--defense", "fedavg", "krum", "baybfed"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if "." in line[:22]]
    assert names == ["fedavg", "krum", "baybfed"] * 2
