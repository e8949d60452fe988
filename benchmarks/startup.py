"""From `python -m fedbench` to the first round, and how much of it is importing torch alone.

    python benchmarks/startup.py [--repeats 5]

A run of one round is started; its time to the first line of the round, less the round's own
seconds, is the start-up. Printed next to `python -c "import torch"`, measured in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


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
        return seconds - sum(json.loads(rounds.read_text())["seconds"].values())


def import_torch() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    pairs = [(to_first_round(), import_torch()) for _ in range(parser.parse_args().repeats)]
    start, torch_alone = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"start to first round {start:.2f} s  import torch alone {torch_alone:.2f} s  "
        f"ratio {start / torch_alone:.2f}"
    )
