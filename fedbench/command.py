"""Start the command line from Python and read the runs that it leaves.

A process of its own, for three reasons. The processes of a run or sweep cannot import the notebook
that called them. Plugins are imported anew, so that edits count. Memory is freed at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedbench.composition import overrides_of
from fedbench.errors import PREFIX, WARNING, UserError
from fedbench.results.run_reader import RunResult, read_runs
from fedbench.results.settings import flat

NOT_STARTED = "did not start; the output says why"


def start_runs(arguments: Sequence[str]) -> list[RunResult]:
    """Run `python -m fedbench`, print its output and return its runs; UserError if none started."""
    with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
        listing = Path(folder, "runs.jsonl")
        code, errors = _execute(arguments, listing)
        runs = read_listing(listing)
    number = -code if code < 0 else code - 128  # the command reports signals as shells do
    if number in signal.valid_signals():
        name = signal.Signals(number).name
        raise UserError(f"the process was killed ({name}); the same call resumes its runs")
    if all(run.reason == NOT_STARTED for run in runs):
        raise UserError(errors[-1] if errors else "no run started, see the output")
    if code and all(run.status == "finished" for run in runs):
        raise UserError(errors[-1] if errors else "the command failed, see the output")
    for error in errors:
        print(PREFIX + error)
    return runs


def _execute(arguments: Sequence[str], listing: Path) -> tuple[int, list[str]]:
    """Run the command; return its exit code and its user errors."""
    words = [*arguments, *overrides_of({"+hydra.callbacks.sweep.listing": listing})]
    paths = os.pathsep.join(path for path in sys.path if path)  # finds the same fedbench, plugins
    with subprocess.Popen(
        [sys.executable, "-m", "fedbench", *words],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # interrupts reach it through this process only
    ) as process:
        try:
            errors = _relay(process)
        except BaseException:
            _stop(process)
            raise
    return process.returncode, errors


def _relay(process: subprocess.Popen[str]) -> list[str]:
    """Print the output of the command; return its user errors instead of printing them."""
    errors = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(PREFIX) and not line.startswith(WARNING):
            errors.append(line.removeprefix(PREFIX).strip())
        else:
            print(line, end="", flush=True)
    return errors


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt the command and print how its runs stopped; kill it if interrupted again."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        _relay(process)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def read_listing(listing: Path) -> list[RunResult]:
    """Read the runs that SweepCallback lists; a run without a folder has not started."""
    if not listing.exists():
        return []
    runs = []
    for entry in map(json.loads, listing.read_text(encoding="utf-8").splitlines()):
        folder = Path(entry["folder"])
        if (folder / "config.yaml").exists() or (folder.is_dir() and not entry["config"]):
            runs += read_runs([folder])
        else:
            runs.append(RunResult(folder, "failed", flat(entry["config"]), {}, NOT_STARTED))
    return runs
