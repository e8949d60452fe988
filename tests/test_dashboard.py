"""`python -m fedbench.dashboard`: a workspace and a report in W&B, made by its own library.

The server is on this machine. It stores views as W&B's own does: by id, or under a new one.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import wandb
from end_to_end import fedbench_in_this_process
from sweep_folders import add_sweep
from wandb_records import KEY
from wandb_server import ENTITY, ServerView, WandbServer

from fedbench.dashboard import main

pytestmark = pytest.mark.usefixtures("logged_out")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_sweep(tmp_path / "pilot", "defense=krum,flame", "pmr=0.2,0.3", "name=pilot", "tracker=none")
    return tmp_path / "pilot"


def definition(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report" / "dashboard.json").read_text()))


def without_ids(spec: Any) -> Any:
    """The library gives panels and run sets random ids."""
    if isinstance(spec, dict):
        random = ("__id__", "id", "customRunColors")  # a color's key has the id of its run set
        return {key: without_ids(item) for key, item in spec.items() if key not in random}
    return [without_ids(item) for item in spec] if isinstance(spec, list) else spec


def test_dry_run_writes_the_definition_without_a_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("used the network or W&B")

    monkeypatch.setattr(wandb, "setup", refuse)
    monkeypatch.setattr(wandb, "Api", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert main([str(folder), "--dry-run", "--project", "P", "--entity", "team"]) == 0
    assert capsys.readouterr() == (f"{folder}/report/dashboard.json\n", "")
    content = definition(folder)
    assert (content["project"], content["entity"]) == ("P", "team")
    other = folder.parent / "new" / "file.json"
    assert main([str(folder), "--dry-run", "--to", str(other)]) == 0
    content = json.loads(other.read_text())
    assert (content["project"], content["entity"]) == ("fedbench", None)
    assert not (folder / "dashboard.json").exists()


def test_without_a_login_one_line_says_so_and_the_definition_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--upload"]):
        assert main([str(folder), "--project", "P", *words]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        reason = "not logged in; run `wandb login` or set WANDB_API_KEY"
        where = f"the definition is in {folder}/report/dashboard.json"
        assert err == f"fedbench.dashboard: {reason}; {where}\n"
    assert definition(folder)["project"] == "P"


def test_offline_mode_is_respected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        for words in ([], ["--upload"]):
            assert main([str(folder), *words]) == 1
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert f"W&B is {mode}; unset WANDB_MODE" in err


def test_it_creates_a_report_and_a_workspace_and_then_updates_them(
    folder: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--project", "P"]) == 0
    out, err = capsys.readouterr()
    report, workspace = out.splitlines()
    assert report == f"report created: {server.url}/{ENTITY}/P/reports/pilot--view0"
    assert workspace.startswith(f"workspace created: {server.url}/{ENTITY}/P?nw=")
    assert err == ""
    assert server.projects == {"P"}
    views = {view.type: view for view in server.views.values()}
    assert [(v.title, v.entity, v.project) for v in views.values()] == [("pilot", ENTITY, "P")] * 2
    content = definition(folder)
    sent = {"workspace": views["project-view"], "report": views["runs"]}
    for kind, view in sent.items():
        assert without_ids(json.loads(view.spec)) == without_ids(content[kind]["spec"])
    assert views["runs"].description == content["report"]["description"]

    add_sweep(folder, "defense=median", "name=pilot")
    assert main([str(folder), "--project", "P"]) == 0
    again = capsys.readouterr().out
    assert again == out.replace("created", "updated")
    assert len(server.views) == 2
    assert all("median" in view.spec for view in server.views.values())


def test_a_view_that_is_gone_is_created_anew(
    folder: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    old = capsys.readouterr().out
    server.views.clear()
    server.views["another"] = ServerView("runs", "x", "somebody's", ENTITY, "fedbench", "{}")
    assert main([str(folder)]) == 0
    new = capsys.readouterr().out
    assert new.count("created") == 2
    assert new.splitlines()[1] != old.splitlines()[1]
    assert len(server.views) == 3
    known = json.loads((folder / "dashboard.json").read_text())[f"{ENTITY}/fedbench"]
    assert all(view["id"] in server.views and view["url"] in new for view in known.values())


def test_each_project_has_a_dashboard_of_its_own_and_a_damaged_file_does_no_harm(
    folder: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--project", "a"], ["--project", "b"], ["--project", "a", "--entity", "team"]):
        assert main([str(folder), *words]) == 0
    assert capsys.readouterr().out.count("created") == 6
    assert main([str(folder), "--project", "a"]) == 0
    assert capsys.readouterr().out.count("updated") == 2
    for damaged in ("{", "[]", json.dumps({f"{ENTITY}/a": 3})):
        (folder / "dashboard.json").write_text(damaged)
        assert main([str(folder), "--project", "a"]) == 0
        assert capsys.readouterr().out.count("created") == 2


def test_a_refusal_is_one_line(
    folder: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refused = "permission\n denied"
    assert main([str(folder)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "permission denied; the definition is in " in err


@pytest.mark.slow
def test_an_unreachable_server_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert main([str(folder)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "http://127.0.0.1:9; the definition is in " in err


def test_upload_sends_the_runs_first(
    tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a broken folder costs one line."""
    ended = fedbench_in_this_process("defense=krum", "name=pilot", "rounds=2", cwd=tmp_path)
    assert ended.code == 0
    top = tmp_path / "runs" / "pilot"
    (run,) = (path.parent for path in top.glob("*/config.yaml"))
    (top / "broken").mkdir()
    (top / "broken" / "config.yaml").write_text("{")
    capsys.readouterr()
    assert main([str(top), "--upload", "--project", "P"]) == 1
    out, err = capsys.readouterr()
    sent, report, workspace = out.splitlines()
    assert sent == f"{run}  2 rounds, {server.url}/{ENTITY}/P/runs/pilot-{run.name}"
    assert (report.split()[:2], workspace.split()[:2]) == (
        ["report", "created:"],
        ["workspace", "created:"],
    )
    assert err.startswith(f"fedbench.dashboard: {top}/broken: config.yaml has no checksum")
    assert err.count("\n") == 1
    (tracked,) = server.runs.values()
    assert (tracked.project, tracked.group, tracked.steps) == ("P", "pilot", [0, 1])
    spec = json.loads(next(v.spec for v in server.views.values() if v.type == "project-view"))
    (run_set,) = spec["section"]["runSets"]
    assert run_set["filters"]["filters"][0]["value"] == tracked.group
    assert {key["name"].removesuffix(".value") for key in run_set["grouping"]} <= {*tracked.config}
    shown = {key.removeprefix("summary:") for key in run_set["runFeed"]["columnOrder"][2:]}
    assert shown == {"BA", "MA", "TPR", "TNR"}
    assert all(isinstance(tracked.summary[name], int | float) for name in shown)


def test_a_broken_folder_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run000" / "summary.json").write_text("{")
    assert main([str(folder), "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"fedbench.dashboard: {folder}/run000: summary.json has ")
    assert err.count("\n") == 1


def test_user_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = folder / "none"
    assert main([str(missing), "--dry-run"]) == 2
    assert capsys.readouterr().err == f"fedbench.dashboard: no folder {missing}\n"
    assert main([str(folder), "--dry-run", "--to", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for project in "ab":
        add_sweep(folder, "defense=krum", "tracker=wandb", f"tracker.project={project}")
    assert main([str(folder), "--dry-run"]) == 2
    assert "in several places, a, b; use --project\n" in capsys.readouterr().err
    assert main([str(folder), "--dry-run", "--project", "a"]) == 0
