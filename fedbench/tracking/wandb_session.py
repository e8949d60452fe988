"""WandbSession: one W&B run, driven by a thread.

A session logs every round of the run, from round 0; it starts with those in rounds.jsonl. One line
of W&B's history is one round, and W&B replaces the lines of an earlier attempt with the same id. So
a run is complete in W&B however often it was interrupted, wherever its attempts were logged, and
however much of them arrived.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from fedbench.errors import UserError
from fedbench.report.partition_figure import PARTITION_FILE
from fedbench.tracking.trackers import RunInfo, Session, Wandb
from fedbench.tracking.wandb_rows import (
    CLIENT_COLUMNS,
    client_rows,
    history,
    ranges,
    score_histograms,
)

if TYPE_CHECKING:
    import wandb

MAX_NAME = 128  # characters of a run's name
GRACE = 30.0  # seconds to wait for W&B beyond its own timeouts
INTERRUPTED = 1.0  # seconds to wait for W&B if the run is interrupted
NO_LOGIN = "not logged in; run `wandb login` or set WANDB_API_KEY, or use --mode offline"


class WandbSession(Session):
    """A W&B run and its service process, driven by one daemon thread.

    The thread bounds every call: in many places W&B waits for its service process without a
    timeout, while `finish` waits for the thread with one. The service ends with the session. This
    keeps the runs of a sweep apart, even after a failure, and leaves no atexit hook of W&B that
    could hang.
    """

    def __init__(
        self, settings: Wandb, run: RunInfo, say: Callable[[str], None], ended: bool = False
    ) -> None:
        """`ended`: the run is over. Then a missing login is an error, and this machine's load and
        packages, which say nothing about the run, are not recorded.
        """
        self.settings = settings
        self.run = run
        self.say = say
        self.ended = ended
        # Equal for all attempts at a run, different between sweeps.
        self.id = re.sub(r"[^\w.-]", "-", f"{run.group}-{run.id}")[-128:].strip("-")
        self.address = ""  # URL, or the folder of an offline run; empty if W&B did not start
        self.failure = ""
        self.over = False  # ignore further records
        self.abandoned = False  # the thread hangs; `finish` no longer waits for it
        self.jobs: SimpleQueue[Callable[[wandb.Run], object] | None] = SimpleQueue()
        self.clients: list[list[Any]] = []
        self.ranges: dict[str, float] = {}  # for the summary
        self.service: subprocess.Popen[bytes] | None = None
        self.stopped = Event()  # not `Thread.is_alive`, which an interrupted `join` makes False
        Thread(target=self._work, name="wandb", daemon=True).start()

    def round(self, record: Mapping[str, Any]) -> None:
        if not self.over:
            self.jobs.put(partial(self._log, record))

    def finish(self, summary: Mapping[str, Any]) -> None:
        if not self.over:
            self.jobs.put(partial(self._end, summary))
        reason = "interrupted"
        try:
            self._close()
            reason = "its service process does not answer"
        finally:  # also after Ctrl-C
            atexit.unregister(self._close)
            if not self.stopped.is_set():
                self._abandon(reason)

    def interrupt(self) -> None:
        self.over = True  # nothing to say: the run itself says that it can be resumed
        self.jobs.put(None)
        self.stopped.wait(INTERRUPTED)
        atexit.unregister(self._close)
        if not self.stopped.is_set():
            self._abandon("interrupted")

    def _abandon(self, reason: str) -> None:
        self.abandoned = True
        self._give_up(reason)
        if self.service is not None:
            self.service.kill()  # it would go on trying to upload after this process has ended
        # This first removes W&B's atexit hook, which has no timeout.
        helper = Thread(target=teardown, name="wandb-teardown", daemon=True)
        helper.start()
        helper.join(1)

    def _close(self) -> None:
        self.jobs.put(None)
        self.stopped.wait(self.settings.init_timeout + self.settings.finish_timeout + GRACE)

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # W&B also raises SystemExit
            self._give_up(str(error) or type(error).__name__)
        finally:
            self.over = True
            if not self.abandoned:  # otherwise the next session may own the service by now
                teardown()
                _remove_scratch_folders()
            self.stopped.set()

    def _serve(self) -> None:
        run = self._start()
        if run is None:
            return
        for record in self.run.earlier:
            self._log(record, run)
        while (job := self.jobs.get()) is not None:
            job(run)

    def _start(self) -> wandb.Run | None:
        folder = self.run.directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # Fail here: W&B itself would fall back to the system's temporary folder.
        tempfile.TemporaryFile(dir=folder).close()
        wanted = self._setup()
        if wanted == "disabled":
            line = "disabled by WANDB_MODE or `wandb disabled`"
            if self.ended:
                raise UserError(f"{line}; use --mode online")
            self.say(f"wandb: {line}")
            return None
        import wandb

        online = wanted == "online" and wandb.login(prompt=False, verify=False)
        if self.ended and wanted == "online" and not online:
            raise UserError(NO_LOGIN)
        run = self._init(online)
        self.address = str(run.url if online else Path(run.dir).parent)
        why = ", not logged in" if wanted == "online" else ""
        place = f"{run.project_url}, group {self.run.group}" if self.run.in_sweep else run.url
        line = f"online, {place}" if online else f"offline{why}; {self._later()}"
        self.say(f"wandb: {line}")
        partition = self.run.directory / PARTITION_FILE
        if partition.exists():
            # Not committed: round 0 has the same step and commits both.
            run.log({"partition": wandb.Image(str(partition))}, step=0, commit=False)
        return run

    def _setup(self) -> str:
        """Start the service; return the mode set by settings, environment or W&B's own files."""
        # W&B reports its own errors at exit, and the exit waits for that.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        with suppress(ImportError, AttributeError):
            for scratch in _scratch_folders():
                os.makedirs(scratch.name, 0o700, exist_ok=True)  # an earlier session removed it
        quiet = wandb.Settings(silent=True)
        if self.settings.mode != "auto":
            quiet.mode = "online" if self.settings.mode == "online" else "offline"
        hooks = sys.exit, sys.excepthook
        mode = wandb.setup(quiet).settings.mode
        # W&B wraps both to learn the exit code, once more for every service it starts.
        sys.exit, sys.excepthook = hooks
        with suppress(AttributeError):  # W&B does not document its process
            process = wandb.sdk.wandb_setup.singleton().ensure_service()._proc
            self.service = process._process if process else None
        atexit.register(self._close)  # if `finish` is never called; runs before W&B's hook
        return {"dryrun": "offline", "run": "online", "shared": "online"}.get(mode, mode)

    def _init(self, online: bool) -> wandb.Run:
        import wandb

        return wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            id=self.id,
            name=short_name(self.run.name, self.run.id),
            group=self.run.group[:128] or None,
            tags=[tag[:64] for tag in self.run.tags if tag],
            config=dict(self.run.config),
            dir=str(self.run.directory),
            mode="online" if online else "offline",
            reinit="create_new",
            # Replace an earlier attempt: a resumed W&B run would refuse rounds that it has, and
            # keep the gaps of an attempt whose last rounds were lost.
            resume=None,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=self.settings.init_timeout,
                finish_timeout=self.settings.finish_timeout,
                finish_timeout_raises=True,
                x_disable_stats=self.ended,
                x_disable_meta=self.ended,
                x_save_requirements=not self.ended,
            ),
        )

    def _log(self, record: Mapping[str, Any], run: wandb.Run) -> None:
        self.clients += client_rows(record)
        # Commit now, or W&B holds the step back until the next one begins.
        values = history(record)
        run.log(values | score_histograms(record), step=record["round"], commit=True)
        self.ranges = ranges(self.ranges, values)
        run.summary.update(self.ranges)

    def _end(self, summary: Mapping[str, Any], run: wandb.Run) -> None:
        import wandb

        run.summary.update({name: value for name, value in summary.items() if value is not None})
        try:
            run.summary["clients"] = wandb.Table(columns=[*CLIENT_COLUMNS], data=[*self.clients])
        finally:
            # Online, W&B asks the server about a table; an error there must not leave the run open.
            run.finish(exit_code=0 if summary["status"] == "finished" else 1)
        self._remove_earlier_folders(Path(run.dir).parent)

    def _remove_earlier_folders(self, complete: Path) -> None:
        """Delete the W&B folders of interrupted attempts, now that one has every round."""
        for folder in complete.parent.glob("*run-*"):  # all of this run
            if folder.name != complete.name:
                shutil.rmtree(folder, ignore_errors=True)

    def _later(self) -> str:
        directory = self.run.directory
        folder, what = (directory.parent, "the runs") if self.run.in_sweep else (directory, "it")
        return f"python -m fedbench.upload {shlex.quote(str(folder))} sends {what} later"

    def _give_up(self, reason: str) -> None:
        if not self.over:
            self.over = True
            # W&B's advice is about a call that the user does not make.
            reason = reason.partition("Consider increasing the init_timeout")[0]
            self.failure = shorten(reason, 300).rstrip(".")
            self.say(f"wandb: {self.failure}; the run goes on without it; {self._later()}")


