"""engine.processes: whatever happens to the processes of a run, they end together and in time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric

from fedbench.engine import processes, reply_limit, transport
from fedbench.engine.executors import Sequential
from fedbench.engine.launch import launch
from fedbench.engine.processes import RankError, WorkerError
from fedbench.engine.reply_limit import FACTOR, LEAST, ReplyLimit
from fedbench.engine.transport import Link, connect, links_in, send_to_rank_0
from fedbench.errors import Terminated, UserError

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks")


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Folder where each rank leaves a file with its process id. None of them may be left."""
    yield tmp_path
    for file in tmp_path.glob("rank*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def ready(fabric: Fabric, folder: Path) -> None:
    """Leave this rank's process id, and wait for those of the others."""
    partial = folder / f"partial{fabric.global_rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"rank{fabric.global_rank}")
    while len(list(folder.glob("rank*"))) < fabric.world_size:
        time.sleep(0.01)


def stop_one(fabric: Fabric, folder: Path, stopped: int) -> None:
    """One rank stops; the others wait for it."""
    ready(fabric, folder)
    if fabric.global_rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_run(
    rank: int, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOPPED", 1.0)
    line = rf"worker process {rank + 1} of 2 has been stopped by a signal \(SIGSTOP\) for 1 s"
    with pytest.raises(WorkerError, match=line):
        launch(Sequential(), 2, stop_one, pids, rank)


def stop_briefly(fabric: Fabric, folder: Path) -> int:
    ready(fabric, folder)
    if fabric.global_rank == 0:
        other = int((folder / "rank1").read_text())
        os.kill(other, signal.SIGSTOP)
        time.sleep(0.6)  # a look of the parent finds it stopped
        os.kill(other, signal.SIGCONT)
    time.sleep(1.2)
    return fabric.world_size


@linux
@pytest.mark.slow
def test_a_rank_that_continues_is_not_ended(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOPPED", 1.0)
    assert launch(Sequential(), 2, stop_briefly, pids) == 2


def recording(fabric: Fabric, folder: Path, stopped: int) -> None:
    """Rank 0 needs a moment to record an interrupt, such as to close a tracker."""
    try:
        stop_one(fabric, folder, stopped)
    except KeyboardInterrupt:
        time.sleep(0.2)
        (folder / "recorded").touch()
        raise


@linux
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated(signal.SIGTERM)], ids=type)
def test_an_interrupt_ends_a_run_with_a_stopped_rank(
    error: KeyboardInterrupt, stopped: int, pids: Path
) -> None:
    """Within 5 s; rank 0 records it, unless it is the stopped one."""
    interrupted: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(time.monotonic())
        raise error

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=send_when_ready, args=(pids,), daemon=True).start()
    try:
        with pytest.raises(type(error)) as caught:
            launch(Sequential(), 2, recording, pids, stopped)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is error
    assert time.monotonic() - interrupted[0] < 5
    assert (pids / "recorded").exists() == (stopped != 0)


def send_when_ready(folder: Path) -> None:
    while len(list(folder.glob("rank*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.2)  # one of them stops
    os.kill(os.getpid(), signal.SIGUSR1)


def fail(fabric: Fabric, folder: Path, error: Exception | None) -> Exception | None:
    """Rank 1 is killed, raises, or returns a user error as runs do; rank 0 goes on."""
    ready(fabric, folder)
    if fabric.global_rank == 1:
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif isinstance(error, UserError) and not str(error).startswith("raised"):
            return error
        else:
            raise error
    time.sleep(60)
    return None


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (None, WorkerError, r"worker process 2 of 2 died \(SIGKILL\); the same command resumes"),
        (UserError("lr=0: too small"), UserError, "^lr=0: too small$"),
        (UserError("raised: lr=0"), UserError, "^raised: lr=0$"),
        (ZeroDivisionError("by zero"), RankError, "^ZeroDivisionError: by zero$"),
    ],
    ids=["killed", "returned user error", "raised user error", "bug"],
)
def test_the_error_of_a_rank_ends_all(
    error: Exception | None, raised: type[Exception], line: str, pids: Path
) -> None:
    with pytest.raises(raised, match=line) as caught:
        launch(Sequential(), 2, fail, pids, error)
    if raised is RankError:
        assert "test_processes.py" in str(caught.value.__cause__)


def listening(processes: list[str]) -> list[str]:
    """Addresses on which processes listen, or wait for datagrams, by Linux's tables of sockets."""
    own = set()
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                own.add(os.readlink(handle))
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                found.append(f"{table} {fields[1]}")
    return found


def sockets_of_all(fabric: Fabric, folder: Path) -> list[str]:
    ready(fabric, folder)
    links = links_in(fabric)
    if fabric.global_rank == 0:
        links[0].send("a command")
        assert links[0].answers_within(30)
        send_to_rank_0({}, [[], []], 0, links)
        return listening([file.read_text() for file in folder.glob("rank*")])
    links[0].send(links[0].receive(fabric.device))
    return []


@linux
@pytest.mark.slow
def test_nobody_can_connect_to_a_rank(pids: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening([str(os.getpid())])) == 1  # the test would find one
        before = listening([str(os.getpid())])
    assert [
        line for line in launch(Sequential(), 2, sockets_of_all, pids) if line not in before
    ] == []


@pytest.fixture
def link() -> Iterator[tuple[Link, Link]]:
    (ends,) = connect(2)
    yield ends
    for end in ends:
        end.close()


def test_time_stands_still_while_the_job_is_suspended(
    link: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour may pass between two looks: it counts as one."""
    looks: list[float] = []
    now = iter(range(0, 10**6, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(transport, "wait", lambda handles, seconds: looks.append(seconds))
    assert not link[0].answers_within(5)
    assert sum(looks) == 5


def test_a_reply_in_time_is_received(link: tuple[Link, Link]) -> None:
    threading.Timer(0.05, link[1].send, ["done"]).start()
    assert link[0].answers_within(30)
    assert link[0].receive(torch.device("cpu")) == "done"


def test_the_limit_follows_the_slowest_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEAST, raising=False)
    limit = ReplyLimit()
    assert limit.seconds("train", 1000) == reply_limit.DEFAULT_LEAST  # nothing is known yet
    limit.note("train", 100.0, 1000)
    limit.note("train", 400.0, 2000)  # slower: 0.2 s per sample
    limit.note("train", 9.0, 0)  # a rank without clients
    assert limit.seconds("train", 5000) == pytest.approx(FACTOR * 0.2 * 5000)
    assert limit.seconds("train", 10) == reply_limit.DEFAULT_LEAST
    assert limit.seconds("evaluate", 1) == reply_limit.DEFAULT_LEAST


def test_the_least_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEAST, "7200")
    assert ReplyLimit().seconds("train", 1) == 7200
    monkeypatch.setenv(LEAST, "inf")
    assert ReplyLimit().seconds("train", 1) == float("inf")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", ""])
def test_wrong_limits_are_one_line(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEAST, value)
    with pytest.raises(UserError, match=f"^{LEAST}={value}: must be a number of seconds above 0$"):
        ReplyLimit()
