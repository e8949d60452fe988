"""How the runs of a sweep tell the command about their progress: lines of JSON in a shared folder.

A file works with every launcher: its processes may have no terminal, or be on another machine that
shares the file system. Each process appends to a file of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER = "FEDBENCH_EVENTS"  # environment variable that a sweep sets for its runs

Event = dict[str, Any]


def in_panel() -> bool:
    """Whether the command of a sweep shows this process's runs."""
    return FOLDER in os.environ


def send(**event: Any) -> None:
    """Append an event for the command; a failure to do so never stops the run."""
    path = Path(os.environ[FOLDER], f"{socket.gethostname()}-{os.getpid()}.jsonl")
    line = json.dumps(event, default=str) + "\n"
    with suppress(OSError), path.open("ab", buffering=0) as file:
        file.write(line.encode())


class Relay(io.TextIOBase):
    """Stands in for stdout or stderr in a run of a sweep; the command prints its lines."""

    def __init__(self, error: bool) -> None:
        self.error = error
        self._part = ""

    def write(self, text: str) -> int:
        *lines, self._part = (self._part + text).split("\n")
        if lines:
            send(event="output", lines=lines, error=self.error)
        return len(text)

    def rest(self) -> None:
        """Send a last line that has no end."""
        if self._part:
            self.write("\n")


@contextmanager
def relayed(job: int | None) -> Iterator[None]:
    """In a sweep with a panel, let the command print this job's output, and tell when it ends.

    Otherwise the lines would tear the panel or, on a cluster, end up in a log file.
    """
    if not in_panel():
        yield
        return
    stopped = Path(os.environ[FOLDER], "stopped")
    if stopped.exists():  # an interrupted worker would otherwise start its next run
        raise KeyboardInterrupt
    out, err = Relay(error=False), Relay(error=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except KeyboardInterrupt:
        with suppress(OSError):
            stopped.touch()
        raise
    finally:
        out.rest()
        err.rest()
    send(event="over", job=job)  # not after an interrupt: the run can be resumed


class EventReader:
    """Reads what is new in a folder of events, a little at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, int] = {}  # bytes by file

    def new(self) -> Iterator[Event]:
        """Events written since the last call, in the order of each process."""
        with suppress(OSError), os.scandir(self.folder) as entries:
            grown = [entry for entry in entries if entry.name.endswith(".jsonl")]
            for entry in grown:
                if entry.stat().st_size > self._read.get(entry.name, 0):
                    yield from self._lines(entry)

    def _lines(self, entry: os.DirEntry[str]) -> Iterator[Event]:
        start = self._read.get(entry.name, 0)
        with open(entry.path, "rb") as file:
            file.seek(start)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
        self._read[entry.name] = start + len(whole) + len(newline)
        for line in whole.splitlines():
            with suppress(ValueError):  # damaged, for example on a full disk
                event = json.loads(line)
                if isinstance(event, Mapping):
                    yield dict(event)
