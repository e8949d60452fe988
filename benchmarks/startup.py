"""Start-up time of `python -m fedbench`, compared to importing torch alone.

    python -m benchmarks startup

Start-up is the time from starting a run of one round to the line that reports the round, minus the
seconds of the round itself. The baseline is `python -c "import torch"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._measure import Options, Row, repeat_interleaved, time_call


def measure(options: Options) -> Iterator[Row]:
    timers = {"to the first round": to_first_round, "import torch": lambda: time_call(import_torch)}
    times = repeat_interleaved(timers, options.repeats, warm_up=not options.quick)
    yield Row.of("python -m fedbench", times, "to the first round", "import torch")


def to_first_round() -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fedbench", "rounds=1", "pretrain_rounds=0", f"out={out}"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = next(line for line in process.stdout if "round 1/1" in line)
            seconds = time.perf_counter() - start
            process.stdout.read()
        assert "MA" in first
        rounds = next(Path(out).glob("*/*/rounds.jsonl"))
        return seconds - float(sum(json.loads(rounds.read_text())["seconds"].values()))


def import_torch() -> None:
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
