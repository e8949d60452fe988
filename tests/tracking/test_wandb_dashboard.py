"""Workspace and report of a folder of runs, as W&B gets them. No test needs a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from handmade_runs import seal
from sweep_folders import add_sweep
from wandb_records import record

from fedbench.report.comparison import compare
from fedbench.report.run_labels import value_of
from fedbench.report.table import to_markdown
from fedbench.results.run_reader import METRICS, read_runs
from fedbench.tracking.wandb_dashboard import DashboardPlan, group_keys, plain_name
from fedbench.tracking.wandb_report import COLUMNS, PANELS
from fedbench.tracking.wandb_rows import config_key, config_values, history, score_histograms
from fedbench.tracking.wandb_views import definition

pytestmark = pytest.mark.usefixtures("logged_out")


@pytest.fixture(autouse=True)
def no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition asks the server nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("asked W&B's server")

    monkeypatch.setattr(wandb, "Api", refuse)
    monkeypatch.setattr("wandb_workspaces.reports.v2.interface._get_api", refuse)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("runs") / "pilot"
    add_sweep(top, "defense=krum,baybfed,baybfed_literal", "pmr=0.2,0.3", "seed=0,1", "name=pilot")
    return top


def built(folder: Path) -> dict[str, Any]:
    plan = DashboardPlan.of(folder, read_runs([folder]))
    content = definition(plan, "team", "backdoors")
    assert json.loads(json.dumps(content)) == content
    return content


def run_set(content: dict[str, Any]) -> dict[str, Any]:
    (found,) = content["workspace"]["spec"]["section"]["runSets"]
    return dict(found)


def grids(content: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = content["report"]["spec"]["blocks"]
    return [block["metadata"] for block in blocks if block["type"] == "panel-grid"]


def panels_of_workspace(content: dict[str, Any]) -> list[dict[str, Any]]:
    parts = content["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for part in parts for panel in part["panels"]]


def panels_of_report(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for grid in grids(content) for p in grid["panelBankSectionConfig"]["panels"]]


def texts(node: Any) -> Iterator[str]:
    """Yield every text of a report's block."""
    if isinstance(node, dict):
        yield from (node[key] for key in ("text", "content") if isinstance(node.get(key), str))
        node = [*node.values()]
    if isinstance(node, list):
        for item in node:
            yield from texts(item)


def test_runs_are_those_of_the_folder_grouped_by_defense_and_swept_keys(sweep: Path) -> None:
    content = built(sweep)
    of_group = {"key": {"section": "run", "name": "group"}, "op": "=", "value": "pilot"}
    keys = [{"section": "config", "name": f"{key}.value"} for key in ("defense", "pmr")]
    for found in [run_set(content), *(grid["runSets"][0] for grid in grids(content))]:
        assert found["filters"]["filters"] == [of_group | {"disabled": False}]
        assert found["grouping"] == keys
    assert {"summary:BA", "config:pmr.value"} <= {*run_set(content)["runFeed"]["columnPinned"]}


@pytest.mark.parametrize(
    "overrides",
    [
        ["defense=krum,fedavg", "attack=constrain_and_scale,dba"],
        ["defense=krum,flame", "attack=constrain_and_scale", "attack.alpha=0.5,0.7"],
        ["defense=fedavg", "dataset=fmnist_sample,iot_sample"],  # other settings follow from it
        ["defense=krum", "n_clients=10,20", "pdr=0.3,0.5", "non_iid=0.2,0.8"],
        ["defense=krum", "defense.f=1,2"],
        ["defense=krum"],
    ],
)
def test_a_group_is_a_row_of_the_table(tmp_path: Path, overrides: list[str]) -> None:
    """So that its seeds, and nothing else, are averaged; and that each key is a key in W&B."""
    folders = add_sweep(tmp_path / "demo", *overrides, "seed=0,1", "name=demo")
    runs = read_runs([tmp_path / "demo"])
    keys = group_keys(runs)
    groups: dict[tuple[Any, ...], set[Path]] = {}
    for run in runs:
        groups.setdefault(tuple(value_of(run, k) for k in keys), set()).add(run.folder)
    rows = [{run.folder for run in row.runs} for row in compare(runs).rows]
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, rows))
    assert len(keys) <= len(overrides) + 1
    origin = json.loads((folders[0] / "origin.json").read_text())
    sent = config_values(runs[0].config, origin["choices"])
    assert {config_key(key) for key in keys} <= {*sent}


def test_panels_show_keys_that_are_logged(sweep: Path) -> None:
    """A renamed metric must fail here."""
    logged = {*history(record(0)), *score_histograms(record(0)), "partition"}
    settings = {"defense", "pmr"}
    content = built(sweep)
    for panels in (panels_of_workspace(content), panels_of_report(content)):
        kinds: dict[str, list[dict[str, Any]]] = {}
        for panel in panels:
            kinds.setdefault(panel["viewType"], []).append(panel["config"])
        lines, bars = kinds["Run History Line Plot"], kinds["Bar Chart"]
        assert [c["metrics"] for c in lines] == [["BA"], ["MA"], ["TPR"], ["TNR"]]
        assert all((c["groupAgg"], c["groupArea"]) == ("mean", "minmax") for c in lines)
        assert all(c["xAxis"] == "_step" for c in lines)
        assert {c["metrics"][0] for c in bars} <= logged
        assert {c["groupBy"] for c in bars if "groupBy" in c} == {f"{k}.value" for k in settings}
        scatter = [(c["xAxis"], c["yAxis"]) for c in kinds["Scatter Plot"]]
        assert scatter[0] == ("summary:MA", "summary:BA")
        assert scatter[1:] == [("config:pmr.value", f"summary:{name}") for name in ("BA", "MA")]
        assert {"MA", "BA"} <= logged
        media = [c["mediaKeys"] for c in kinds["Media Browser"]]
        assert media == [["scores/benign", "scores/malicious"], ["partition"]]
        assert {key for keys in media for key in keys} <= logged
        (table,) = kinds["Weave"]
        assert table["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"] == "clients"
        assert len(kinds["Run Comparer"]) == 1


