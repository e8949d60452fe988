"""`python -m fedbench.dashboard runs/NAME`: a workspace and a report page of the runs in W&B."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedbench.errors import UserError
from fedbench.results.run_reader import RunResult, read_runs
from fedbench.tracking.trackers import Wandb
from fedbench.tracking.wandb_dashboard import DashboardPlan
from fedbench.tracking.wandb_views import definition, require_login, save, write_json
from fedbench.upload import Upload, send_all

COMMAND = "fedbench.dashboard"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedbench dashboard",
        description="Create a workspace and a report page of a folder of runs in Weights & Biases, "
        "or update those that an earlier call created.",
    )
    parser.add_argument("folder", help="runs/NAME")
    default = "(default: tracker.{0} of the runs, otherwise {1})".format
    parser.add_argument("--project", help=f"W&B project {default('project', Wandb.project)}")
    parser.add_argument(
        "--entity", help=f"team or user {default('entity', 'that of your account')}"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--upload", action="store_true", help="first send the runs, as `fedbench upload` does"
    )
    what.add_argument(
        "--dry-run",
        action="store_true",
        help="write the definition and stop; needs neither a network nor a login",
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        help="where the definition is written, as JSON (default: FOLDER/report/dashboard.json)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    folder = Path(options.folder)
    path = Path(options.to) if options.to else folder / "report" / "dashboard.json"
    try:
        runs = read_runs([folder])
        project = options.project or _of_all(runs, "project") or Wandb.project
        entity = options.entity or _of_all(runs, "entity")
        plan = DashboardPlan.of(folder, runs)
        write_json(path, definition(plan, entity, project))
    except (UserError, OSError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        _print_broken(runs)
        print(path)
        return 0
    try:
        return _publish(plan, folder, entity, project, options.upload)
    except (UserError, OSError) as error:
        print(f"{COMMAND}: {error}; the definition is in {path}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _publish(
    plan: DashboardPlan, folder: Path, entity: str | None, project: str, upload: bool
) -> int:
    complete = True
    if upload:
        require_login()
        complete = send_all(Upload(project, entity, "auto"), plan.runs, COMMAND)
    else:
        _print_broken(plan.runs)
    for view in save(plan, entity, project, folder):
        print(f"{view.kind} {'updated' if view.updated else 'created'}: {view.url}", flush=True)
    return 0 if complete else 1


def _of_all(runs: Sequence[RunResult], setting: str) -> str | None:
    """Return the project or the entity to which all runs were tracked."""
    values = {run.config.get(f"tracker.{setting}"): None for run in runs}
    named = [str(value) for value in values if value is not None]
    if len(named) > 1:
        raise UserError(f"the runs are in several places, {', '.join(named)}; use --{setting}")
    return named[0] if named else None


def _print_broken(runs: Sequence[RunResult]) -> None:
    for run in runs:
        if run.status == "unreadable":
            print(f"{COMMAND}: {run.folder}: {run.reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