def teardown() -> None:
    """End the service process. If that fails, a warning has already been printed."""
    if "wandb" in sys.modules:
        with suppress(BaseException):  # also SystemExit, if the service ended with an error
            sys.modules["wandb"].teardown()


def _scratch_folders() -> list[tempfile.TemporaryDirectory[str]]:
    """W&B's folders in the system's temporary directory, made when it is imported."""
    from wandb.sdk.artifacts.artifact import Artifact
    from wandb.sdk.data_types._private import MEDIA_TMP

    return [MEDIA_TMP, Artifact._TMP_DIR]


def _remove_scratch_folders() -> None:
    """Remove W&B's temporary files now: a worker of a sweep is killed and never cleans up."""
    if "wandb" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):  # W&B does not document these names
        from wandb.sdk.artifacts.artifact_instance_cache import (
            artifact_instance_cache_by_client_id as artifacts,
        )

        of_tables = [artifact._tmp_dir for artifact in artifacts.values()]
        for folder in [*_scratch_folders(), *of_tables]:
            if folder is not None:
                folder.cleanup()


def short_name(name: str, run_id: str) -> str:
    """Shorten a run's title to W&B's limit; the hash of the run id still tells it from others."""
    tail = f"… {run_id.rpartition('-')[2]}"
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - len(tail)] + tail
