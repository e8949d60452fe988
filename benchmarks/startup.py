"""From `python -m fedbench` to the first round, and how much of it is importing torch alone.

    python -m benchmarks startup

A run of one round is started; its time to the first line of the round, less the round's own
seconds, is the start-up. Against it stands `python -c "import torch"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._measure import Options, Row, clocked, in_turn


def measure(options: Options) -> Iterator[Row]:
    clocks = {"to the first round": to_first_round, "import torch": lambda: clocked(import_torch)}
    times = in_turn(clocks, options.repeats, warm_up=not options.quick)
    yield Row.of("python -m fedbench", times, "to the first round", "import torch")


def to_first_round() -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fedbench", "rounds=1", "pretrain_rounds=0", f"out={out}"]
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = next(line for line in process.stdout if "round 1/1" in line)
            seconds = time.perf_counter() - begun
            process.stdout.read()
        assert "MA" in first
        rounds = next(Path(out).glob("*/*/rounds.jsonl"))
        return seconds - float(sum(json.loads(rounds.read_text())["seconds"].values()))


def import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
