"""A sweep of nine runs side by side against the same one after another, start-up included.

    python -m benchmarks sweep

The commands that a user types, in fresh folders, so that all is done each time: nine runs of the
defaults (three defenses, three shares of malicious clients), which share one pretraining. `further
run` is what a run takes beyond its rounds in a process that has done others before: a fifth of the
difference between a sweep of six short runs and a sweep of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks._measure import Options, Row, clocked, in_turn

SWEEP = ("defense=baybfed,flame,krum", "pmr=0.2,0.3,0.5")
QUICK = ("n_clients=6", "rounds=1", "pretrain_rounds=1", "local_epochs=1")
TOGETHER, IN_TURN = "side by side", "one after another"


def measure(options: Options) -> Iterator[Row]:
    settings = QUICK if options.quick else ()
    commands = {
        TOGETHER: partial(run, *SWEEP, *settings),
        IN_TURN: partial(run, *SWEEP, *settings, "hydra/launcher=basic", "executor.devices=1"),
    }
    times = in_turn(
        {name: partial(clocked, command) for name, command in commands.items()},
        options.repeats,
        warm_up=False,  # each is a new process
    )
    yield Row.of(f"9 runs, {os.cpu_count()} cores", times, TOGETHER, IN_TURN)
    times = in_turn({"further run": partial(further_run, *QUICK)}, options.repeats, warm_up=False)
    yield Row("its start, beside its rounds", "further run", times["further run"])


def run(*settings: str) -> float:
    """Does a sweep, and says how many seconds its rounds took."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fedbench", "-m", *settings, f"out={out}", "tracker=none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summaries = [json.loads(path.read_text()) for path in Path(out).glob("*/*/summary.json")]
        return sum(summary["seconds"] for summary in summaries)


def further_run(*settings: str) -> float:
    """Seconds that each of five more runs in the same process takes beyond its rounds."""
    beyond = []
    for defenses in ("krum", "krum,flame,median,fedavg,foolsgold,dp"):
        rounds = 0.0

        def sweep(defenses: str = defenses) -> None:
            nonlocal rounds
            rounds = run(f"defense={defenses}", *settings, "hydra.launcher.n_jobs=1")

        total = clocked(sweep)
        beyond.append(total - rounds)
    return max(beyond[1] - beyond[0], 1e-9) / 5
