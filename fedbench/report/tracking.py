"""Trackers: send the rounds of a run to Weights & Biases, or nowhere.

A tracker never affects the run. It works on its own thread, so no round waits for it, and a failure
prints one line on the console.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from threading import Thread
from typing import TYPE_CHECKING, Any

from fedbench.errors import nearest
from fedbench.registry import Registry, require
from fedbench.report.partition_figure import PARTITION_FILE
from fedbench.results.run_reader import STEALTH

if TYPE_CHECKING:
    import wandb

# Columns of the table of clients that a session logs at its end.
RECORDED = ("malicious", "accepted", "score", "weight", "norm", "cosine")
CLIENT_COLUMNS = ("round", "client", *RECORDED)
# Keys of a round that are logged under their own names.
LOGGED = ("MA", "BA", "TPR", "TNR", "AUC", "pdr", *STEALTH)
GRACE = 30.0  # seconds to wait for W&B beyond its own timeouts
MAX_NAME = 128  # characters of a run's name in W&B
MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class RunInfo:
    """What a tracker knows about a run before its first round."""

    id: str
    name: str
    group: str  # `name` of the configuration, shared by the runs of a sweep
    tags: tuple[str, ...]
    config: Mapping[str, Any]  # resolved
    directory: Path
    first_round: int = 0  # above 0 for a resumed run
    earlier: tuple[Mapping[str, Any], ...] = ()  # records of the rounds before `first_round`


class Session:
    """One tracked run. No method raises. This base class discards everything."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a line of rounds.jsonl; the caller must not change it afterwards."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log summary.json and end the session, in bounded time."""


class Tracker(ABC):
    """A tracking service; its fields are its settings."""

    @abstractmethod
    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        """Start a session; `say` prints a line and may be called from another thread."""


TRACKERS: Registry[Tracker] = Registry("tracker", "fedbench.report.tracking")


@TRACKERS.register("none")
@dataclass(frozen=True)
class NoTracker(Tracker):
    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        return Session()


@TRACKERS.register("wandb")
@dataclass(frozen=True)
class Wandb(Tracker):
    project: str = "fedbench"
    entity: str | None = None  # None: the account's default
    mode: str = "auto"  # auto: as WANDB_MODE or `wandb offline` say, otherwise online if logged in
    init_timeout: float = 20.0  # seconds to reach the server
    finish_timeout: float = 60.0  # seconds to upload the rest when a run ends

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: no such mode{nearest(self.mode, MODES)}")
        for name in ("init_timeout", "finish_timeout"):
            require(self, name, getattr(self, name) > 0, "above 0 seconds")

    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        return WandbSession(self, run, say)


class WandbSession(Session):
    """A W&B run and its service process, driven by one daemon thread.

    The thread bounds every call: in many places W&B waits for its service process without a
    timeout, while `finish` waits for the thread with one. The service ends with the session. This
    keeps the runs of a sweep apart, even after a failure, and leaves no atexit hook of W&B that
    could hang.
    """

    def __init__(self, settings: Wandb, run: RunInfo, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.run = run
        self.say = say
        self.over = False  # ignore further records
        self.abandoned = False  # the thread hangs; `finish` no longer waits for it
        self.jobs: SimpleQueue[Callable[[wandb.Run], object] | None] = SimpleQueue()
        self.clients = [row for record in run.earlier for row in client_rows(record)]
        self.thread = Thread(target=self._work, name="wandb", daemon=True)
        self.thread.start()

    def round(self, record: Mapping[str, Any]) -> None:
        if not self.over:
            self.jobs.put(partial(self._log, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if not self.over:
            self.jobs.put(partial(self._end, summary))
        self._close()
        atexit.unregister(self._close)
        if self.thread.is_alive():
            self.abandoned = True
            self._give_up("its service process does not answer")
            # This first removes W&B's atexit hook, which has no timeout.
            helper = Thread(target=_teardown, name="wandb-teardown", daemon=True)
            helper.start()
            helper.join(1)

    def _close(self) -> None:
        self.jobs.put(None)
        self.thread.join(self.settings.init_timeout + self.settings.finish_timeout + GRACE)

    def _work(self) -> None:
        try:
            run = self._start()
            while run is not None and (job := self.jobs.get()) is not None:
                job(run)
        except BaseException as error:  # W&B also raises SystemExit
            self._give_up(str(error) or type(error).__name__)
        finally:
            self.over = True
            if not self.abandoned:  # otherwise the next session may own the service by now
                _teardown()

    def _start(self) -> wandb.Run | None:
        folder = self.run.directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # Fail here: W&B itself would fall back to the system's temporary folder.
        tempfile.TemporaryFile(dir=folder).close()
        wanted = self._setup()
        if wanted == "disabled":
            self.say("wandb: disabled by WANDB_MODE or `wandb disabled`")
            return None
        import wandb

        online = wanted == "online" and wandb.login(prompt=False, verify=False)
        run = self._init(online)
        why = ", not logged in" if wanted == "online" else ""
        offline = f"wandb: offline{why}; {folder} (wandb sync uploads it)"
        self.say(f"wandb: online, {run.url}" if online else offline)
        partition = self.run.directory / PARTITION_FILE
        if partition.exists():
            # Not committed: the first round has the same step and commits both.
            image = wandb.Image(str(partition))
            run.log({"partition": image}, step=self.run.first_round, commit=False)
        return run

    def _setup(self) -> str:
        """Start the service; return the mode set by settings, environment or W&B's own files."""
        # W&B reports its own errors at exit, and the exit waits for that.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        quiet = wandb.Settings(silent=True)
        if self.settings.mode != "auto":
            quiet.mode = "online" if self.settings.mode == "online" else "offline"
        hooks = sys.exit, sys.excepthook
        mode = wandb.setup(quiet).settings.mode
        # W&B wraps both to learn the exit code, once more for every service it starts.
        sys.exit, sys.excepthook = hooks
        atexit.register(self._close)  # if `finish` is never called; runs before W&B's hook
        return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)

    def _init(self, online: bool) -> wandb.Run:
        import wandb

        # Equal for all attempts at a run, different between sweeps.
        run_id = re.sub(r"[^\w.-]", "-", f"{self.run.group}-{self.run.id}")[-128:].strip("-")
        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            id=run_id,
            name=short_name(self.run.name, self.run.id),
            group=self.run.group[:128] or None,
            tags=[tag[:64] for tag in self.run.tags if tag],
            config=dict(self.run.config),
            dir=str(self.run.directory),
            mode="online" if online else "offline",
            reinit="create_new",
            # A run that starts at round 0 replaces an earlier attempt with the same id.
            resume="allow" if self.run.first_round else None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=self.settings.init_timeout,
                finish_timeout=self.settings.finish_timeout,
                finish_timeout_raises=True,
            ),
        )

    def _log(self, record: Mapping[str, Any], run: wandb.Run) -> None:
        self.clients += client_rows(record)
        # Commit now, or W&B holds the step back until the next one begins.
        run.log(history(record), step=record["round"], commit=True)

    def _end(self, summary: Mapping[str, Any], run: wandb.Run) -> None:
        import wandb

        run.summary.update({name: value for name, value in summary.items() if value is not None})
        try:
            run.summary["clients"] = wandb.Table(columns=[*CLIENT_COLUMNS], data=[*self.clients])
        finally:
            # Online, W&B asks the server about a table; an error there must not leave the run open.
            run.finish(exit_code=0 if summary["status"] == "finished" else 1)

    def _give_up(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self.say(f"wandb: {shorten(reason, 300).rstrip('.')}; the run goes on without it")


def _teardown() -> None:
    """End the service process. If that fails, a warning has already been printed."""
    if "wandb" in sys.modules:
        with suppress(BaseException):  # also SystemExit, if the service ended with an error
            sys.modules["wandb"].teardown()


def short_name(name: str, run_id: str) -> str:
    """Shorten a run's title to W&B's limit; the hash of the run id still tells it from others."""
    tail = f"… {run_id.rpartition('-')[2]}"
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - len(tail)] + tail


def history(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round by their W&B names, without those that are None."""
    values = {name: record.get(name) for name in LOGGED}
    values |= {f"BA/{name}": value for name, value in record.get("BA_by_backdoor", {}).items()}
    values |= {f"seconds/{step}": value for step, value in record["seconds"].items()}
    values |= {f"score/{client['id']}": client["score"] for client in record["clients"]}
    judged = [c["accepted"] for c in record["clients"] if c["accepted"] is not None]
    values["n_accepted"] = sum(judged) if judged else None
    return {name: value for name, value in values.items() if value is not None}


def client_rows(record: Mapping[str, Any]) -> list[list[Any]]:
    """Return the rows of a round for the table of clients, in the order of CLIENT_COLUMNS."""
    return [[record["round"], c["id"], *(c[key] for key in RECORDED)] for c in record["clients"]]
