"""Save a dashboard in W&B, or write it to a file. A folder of runs remembers its dashboards."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedbench.errors import UserError
from fedbench.results.atomic_files import write_atomically
from fedbench.tracking.wandb_dashboard import DashboardPlan, build_workspace
from fedbench.tracking.wandb_report import build_report
from fedbench.tracking.wandb_session import teardown

if TYPE_CHECKING:
    import wandb

STATE_FILE = "dashboard.json"  # ids and addresses, by `entity/project`
WORKSPACE = """
    query View($entityName: String, $name: String, $viewName: String) {
        project(name: $name, entityName: $entityName) {
            allViews(viewType: "project-view", viewName: $viewName) { edges { node { id } } }
        }
    }
"""


@dataclass(frozen=True)
class SavedView:
    """A workspace or a report in W&B."""

    kind: str
    url: str
    updated: bool  # False: it is new


def definition(plan: DashboardPlan, entity: str | None, project: str) -> dict[str, Any]:
    """Return the dashboard as W&B stores it, without asking the server anything."""
    place = entity or "", project
    parts: list[Any] = [build_workspace(plan, *place), build_report(plan, *place)]
    workspace, report = (part._to_model() for part in parts)
    return {
        "entity": entity,
        "project": project,
        "workspace": {"name": workspace.display_name, "spec": _as_json(workspace.spec)},
        "report": {
            "title": report.display_name,
            "description": report.description,
            "spec": _as_json(report.spec),
        },
    }


def _as_json(spec: Any) -> Any:
    return json.loads(spec.model_dump_json(by_alias=True, exclude_none=True))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(text.encode("utf-8", "replace")))


def save(
    plan: DashboardPlan, entity: str | None, project: str, folder: Path
) -> Iterator[SavedView]:
    """Create the report and the workspace, or update those that the folder remembers.

    Any error of W&B is a UserError.
    """
    import wandb

    with _started():
        api = wandb.Api()
        entity = entity or api.settings["entity"] or api.default_entity
        if not entity:
            raise UserError("your W&B account has no default entity; use --entity")
        state = _State(folder / STATE_FILE, f"{entity}/{project}")
        yield _save_report(plan, entity, project, api, state)
        yield _save_workspace(plan, entity, project, api, state)


class _State:
    """The dashboard of a project, as dashboard.json remembers it."""

    def __init__(self, path: Path, place: str) -> None:
        self.path = path
        self.place = place

    def recall(self, kind: str) -> Mapping[str, str]:
        """Return what is known of the workspace or the report; nothing if the file is damaged."""
        known = self._read().get(self.place)
        found = known.get(kind) if isinstance(known, dict) else None
        return found if isinstance(found, dict) else {}

    def remember(self, kind: str, **values: str) -> None:
        content = self._read()
        known = content.get(self.place)
        content[self.place] = {**(known if isinstance(known, dict) else {}), kind: values}
        write_json(self.path, content)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


@contextmanager
def _started() -> Iterator[None]:
    """Start W&B; UserError if it is offline or has no login. Nothing of it is left running."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    hooks = sys.exit, sys.excepthook
    try:
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        sys.exit, sys.excepthook = hooks  # W&B wraps both
        if mode in ("offline", "dryrun", "disabled"):
            raise UserError(f"W&B is {mode}; unset WANDB_MODE or run `wandb online`")
        if not wandb.login(prompt=False, verify=False):
            raise UserError("not logged in; run `wandb login` or set WANDB_API_KEY")
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # W&B's own, requests', pydantic's, ...
        raise UserError(_one_line(error)) from error
    finally:
        teardown()


def require_login() -> None:
    """Raise a UserError if a dashboard could not be saved for want of a login."""
    with _started():
        pass


def _save_report(
    plan: DashboardPlan, entity: str, project: str, api: wandb.Api, state: _State
) -> SavedView:
    from wandb_workspaces.reports.v2 import gql

    report: Any = build_report(plan, entity, project)
    known = state.recall("report").get("id", "")
    if known and _ask(api, gql.view_report, {"reportId": known}).get("view"):
        report.id = known
    updated = bool(report.id)
    report.save()  # creates the project, too
    url = quote(report.url, safe=":/=")  # the title is part of it
    state.remember("report", id=report.id, url=url)
    return SavedView("report", url, updated)


def _save_workspace(
    plan: DashboardPlan, entity: str, project: str, api: wandb.Api, state: _State
) -> SavedView:
    workspace: Any = build_workspace(plan, entity, project)
    known = state.recall("workspace").get("name", "")
    if known:
        variables = {"entityName": entity, "name": project, "viewName": known}
        found = _ask(api, WORKSPACE, variables).get("project") or {}
        for edge in (found.get("allViews") or {}).get("edges", [])[:1]:
            workspace._internal_name, workspace._internal_id = known, edge["node"]["id"]
    updated = bool(workspace._internal_id)
    workspace.save()
    url = str(workspace.url)
    state.remember("workspace", name=workspace._internal_name, id=workspace._internal_id, url=url)
    return SavedView("workspace", url, updated)


def _ask(api: wandb.Api, query: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Ask for a workspace or a report; nothing if the server says that there is none."""
    from wandb_workspaces._graphql import execute_graphql

    try:
        return execute_graphql(api, query, variables)
    except Exception as error:
        if "not found" in str(error).lower():
            return {}
        raise


def _one_line(error: Exception) -> str:
    # W&B explains a server that does not answer by its own service process.
    text = str(error).partition(": Failed to execute API request: the service process is busy")[0]
    return shorten(text or type(error).__name__, 300).rstrip(".")
