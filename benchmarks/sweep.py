"""Nine runs of a sweep in parallel, compared to one after another, start-up included.

    python -m benchmarks sweep

Runs the user's commands in fresh folders, so that nothing is cached: nine runs of the defaults
(three defenses, three shares of malicious clients) that share one pretraining. `further run` is the
overhead of a run, beyond its rounds, in a process that has already done another run: a fifth of the
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

from benchmarks._measure import Options, Row, repeat_interleaved, time_call

SWEEP = ("defense=baybfed,flame,krum", "pmr=0.2,0.3,0.5")
QUICK_SWEEP = ("defense=flame,krum", "pmr=0.5")
QUICK = ("n_clients=6", "rounds=1", "pretrain_rounds=1", "local_epochs=1")
MORE = ("flame", "median", "fedavg", "foolsgold", "dp")  # further runs in one process
PARALLEL, SERIAL = "in parallel", "one after another"


def measure(options: Options) -> Iterator[Row]:
    sweep = (*QUICK_SWEEP, *QUICK) if options.quick else SWEEP
    commands = {
        PARALLEL: partial(run, *sweep),
        SERIAL: partial(run, *sweep, "hydra/launcher=basic", "executor.devices=1"),
    }
    times = repeat_interleaved(
        {name: partial(time_call, command) for name, command in commands.items()},
        options.repeats,
        warm_up=False,  # every command starts a new process
    )
    n_runs = 2 if options.quick else 9
    yield Row.of(f"{n_runs} runs, {os.cpu_count()} cores", times, PARALLEL, SERIAL)
    more = MORE[:1] if options.quick else MORE
    times = repeat_interleaved(
        {"further run": partial(further_run, more)}, options.repeats, warm_up=False
    )
    yield Row("overhead of a run", "further run", times["further run"])


def run(*settings: str) -> float:
    """Run a sweep; return the seconds of its rounds."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fedbench", "-m", *settings, f"out={out}", "tracker=none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summaries = [json.loads(path.read_text()) for path in Path(out).glob("*/*/summary.json")]
        return float(sum(summary["seconds"] for summary in summaries))


def further_run(more: tuple[str, ...]) -> float:
    """Overhead in seconds of each further run in the same process."""
    overheads = []
    for defenses in ("krum", ",".join(("krum", *more))):
        rounds = 0.0

        def sweep(defenses: str = defenses) -> None:
            nonlocal rounds
            rounds = run(f"defense={defenses}", *QUICK, "hydra.launcher.n_jobs=1")

        total = time_call(sweep)
        overheads.append(total - rounds)
    return max(overheads[1] - overheads[0], 1e-9) / len(more)