def test_panels_of_the_report_do_not_overlap(sweep: Path) -> None:
    for grid in grids(built(sweep)):
        boxes = [panel["layout"] for panel in grid["panelBankSectionConfig"]["panels"]]
        assert all(box["x"] + box["w"] <= 24 for box in boxes)
        for a, b in combinations(boxes, 2):
            apart = [a[x] + a[w] <= b[x] or b[x] + b[w] <= a[x] for x, w in ("xw", "yh")]
            assert any(apart), (a, b)


def test_the_report_has_the_table_and_explains_it(sweep: Path) -> None:
    content = built(sweep)
    runs = read_runs([sweep])
    report = content["report"]
    assert (report["title"], report["description"]) == ("pilot", compare(runs).caption())
    found = [*texts(report["spec"]["blocks"])]
    assert to_markdown(runs) in found
    assert "12 runs: 12 finished" in found
    for name in METRICS:
        assert f"{name}: {COLUMNS[name]}" in found
    assert {*PANELS.values()} <= {*found}
    assert "Runs that the table leaves out" not in found


def test_groups_have_the_color_of_their_defense(sweep: Path) -> None:
    plan = DashboardPlan.of(sweep, read_runs([sweep]))
    colors = plan.colors()
    assert colors["krum",] == colors["krum", "0.2"] == colors["krum", "0.3"]
    assert len({colors[name,] for name in ("krum", "baybfed", "baybfed_literal")}) == 3
    content = built(sweep)
    shown = content["workspace"]["spec"]["section"]["customRunColors"]
    assert sorted(shown.values()) == sorted(colors.values())
    assert len(grids(content)[0]["customRunColors"]) == 6


def test_runs_of_a_single_defense_get_colors_from_wandb(tmp_path: Path) -> None:
    add_sweep(tmp_path / "demo", "defense=krum", "pmr=0.2,0.3")
    content = built(tmp_path / "demo")
    assert content["workspace"]["spec"]["section"]["customRunColors"] == {}


def test_any_name_of_a_folder_will_do(tmp_path: Path) -> None:
    name = 'it\'s "a=b" <b>$1 | ü \N{PARTY POPPER}'
    (folder,) = add_sweep(tmp_path / name, "defense=krum")
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"name": name}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    seal(folder)
    content = built(tmp_path / name)
    assert run_set(content)["filters"]["filters"][0]["value"] == name
    assert content["workspace"]["name"] == 'it\'s "a-b" -b--1 - ü -'
    assert len(plain_name("x" * 500)) == 128


def test_partial_and_broken_runs_are_named(tmp_path: Path) -> None:
    a, b, c, d = add_sweep(tmp_path / "demo", "defense=krum,flame", "seed=0,1", "name=demo")
    (a / "summary.json").unlink()
    (b / "summary.json").write_text(json.dumps({"status": "failed", "error": "no <b>luck</b>"}))
    seal(b)
    (c / "config.yaml").write_text("{")
    content = built(tmp_path / "demo")
    found = [*texts(content["report"]["spec"]["blocks"])]
    assert "4 runs: 1 finished, 1 unfinished, 1 failed, 1 unreadable" in found
    lines = [text for text in found if "run00" in text and "|" not in text]
    assert len(lines) == 3
    assert not [line for line in lines if str(tmp_path) in line]
    assert run_set(content)["filters"]["filters"][0]["value"] == "demo"
    for folder in (a, b, d):
        (folder / "config.yaml").write_text("{")
    assert run_set(built(tmp_path / "demo"))["filters"]["filters"][0]["value"] == "demo"


def test_several_names_below_a_folder_are_one_dashboard(tmp_path: Path) -> None:
    add_sweep(tmp_path / "all" / "a", "defense=krum", "name=a")
    add_sweep(tmp_path / "all" / "b", "defense=krum", "name=b")
    (found,) = run_set(built(tmp_path / "all"))["filters"]["filters"]
    assert (found["op"], found["value"]) == ("IN", ["a", "b"])


def test_panels_have_room_for_all_groups(tmp_path: Path) -> None:
    add_sweep(tmp_path / "demo", "defense=krum,flame", "pmr=0.1,0.2,0.3,0.4", "pdr=0.2,0.3")
    content = built(tmp_path / "demo")
    lines = [p for p in panels_of_workspace(content) if "Line Plot" in p["viewType"]]
    assert {panel["config"]["limit"] for panel in lines} == {16}
    assert content["workspace"]["spec"]["section"]["settings"]["maxRuns"] == 16
