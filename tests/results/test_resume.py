"""A run that was killed at any moment ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end import (
    RUN_FILES,
    TIMEOUT,
    Plugins,
    checkpoint,
    fedbench,
    fedbench_in_this_process,
    files,
    install,
    result,
    rounds,
    run_folder,
    start,
    succeed,
    wait,
)

pytestmark = pytest.mark.slow

# Clients come and go, so that a memory by position instead of by id would show.
SETTINGS = ["n_clients=[4,6]", "pool=9", "pmr=0.4", "pretrain_rounds=6", "rounds=14"]

PLUGINS = """
import os
import signal
from dataclasses import dataclass

import torch

from fedbench.defense import DEFENSES, Defense, mean_of
from fedbench.tracking.trackers import TRACKERS, Session, Tracker


@DEFENSES.register("memory")
@dataclass(frozen=True)
class Memory(Defense):
    noise: float = 1e-3

    def init(self):
        return {"seen": {}, "rounds": 0}

    def aggregate(self, updates, state, view):
        seen = dict(state["seen"])
        for client, row in zip(view.client_ids.tolist(), updates, strict=True):
            seen[client] = row + 0.5 * seen[client] if client in seen else row.clone()
        scores = torch.stack([seen[client].norm() for client in view.client_ids.tolist()])
        outcome = mean_of(updates, scores <= scores.median(), scores)
        noise = self.noise * torch.randn(len(outcome.update), generator=view.rng)
        outcome.update.add_(noise)
        return outcome, {"seen": seen, "rounds": state["rounds"] + 1}


class Killer(Session):
    def __init__(self, at):
        self.at = at

    def round(self, record):
        if record["round"] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@TRACKERS.register("killer")
@dataclass(frozen=True)
class KillerTracker(Tracker):
    at: int = 0

    def open(self, run, say):
        return Killer(self.at)
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    return install(
        tmp_path / "site",
        "[fedbench.defenses]\nmemory = theirs:Memory\n"
        "[fedbench.trackers]\nkiller = theirs:KillerTracker\n",
        PLUGINS,
        {"defense/memory": "name: memory\nnoise: 1e-3\n", "tracker/killer": "name: killer\nat: 0"},
    )


def kill_when(reached: Callable[[], bool], delay: float, *command: str, plugins: Plugins) -> None:
    """Start the command and kill it `delay` seconds after `reached()`."""
    cwd = Path(plugins.env["PYTHONPATH"].partition(os.pathsep)[0]).parent
    process = start(*command, cwd=cwd, env=plugins.env)
    deadline = time.monotonic() + TIMEOUT
    while not reached():
        assert process.poll() is None, wait(process)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    assert wait(process).code == -signal.SIGKILL


def n_lines(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/*/rounds.jsonl"))


def test_a_run_killed_many_times_equals_an_uninterrupted_one(
    tmp_path: Path, plugins: Plugins
) -> None:
    """The defense has a memory; the attack's backdoor depends on the model before round 0."""
    command = [plugins.searchpath, "defense=memory", "attack=edge_case", *SETTINGS]
    command += ["pretrain_non_iid=0", "non_iid=0.8"]  # pretraining has its own partition
    succeed(*command, "out=calm", cwd=tmp_path, env=plugins.env)
    calm = run_folder(tmp_path / "calm")

    rng = random.Random("moments")
    out, command = tmp_path / "killed", [*command, "out=killed"]

    def pretraining() -> bool:
        return any(out.glob(".pretrained/*.pt"))

    kill_when(pretraining, rng.uniform(0, 0.05), *command, plugins=plugins)
    (cache,) = out.glob(".pretrained/*.pt")
    assert -6 < checkpoint(cache)["next_round"] < 0, "killed too late, after pretraining"
    (cache.parent / f".{cache.name}.partial").write_bytes(b"half a model")

    for moment in (1, 5):  # number of lines in rounds.jsonl

        def there(moment: int = moment) -> bool:
            return n_lines(out) >= moment

        kill_when(there, rng.uniform(0, 0.4), *command, plugins=plugins)
    folder = run_folder(out)
    assert not (folder / "summary.json").exists(), "killed too late, after the last round"

    # The tracker is called after the line is written and before the checkpoint.
    at = n_lines(out) + 2
    ended = fedbench(*command, "tracker=killer", f"tracker.at={at}", cwd=tmp_path, env=plugins.env)
    assert ended.code == -signal.SIGKILL
    assert len(rounds(folder)) == at + 1
    assert checkpoint(folder / "checkpoint.pt")["next_round"] == at
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 99, "attacked": tr')  # torn
    for name in ("checkpoint.pt", "rounds.jsonl", "summary.json"):
        (folder / f".{name}.partial").write_bytes(b"half a file")

    ended = succeed(*command, cwd=tmp_path, env=plugins.env)
    assert ended.out[0].endswith(f"resumes after round {at}/14")
    assert f"round {at + 1}/14" in ended.out[2]  # after the line that names the executor
    assert folder.name == calm.name
    assert files(folder) == RUN_FILES
    assert result(folder) == result(calm)
    assert {len(record["clients"]) for record in rounds(folder)} == {4, 5, 6}
    state = checkpoint(folder / "checkpoint.pt")["defense_state"]
    assert state["rounds"] == 14
    assert len(state["seen"]) > 5


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    tmp_path: Path, plugins: Plugins
) -> None:
    """The first line is written, whole or torn, but no checkpoint confirms it."""
    command = [plugins.searchpath, "defense=memory", "rounds=3"]
    killed = ["tracker=killer", "tracker.at=0", "out=killed"]
    assert fedbench(*command, *killed, cwd=tmp_path, env=plugins.env).code == -signal.SIGKILL
    folder = run_folder(tmp_path / "killed")
    assert files(folder) == [".lock", "config.yaml", "origin.json", "partition.png", "rounds.jsonl"]
    line = (folder / "rounds.jsonl").read_bytes()
    assert json.loads(line)["round"] == 0
    (folder / "rounds.jsonl").write_bytes(line[:100])
    (folder / ".checkpoint.pt.partial").write_bytes(b"half a model")
    (folder / "config.yaml").rename(folder / ".config.yaml.partial")

    succeed(*command, "out=killed", cwd=tmp_path, env=plugins.env)
    succeed(*command, "out=calm", cwd=tmp_path, env=plugins.env)
    assert files(folder) == RUN_FILES
    assert result(folder) == result(run_folder(tmp_path / "calm"))


def test_two_processes_with_the_same_command_run_it_once(tmp_path: Path) -> None:
    command = ["defense=krum", "rounds=6"]
    both = [start(*command, "out=shared", cwd=tmp_path) for _ in range(2)]
    ended = [wait(process) for process in both]
    assert [(end.code, end.err) for end in ended] == [(0, [])] * 2
    lines = "\n".join(line for end in ended for line in end.out)
    assert [lines.count(f"round {index}/6 ") for index in range(1, 7)] == [1] * 6

    alone = fedbench_in_this_process(*command, "out=alone", cwd=tmp_path)
    assert (alone.code, alone.err) == (0, [])
    folder = run_folder(tmp_path / "shared")
    assert files(folder) == RUN_FILES
    assert result(folder) == result(run_folder(tmp_path / "alone"))
    assert lines.count("already finished, skipped") == 1, "the process that waited says so"
