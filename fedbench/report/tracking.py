"""Where a run is watched while it goes: Weights & Biases, or nowhere.

A tracker only watches. It works on a thread of its own, so no round waits for it, and whatever
breaks in it costs one line on the console, never the run.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from threading import Thread
from typing import TYPE_CHECKING, Any

from fedbench.errors import nearest
from fedbench.registry import Registry
from fedbench.report.partition_figure import PARTITION_FILE
from fedbench.results.reader import STEALTH

if TYPE_CHECKING:
    import wandb

CLIENT_COLUMNS = (
    *("round", "client", "malicious", "accepted", "score", "weight"),
    *("norm", "cosine"),
)
SHOWN = ("MA", "BA", "TPR", "TNR", "AUC", "pdr", *STEALTH)
GRACE = 30.0  # seconds above its own time limits that W&B gets to come back
MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about a run before its first record."""

    id: str
    name: str
    group: str  # the sweep
    tags: tuple[str, ...]
    config: Mapping[str, Any]  # resolved
    directory: Path
    first_round: int = 0  # above 0: an interrupted run goes on from here
    earlier: tuple[Mapping[str, Any], ...] = ()  # the records of the rounds before that


class Session:
    """One run being watched. Neither method raises; this one watches nothing."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Take a line of rounds.jsonl; the record must not change afterwards."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take summary.json and end the session; returns within a bounded time."""


class Tracker(ABC):
    """Fields are settings; `say` prints one line and is called from the tracker's thread."""

    @abstractmethod
    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session: ...


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
    mode: str = "auto"  # auto: WANDB_MODE or `wandb offline`; else online if logged in
    init_timeout: float = 20.0  # seconds to reach the server
    finish_timeout: float = 60.0  # seconds to upload what is left when a run ends

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}{nearest(self.mode, MODES)}")
        for name in ("init_timeout", "finish_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")

    def open(self, run: RunInfo, say: Callable[[str], None]) -> Session:
        return WandbSession(self, run, say)


class WandbSession(Session):
    """A W&B run with a service process of its own, both driven by one daemon thread.

    The thread is what bounds every call: W&B waits without limit for its service process in many
    places, and `finish` waits only so long for the thread. Ending the service with the session
    keeps sessions of a sweep apart, also after a failure, and leaves W&B no atexit hook to hang in.
    """

    def __init__(self, settings: Wandb, run: RunInfo, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.run = run
        self.say = say
        self.over = False  # nothing more is taken in
        self.abandoned = False  # the thread hangs and was left behind
        self.inbox: SimpleQueue[Callable[[wandb.Run], object] | None] = SimpleQueue()
        self.clients = [row for record in run.earlier for row in client_rows(record)]
        self.thread = Thread(target=self._work, name="wandb", daemon=True)
        self.thread.start()

    def round(self, record: Mapping[str, Any]) -> None:
        if not self.over:
            self.inbox.put(partial(self._log, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if not self.over:
            self.inbox.put(partial(self._end, summary))
        self._close()
        atexit.unregister(self._close)
        if self.thread.is_alive():
            self.abandoned = True
            self._give_up("its service process does not answer")
            # The first thing this does is to take away W&B's atexit hook, which has no time limit.
            helper = Thread(target=_teardown, name="wandb-teardown", daemon=True)
            helper.start()
            helper.join(1)

    def _close(self) -> None:
        self.inbox.put(None)
        self.thread.join(self.settings.init_timeout + self.settings.finish_timeout + GRACE)

    def _work(self) -> None:
        try:
            run = self._start()
            while run is not None and (job := self.inbox.get()) is not None:
                job(run)
        except BaseException as error:  # SystemExit too, which W&B raises in places
            self._give_up(str(error) or type(error).__name__)
        finally:
            self.over = True
            if not self.abandoned:  # by now the service could be that of the next session
                _teardown()

    def _start(self) -> wandb.Run | None:
        folder = self.run.directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # W&B itself would move to the system's temporary folder, where nobody looks.
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
        self._show_holdings(run)
        return run

    def _setup(self) -> str:
        """Start the service; the mode that settings, environment and W&B's own files ask for."""
        # Reports of W&B's own errors are sent at exit, and waited for.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        quiet = wandb.Settings(silent=True)
        if self.settings.mode != "auto":
            quiet.mode = "online" if self.settings.mode == "online" else "offline"
        hooks = sys.exit, sys.excepthook
        mode = wandb.setup(quiet).settings.mode
        # W&B wraps both to learn the exit code, once more with every service it starts.
        sys.exit, sys.excepthook = hooks
        atexit.register(self._close)  # for a run that ends without `finish`; before W&B's own hook
        return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)

    def _init(self, online: bool) -> wandb.Run:
        import wandb

        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            id=wandb_id(self.run),
            name=self.run.name[:128],
            group=self.run.group[:128] or None,
            tags=[tag[:64] for tag in self.run.tags if tag],
            config=dict(self.run.config),
            dir=str(self.run.directory),
            mode="online" if online else "offline",
            reinit="create_new",
            # A run from round 0 replaces what an earlier attempt may have left under its id.
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

    def _show_holdings(self, run: wandb.Run) -> None:
        import wandb

        path = self.run.directory / PARTITION_FILE
        if path.exists():
            # Not committed: it goes with the first round, which has the same step.
            image = wandb.Image(str(path))
            run.log({"partition": image}, step=self.run.first_round, commit=False)

    def _log(self, record: Mapping[str, Any], run: wandb.Run) -> None:
        self.clients += client_rows(record)
        # Committed at once: W&B would otherwise hold a step back until the next one begins.
        run.log(history(record), step=record["round"], commit=True)

    def _end(self, summary: Mapping[str, Any], run: wandb.Run) -> None:
        import wandb

        run.summary.update({name: value for name, value in summary.items() if value is not None})
        try:
            run.summary["clients"] = wandb.Table(columns=[*CLIENT_COLUMNS], data=self.clients)
        finally:
            # Online, W&B asks the server about a table; a refusal must not leave the run open.
            run.finish(exit_code=0 if summary["status"] == "finished" else 1)

    def _give_up(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self.say(f"wandb: {shorten(reason, 300).rstrip('.')}; the run goes on without it")


def _teardown() -> None:
    """End the service process; one that was killed has no more to say than the warning did."""
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        try:
            wandb.teardown()
        except BaseException:
            # It ends with sys.exit when the service did not end well.
            return


def wandb_id(run: RunInfo) -> str:
    """The same for every attempt at a run, and another for the same run in another sweep."""
    return re.sub(r"[^\w.-]", "-", f"{run.group}-{run.id}")[-128:].strip("-")


def history(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round by their W&B names; what a round does not have is left out."""
    values = {name: record.get(name) for name in SHOWN}
    values |= {f"BA/{name}": value for name, value in record.get("BA_by_backdoor", {}).items()}
    values |= {f"seconds/{step}": value for step, value in record["seconds"].items()}
    values |= {f"score/{client['id']}": client["score"] for client in record["clients"]}
    judged = [c["accepted"] for c in record["clients"] if c["accepted"] is not None]
    values["n_accepted"] = sum(judged) if judged else None
    return {name: value for name, value in values.items() if value is not None}


def client_rows(record: Mapping[str, Any]) -> list[list[Any]]:
    """A round's rows of the table of all clients, in the order of CLIENT_COLUMNS."""
    return [
        [record["round"], c["id"], *(c[column] for column in CLIENT_COLUMNS[2:])]
        for c in record["clients"]
    ]
