"""`python -m fedbench.upload runs/NAME`: send runs that have ended to Weights & Biases."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout

from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.origin import title
from fedbench.results.run_dir import RunDir
from fedbench.results.run_reader import RunResult, read_rounds, read_runs
from fedbench.tracking.trackers import MODES, TRACKERS, RunInfo, Wandb
from fedbench.tracking.wandb_session import WandbSession

FINISH_TIMEOUT = 600.0  # seconds; nothing else waits for an upload
ENDED = ("finished", "failed")


class UnreachableError(UserError):
    """W&B could not be used at all, so other runs would fail as well."""


@dataclass(frozen=True)
class Upload:
    """Where runs are sent. None: as in the settings of the run, or the tracker's default."""

    project: str | None
    entity: str | None
    mode: str

    def send(self, run: RunResult) -> str:
        """Send a run; return what was sent, and where it is now."""
        folder, config = run.folder, config_of(run.folder)
        rounds = read_rounds(run)
        about = RunInfo.of(config, title(run.config, run.origin), folder, rounds)
        session = WandbSession(self._settings(config.tracker), about, lambda line: None, ended=True)
        session.finish(run.summary)
        if session.failure and not session.address:
            raise UnreachableError(session.failure)
        if session.failure:
            raise UserError(session.failure)
        n = len(rounds)
        return f"{n} round{'s' * (n != 1)}, {session.address}"

    def _settings(self, tracked: Mapping[str, Any]) -> Wandb:
        settings = TRACKERS.build(tracked)
        if not isinstance(settings, Wandb):
            settings = Wandb()
        return replace(
            settings,
            project=self.project or settings.project,
            entity=self.entity or settings.entity,
            mode=self.mode,
            finish_timeout=max(settings.finish_timeout, FINISH_TIMEOUT),
        )


def config_of(folder: Path) -> RunConfig:
    """Return the settings in config.yaml; those that it lacks have their defaults."""
    loaded: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    known = {field.name for field in fields(RunConfig)}
    if unknown := sorted(loaded.keys() - known):
        raise UserError(f"config.yaml: {unknown[0]} is not a setting of this version of fedbench")
    return RunConfig(**loaded)


def _send_or_skip(upload: Upload, run: RunResult) -> str:
    if run.status == "unreadable":
        raise UserError(run.reason)
    try:
        with RunDir(run.folder).locked(wait=False):
            return upload.send(run) if run.status in ENDED else "not finished, skipped"
    except Timeout:
        return "still running, skipped"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fedbench upload",
        description="Send finished and failed runs to Weights & Biases, from their files. A run "
        "that is there already is replaced.",
    )
    parser.add_argument("folders", nargs="+", metavar="folder", help="runs/NAME, or a single run")
    default = "(default: tracker.{0} of the run, otherwise {1})".format
    parser.add_argument("--project", help=f"W&B project {default('project', Wandb.project)}")
    parser.add_argument(
        "--entity", help=f"team or user {default('entity', 'that of your account')}"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="offline writes files for `wandb sync`; auto is online unless WANDB_MODE or "
        "`wandb offline` say otherwise (default: auto)",
    )
    options = parser.parse_args(arguments)
    upload = Upload(options.project, options.entity, options.mode)
    try:
        runs = read_runs(options.folders)
    except UserError as error:
        print(f"fedbench.upload: {error}", file=sys.stderr)
        return 2
    try:
        return 0 if send_all(upload, runs, "fedbench.upload") else 1
    except UnreachableError as error:
        print(f"fedbench.upload: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def send_all(upload: Upload, runs: Sequence[RunResult], command: str) -> bool:
    """Print a line per run; return whether all could be sent, apart from those not yet ended."""
    complete = True
    for run in runs:
        try:
            print(f"{run.folder}  {_send_or_skip(upload, run)}", flush=True)
        except UnreachableError:
            raise
        except (UserError, OSError, ValueError) as error:
            print(f"{command}: {run.folder}: {error}", file=sys.stderr)
            complete = False
    return complete


if __name__ == "__main__":
    sys.exit(main())
