"""Kill a sweep at random moments with SIGKILL and resume it: its results are equal to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from end_to_end import TIMEOUT, result, run_folders, start, wait

from tests.soak.outcome import Outcome

TIMES = 50
MARK = "SOAK_KILL"  # environment variable that all processes of a try inherit
SECONDS = 5.0  # until the last process is gone
KILLS = 3  # at most, of one sweep
# Both defenses remember the clients of earlier rounds.
COMMAND = ["-m", "defense=foolsgold,afa", "rounds=8", "pretrain_rounds=3", "model.hidden=[16]"]
COMMAND += ["hydra.launcher.n_jobs=2"]


@dataclass
class Sweep:
    """A sweep in a folder of its own; `mark` tells its processes from those of others."""

    folder: Path
    mark: str

    def start(self) -> subprocess.Popen[str]:
        (self.folder / "tmp").mkdir(exist_ok=True)
        env = {MARK: self.mark, "TMPDIR": str(self.folder / "tmp")}
        return start(*COMMAND, cwd=self.folder, env=env)

    def processes(self) -> list[int]:
        """Ids of all processes of the sweep that have not ended."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def results(self) -> list[Any]:
        return [(folder.name, result(folder)) for folder in run_folders(self.folder / "runs")]


def soak(times: int, seed: int) -> Iterator[Outcome]:
    with TemporaryDirectory(prefix="soak-") as folder:
        calm, mark = Path(folder, "calm"), uuid.uuid4().hex
        calm.mkdir()
        began = time.monotonic()
        ended = wait(Sweep(calm, mark).start())
        span = time.monotonic() - began
        assert ended.code == 0, ended
        expected = Sweep(calm, mark).results()
    for number in range(times):
        rng = random.Random(f"{seed} {number}")
        with TemporaryDirectory(prefix="soak-") as folder:
            kind, failure = attempt(Sweep(Path(folder), uuid.uuid4().hex), rng, span, expected)
        yield Outcome(kind, failure and f"seed {seed}, try {number}: {failure}")


def attempt(sweep: Sweep, rng: random.Random, span: float, expected: Any) -> tuple[str, str | None]:
    """Kill the sweep 1 to KILLS times, resume it to its end; return what was killed, what failed.

    `span` is the time of a sweep that nobody kills.
    """
    killed = []
    for _ in range(rng.randint(1, KILLS)):
        process = sweep.start()
        deadline = time.monotonic() + rng.uniform(0, span)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            target = rng.choice([*VICTIMS])
            VICTIMS[target](sweep, process, rng)
            killed.append(target)
            try:
                process.wait(TIMEOUT if target == "a process" else SECONDS)
            except subprocess.TimeoutExpired:
                return target, "the command is still running"
        left = still_there(sweep)
        ended = wait(process)
        if left:
            return " + ".join(killed), f"{len(left)} processes outlived the command: {left}"
        if any("Traceback" in line for line in ended.err):
            return " + ".join(killed), "\n".join(ended.err)
    ended = wait(sweep.start())
    kind = " + ".join(sorted(set(killed))) or "finished before the kill"
    if ended.code != 0:
        return kind, f"resumed: {ended}"
    if sweep.results() != expected:
        return kind, "other results than those of a sweep that nobody killed"
    partial = [*sweep.folder.rglob(".*.partial")]
    temporary = [*(sweep.folder / "tmp").iterdir(), *sweep.folder.glob("runs/*/.sweep-*")]
    if partial or temporary:
        return kind, f"left over: {[*map(str, partial + temporary)]}"
    return kind, None


def still_there(sweep: Sweep) -> list[int]:
    """Processes of the sweep that are there SECONDS later; they are killed then."""
    deadline = time.monotonic() + SECONDS
    while (left := sweep.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def kill_the_command(sweep: Sweep, process: subprocess.Popen[str], rng: random.Random) -> None:
    process.kill()


def kill_a_process(sweep: Sweep, process: subprocess.Popen[str], rng: random.Random) -> None:
    """Kill a worker or its server; the command if there is nothing else.

    Not a resource tracker: joblib prints a traceback of its own then, and the sweep goes on.
    """
    others = [n for n in sorted(sweep.processes()) if n != process.pid and not is_tracker(n)]
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(others or [process.pid]), signal.SIGKILL)


def is_tracker(process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return b"resource_tracker import" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def kill_all(sweep: Sweep, process: subprocess.Popen[str], rng: random.Random) -> None:
    os.killpg(process.pid, signal.SIGKILL)


VICTIMS: dict[str, Callable[[Sweep, subprocess.Popen[str], random.Random], None]] = {
    "the command": kill_the_command,
    "a process": kill_a_process,
    "all": kill_all,
}
