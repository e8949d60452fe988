"""A W&B server on this machine: what a client sends becomes runs, as on the real server.

History is stored by line: a request names the number of its first line, and replaces lines that are
already there. This is how W&B overwrites a run whose id is used again.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "tester"
VIEWER = {"id": "1", "entity": ENTITY, "username": ENTITY, "teams": {"edges": []}}
PROJECT = {
    "__typename": "Project",
    "id": "1",
    "name": "",
    "entityName": ENTITY,
    "createdAt": "2024-01-01T00:00:00",
    "isBenchmark": False,
    "user": None,
}


@dataclass
class ServerRun:
    """A run as the server knows it."""

    name: str = ""
    group: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # history by line number
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    files: set[str] = field(default_factory=set)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [self.lines[number] for number in sorted(self.lines)]

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.history]


@dataclass
class ServerView:
    """A workspace (`project-view`) or a report (`runs`)."""

    type: str
    name: str
    title: str
    entity: str
    project: str
    spec: str
    description: str = ""


class WandbServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, ServerRun] = defaultdict(ServerRun)
        self.views: dict[str, ServerView] = {}  # workspaces and reports by id
        self.projects: set[str] = set()
        self.refused = ""  # what a request to save a view is answered with, if not empty
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.down = False  # answer no request
        self.guard = threading.Lock()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL response; fields that are not listed are null."""
        if operation == "UpsertBucket":
            return self._upsert(variables)
        if operation == "RunResumeStatus":
            return {"model": {"id": "1", "name": "", "bucket": self._resume(variables["name"])}}
        if operation == "CreateRunFiles":
            self.runs[variables["run"]].files |= {*variables["files"]}
            files = [{"name": n, "uploadUrl": f"{self.url}/storage"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":  # as if its content were known: nothing to upload
            artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": None}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "Viewer":
            return {"viewer": VIEWER}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        return self._views(operation, variables)

    def _views(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer the requests of wandb-workspaces."""
        if operation == "GetDefaultEntity":
            return {"viewer": VIEWER}
        if operation == "GetProjects":
            edges = [{"node": PROJECT | {"name": name}} for name in sorted(self.projects)]
            end = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
            return {"models": {"pageInfo": end, "edges": edges}}
        if operation == "CreateProject":
            self.projects.add(variables["input"]["name"])
            return {"upsertModel": {"project": PROJECT, "inserted": True}}
        if operation in ("upsertView", "UpsertView2"):
            return self._upsert_view(variables)
        if operation == "SpecificReport":
            known = variables["reportId"] in self.views
            return {"view": {"id": variables["reportId"]} if known else None}
        if operation == "View":
            asked = variables["entityName"], variables["name"], variables["viewName"]
            found = [i for i, v in self.views.items() if (v.entity, v.project, v.name) == asked]
            return {"project": {"allViews": {"edges": [{"node": {"id": i}} for i in found]}}}
        return {}

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        if self.refused:
            raise PermissionError(self.refused)
        known = variables.get("id")
        if known is not None and known not in self.views:
            raise PermissionError("view not found")
        project = {"id": "1", "name": variables["projectName"], "entityName": ENTITY}
        view_id = known or f"view{len(self.views)}"
        self.views[view_id] = ServerView(
            variables["type"],
            variables["name"],
            variables["displayName"],
            variables["entityName"],
            variables["projectName"],
            variables["spec"],
            variables["description"],
        )
        view = {"id": view_id, "name": variables["name"], "project": project, "spec": "{}"}
        return {"upsertView": {"view": view, "inserted": known is None}}

    def _resume(self, run_id: str) -> dict[str, Any] | None:
        """What a client learns that asks to resume a run."""
        if run_id not in self.runs:
            return None
        run = self.runs[run_id]
        tail = json.dumps([json.dumps(run.history[-1])] if run.lines else [])
        return {
            "id": "1",
            "name": run_id,
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": 0,
            "historyLineCount": len(run.lines),
            "eventsLineCount": 0,
            "historyTail": tail,
            "eventsTail": "[]",
            "config": "{}",
            "wandbConfig": json.dumps({"t": 1}),
        }

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[variables["name"]]
        run.project = variables.get("project") or run.project
        run.name = variables.get("displayName") or run.name
        run.group = variables.get("groupName") or run.group
        run.tags = variables.get("tags") or run.tags
        if variables.get("config"):
            items = json.loads(variables["config"]).items()
            run.config = {key: item["value"] for key, item in items}
        entity = {"id": "1", "name": ENTITY}
        project = {"id": "1", "name": run.project, "entity": entity}
        bucket = {"id": "1", "name": variables["name"], "displayName": run.name, "config": "{}"}
        return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.runs[run_id]
        for name, chunk in body.get("files", {}).items():
            if name == "wandb-history.jsonl":
                for number, line in enumerate(chunk["content"], start=chunk["offset"]):
                    run.lines[number] = json.loads(line)
            elif name == "wandb-summary.json":
                run.summary = json.loads(chunk["content"][-1])
        if body.get("complete"):
            run.exit_code = body.get("exitcode")


class Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        if self.server.down:
            self.send_error(503)
            return
        with self.server.guard:
            if self.path == "/graphql":
                request = json.loads(body)
                found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
                operation = found[1] if found else ""
                try:
                    data = self.server.answer(operation, request.get("variables") or {})
                    self._reply({"data": data})
                except PermissionError as error:
                    self._reply({"data": None, "errors": [{"message": str(error)}]})
            else:
                self.server.stream(self.path.split("/")[-2], json.loads(body))
                self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
