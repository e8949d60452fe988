"""The data of the report page equals the files of the runs; damage costs one entry each."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from handmade_runs import seal
from report_folders import STEPS, add_rounds, add_runs, set_config

from fedbench.report.page_data import PageOptions, page_data
from fedbench.report.page_verdicts import BUDGET, encode
from fedbench.report.report_data import read_report_data
from fedbench.report.statistics import compare_paired
from fedbench.results.run_rounds import RunRounds, Verdicts
from fedbench.results.summary import summarise

REPORT = "report"


def data_of(top: Path, budget: int = BUDGET, **options: Any) -> dict[str, Any]:
    """Return the data of the page, through JSON as a browser reads it."""
    found = page_data(read_report_data([top]), PageOptions(top / REPORT, **options), budget)
    text = json.dumps(found, allow_nan=False)
    return dict(json.loads(text))


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def records_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def six(value: float | None) -> Any:
    """Six significant digits."""
    return None if value is None else pytest.approx(value, rel=1e-5)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("runs") / "demo"
    add_runs(top, "defense=krum,median", "attack=dba,constrain_and_scale", "seed=0,1")
    return top


@pytest.fixture(scope="module")
def page(sweep: Path) -> dict[str, Any]:
    return data_of(sweep)


def test_every_run_equals_its_files(sweep: Path, page: dict[str, Any]) -> None:
    assert len(page["runs"]) == 8
    for run in page["runs"]:
        folder = sweep / run["id"]
        summary, records = summary_of(folder), records_of(folder)
        for key in ("BA", "MA", "TPR", "TNR", "AUC", "seconds"):
            assert run["metrics"][key] == six(summary[key])
        assert run["rounds"]["index"] == [0, 1, 2, 3]
        assert run["rounds"]["attacked"] == [[1, 3]]
        for key in ("BA", "MA", "TPR", "TNR", "AUC"):
            assert run["rounds"][key] == [six(record[key]) for record in records]
        assert run["seconds"] == {step: 4 * seconds for step, seconds in STEPS.items()}
        assert run["command"] == "python -m fedbench -m defense=krum,median"
        assert run["commit"] == "32af57d2dd (dirty)"
        assert run["versions"] == {"fedbench": "0.1.0", "torch": "2.9.0"}
        assert run["processor"] == "Test CPU (AVX2)"
        assert run["files"] == ["config.yaml", "origin.json", "rounds.jsonl", "summary.json"]
        assert (sweep / REPORT / unquote(run["folder"])).resolve() == folder
        assert run["path"] == str(folder)
        assert (run["status"], run["reason"]) == ("finished", "")
        assert run["config"]["defense"] in run["title"]
        assert f"seed={run['seed']}" in run["title"]


def test_rows_point_to_their_runs_and_average_them(sweep: Path, page: dict[str, Any]) -> None:
    assert page["keys"] == ["attack"]
    assert [
        (row["setting"], page["defenses"][row["defense"]]["label"]) for row in page["rows"]
    ] == [
        (["constrain_and_scale"], "krum"),
        (["constrain_and_scale"], "median"),
        (["dba"], "krum"),
        (["dba"], "median"),
    ]
    for i, row in enumerate(page["rows"]):
        runs = [page["runs"][number] for number in row["runs"]]
        assert [run["row"] for run in runs] == [i, i]
        assert [run["seed"] for run in runs] == [0, 1]
        assert {run["config"]["attack"] for run in runs} == {*row["setting"]}
        first, second = (summary_of(sweep / run["id"])["BA"] for run in runs)
        stats = row["stats"]["BA"]
        assert stats["mean"] == six((first + second) / 2)
        assert stats["sd"] == six(abs(first - second) / 2**0.5)
        assert stats["n"] == 2
        assert stats["values"] == [[0, six(first)], [1, six(second)]]
        assert stats["worst"] == [int(second > first), six(max(first, second))]
        assert stats["above"] == (first > 0.5) + (second > 0.5)
        assert stats["split"] == ((first > 0.5) != (second > 0.5))
        low = [summary_of(sweep / run["id"])["MA"] for run in runs]
        assert row["stats"]["MA"]["worst"] == [low.index(min(low)), six(min(low))]
        assert row["stats"]["MA"]["split"] is False


def test_swept_settings_and_axes(tmp_path: Path, page: dict[str, Any]) -> None:
    assert page["swept"] == [
        {
            "name": "attack",
            "labels": ["constrain_and_scale", "dba"],
            "values": ["constrain_and_scale", "dba"],
            "numeric": False,
        }
    ]
    assert page["by"] == {"rows": "defense", "columns": "attack"}
    add_runs(tmp_path, "defense=krum", "pmr=0.3,0.2", "non_iid=0.1,0.9")
    found = data_of(tmp_path)
    assert found["swept"][0] == {
        **{"name": "pmr", "labels": ["0.2", "0.3"], "values": [0.2, 0.3], "numeric": True}
    }
    assert found["by"] == {"rows": "defense", "columns": "pmr"}
    chosen = {"rows": "non_iid", "columns": "pmr"}
    assert data_of(tmp_path, **chosen)["by"] == chosen


def test_metrics_say_what_is_better(page: dict[str, Any]) -> None:
    metrics = {metric["key"]: metric for metric in page["metrics"]}
    assert [*metrics] == ["BA", "MA", "TPR", "TNR", "AUC", "seconds"]
    assert [key for key, metric in metrics.items() if metric["lower_is_better"]] == [
        "BA",
        "seconds",
    ]
    assert [key for key, metric in metrics.items() if not metric["percent"]] == ["seconds"]
    assert all(metric["help"] for metric in page["metrics"])


def test_metrics_after_the_attack(tmp_path: Path) -> None:
    # Attacked in rounds 0 and 1 of 4. The last two BA of krum are 0.6 and 0.3: 2 rounds until BA is
    # below 50 %, at least 2 until it is below 10 %. MA is 20 points below that of the benign run.
    folders = add_runs(tmp_path, "defense=fedavg", "attack=none", "seed=0")
    folders += add_runs(tmp_path, "defense=krum", "attack=dba", "seed=0")
    for folder, ma in zip(folders, (0.8, 0.6), strict=True):
        records = records_of(folder)
        for record, ba in zip(records, (0.9, 0.9, 0.6, 0.3), strict=True):
            record |= {"attacked": ma == 0.6 and record["round"] < 2, "MA": ma, "BA": ba}
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "rounds.jsonl").write_text(lines)
        (folder / "summary.json").write_text(json.dumps(summarise(records)))
        seal(folder)
    columns = ["MA_lost", "BA_cumulative", "lifespan_50", "lifespan_10", "recovery"]
    data = read_report_data([tmp_path]).with_columns(columns)
    found = page_data(data, PageOptions(tmp_path / REPORT))
    metrics = {metric["key"]: metric for metric in found["metrics"]}
    assert [metrics[key]["unit"] for key in columns] == ["points", "%", *["rounds"] * 3]
    assert all(metrics[key]["lower_is_better"] and metrics[key]["help"] for key in columns)
    benign, krum = found["runs"]
    values = [krum["metrics"][key] for key in columns]
    assert values == pytest.approx([0.2, 0.675, 2, 2, 2])
    assert (benign["censored"], krum["censored"]) == ([], ["lifespan_10", "recovery"])
    (row,) = (row for row in found["rows"] if row["setting"] == ["dba"])
    assert [row["stats"][key]["censored"] for key in columns] == [0, 0, 0, 1, 1]
    assert benign["metrics"]["recovery"] is None


def decoded(text: str) -> list[Any]:
    """Decode as the page does; NaN is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    plain = gzip.decompress(base64.b64decode(text))
    return list(json.loads(plain, parse_constant=refuse)["rounds"])


def test_verdicts_equal_the_files(sweep: Path, page: dict[str, Any]) -> None:
    for run in page["runs"]:
        rounds = decoded(page["verdicts"][run["clients"]])
        records = records_of(sweep / run["id"])
        assert len(rounds) == len(records)
        for found, record in zip(rounds, records, strict=True):
            clients = record["clients"]
            assert found["ids"] == [client["id"] for client in clients]
            states = ["a" if client["accepted"] else "r" for client in clients]
            assert found["state"] == "".join(states[:-1]) + "x"  # the last one is refused
            assert found["malicious"] == "".join(str(int(c["malicious"])) for c in clients)
            expected = [None if c["score"] is None else c["score"] for c in clients]
            assert found["scores"] == [
                None if score is None else pytest.approx(score, rel=1e-4) for score in expected
            ]
            accepted = [c["score"] for c in clients[:-1] if c["accepted"]]
            rejected = [c["score"] for c in clients[:-1] if not c["accepted"]]
            cut = [six(max(accepted)), six(min(rejected))] if accepted and rejected else None
            assert found["cut"] == cut
            assert found["threshold"] is None
    assert page["verdicts_left_out"] == 0


def rounds_with(**columns: Any) -> RunRounds:
    plain: dict[str, Any] = {
        **{"clients": [1, 2], "malicious": [False, True], "accepted": [None, None]},
        **{"refused": [False, False], "scores": [None, None], "threshold": None},
    }
    return RunRounds([0], [True], {}, {}, [Verdicts(**plain | columns)])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, {"state": "--", "scores": None, "cut": None, "threshold": None}),
        ({"scores": [1e300, -0.123456789]}, {"scores": [1e300, -0.12346]}),
        ({"scores": [float("nan"), 2.0]}, {"scores": [None, 2.0]}),
        ({"scores": [float("inf"), float("-inf")]}, {"scores": [None, None]}),
        ({"threshold": 0.5, "scores": [0, 1]}, {"threshold": 0.5, "cut": [0.5, 0.5]}),
        ({"threshold": float("nan")}, {"threshold": None}),
        ({"accepted": ["yes", 1]}, {"state": "--"}),
        ({"clients": ['"</script>', [3]]}, {"ids": ['"</script>', "[3]"]}),
    ],
)
def test_verdicts_of_any_kind_are_json(columns: Any, expected: dict[str, Any]) -> None:
    (found,) = decoded(encode(rounds_with(**columns)))
    assert {key: found[key] for key in expected} == expected


def test_the_same_runs_give_the_same_data(sweep: Path, page: dict[str, Any]) -> None:
    again = data_of(sweep)
    assert again | {"generated": ""} == page | {"generated": ""}


def test_a_small_budget_keeps_the_first_seed_of_each_row(sweep: Path, page: dict[str, Any]) -> None:
    sizes = [len(text) for text in page["verdicts"]]
    for kept in range(9):
        small = data_of(sweep, budget=sum(sizes[:kept]))
        assert len(small["verdicts"]) == kept
        assert small["verdicts"] == page["verdicts"][:kept]
        assert small["verdicts_left_out"] == 8 - kept
        with_clients = [run for run in small["runs"] if run["clients"] is not None]
        assert len(with_clients) == kept
        first = [run for run in with_clients if run["seed"] == 0]
        assert len(first) == min(kept, 4)  # four rows
        if kept <= 4:
            assert sorted(run["row"] for run in first) == list(range(kept))


def test_paired_comparisons_share_seeds(sweep: Path, page: dict[str, Any]) -> None:
    assert len(page["paired"]) == 4  # two settings, BA and MA
    for entry in page["paired"]:
        rows = [
            next(
                row
                for row in page["rows"]
                if row["setting"] == entry["setting"] and row["defense"] == entry[side]
            )
            for side in ("a", "b")
        ]
        runs = [[page["runs"][number] for number in row["runs"]] for row in rows]
        a, b = (
            {run["seed"]: summary_of(sweep / run["id"])[entry["metric"]] for run in side}
            for side in runs
        )
        expected = compare_paired(a, b, (-1, 1))
        assert expected is not None
        assert entry["mean"] == six((a[0] - b[0] + a[1] - b[1]) / 2)
        assert (entry["n"], entry["smallest_p"], entry["stars"]) == (2, 0.5, "")
        assert (entry["p"], entry["low"]) == (six(expected.p), six(expected.low))


def test_ranks_need_three_defenses_and_have_a_diagram(tmp_path: Path, page: dict[str, Any]) -> None:
    assert page["ranks"] == {"BA": None, "MA": None}
    add_runs(tmp_path, "defense=krum,median,flame", "pmr=0.2,0.3")
    ranks = data_of(tmp_path)["ranks"]["BA"]
    assert sorted(ranks["names"]) == ["flame", "krum", "median"]
    assert sum(ranks["mean_ranks"].values()) == pytest.approx(6)
    assert ranks["n_blocks"] == 2
    assert len(ranks["pairs"]) == 3
    assert "<svg" in ranks["svg"]
    assert "<script" not in ranks["svg"]


def test_worst_case_of_each_defense(page: dict[str, Any]) -> None:
    assert [case["defense"] for case in page["worst"]] == [0, 1]
    for case in page["worst"]:
        rows = [row for row in page["rows"] if row["defense"] == case["defense"]]
        highest = max(rows, key=lambda row: float(row["stats"]["BA"]["mean"]))
        assert case["mean"] == highest["stats"]["BA"]["mean"]
        assert [case["attack"]] == highest["setting"]
        assert (case["n_attacks"], case["setting"], case["adaptive_tried"]) == (2, [], [])


def test_published_numbers_of_matching_rows(tmp_path: Path) -> None:
    """The page of a sweep that matches a paper has the paper's number next to ours."""
    add_runs(tmp_path, "defense=fedavg,krum", "attack=constrain_and_scale,dba")
    page = data_of(tmp_path)
    assert {entry["attack"] for entry in page["reported"]} == {"constrain_and_scale"}
    for entry in page["reported"]:
        rows = [
            row
            for row in page["rows"]
            if row["setting"] == [entry["attack"]]
            and page["defenses"][row["defense"]]["label"] == entry["defense"]
        ]
        assert entry["ours"] == rows[0]["stats"][entry["metric"]]["mean"]
        assert entry["difference"] == pytest.approx(entry["ours"] - entry["paper"], abs=2e-6)
        assert entry["stands_in"] is True  # fmnist_sample


def test_statuses_of_runs_and_rows(tmp_path: Path) -> None:
    folders = add_runs(tmp_path, "defense=krum,median,flame", "seed=0,1")
    krum, _, median, late, flame, other = folders
    (krum / "summary.json").write_text('{"status": "failed", "error": "out of\\nmemory"}')
    seal(krum)
    (median / "summary.json").unlink()
    (late / "summary.json").write_text("{")
    for folder in (flame, other):
        (folder / "summary.json").unlink()
    found = data_of(tmp_path)
    assert [row["status"] for row in found["rows"]] == ["finished", "unreadable", "unfinished"]
    assert [run["status"] for run in found["runs"]] == [
        *("failed", "finished", "unfinished", "unreadable", "unfinished", "unfinished")
    ]
    assert found["runs"][0]["reason"] == "out of memory"
    assert found["rows"][1]["stats"]["BA"] is None
    assert found["runs"][4]["rounds"]["index"] == [0, 1, 2, 3]  # rounds so far
    assert found["runs"][4]["metrics"] == {}
    assert len(found["missing"]) == 5


def test_a_repeated_run_belongs_to_no_row(tmp_path: Path) -> None:
    (folder,) = add_runs(tmp_path, "defense=krum", "seed=0")
    newer = tmp_path / "newer"
    newer.mkdir()
    set_config(folder, newer)
    add_rounds(newer)
    found = data_of(tmp_path)
    assert [run["row"] for run in found["runs"]] == [-1, 0]
    assert found["rows"][0]["runs"] == [1]
    assert [entry["status"] for entry in found["missing"]] == ["not counted"]
    assert [run["clients"] for run in found["runs"]] == [1, 0]


def replaced(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Return a function that replaces a file of a run."""

    def write(folder: Path) -> None:
        content = text.encode() if isinstance(text, str) else text
        (folder / name).write_bytes(content)

    return write


def line(number: int, text: str) -> Callable[[Path], None]:
    """Return a function that replaces a line of rounds.jsonl."""

    def write(folder: Path) -> None:
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        lines[number] = text
        (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")

    return write


def record(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes values in one record of rounds.jsonl."""

    def write(folder: Path) -> None:
        line(1, json.dumps(records_of(folder)[1] | values))(folder)

    return write


def without(key: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        line(1, json.dumps({k: v for k, v in records_of(folder)[1].items() if k != key}))(folder)

    return write


def directory(name: str) -> Callable[[Path], None]:
    """Return a function that puts a directory where a file should be."""

    def write(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return write


def config(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, folder, **settings)


def summary(**values: Any) -> Callable[[Path], None]:
    return lambda folder: replaced("summary.json", json.dumps(summary_of(folder) | values))(folder)


def dangling(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to("nowhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a torn line in the middle": line(1, '{"round": 1, "atta'),
    "garbage in the middle": line(1, "garbage"),
    "binary rounds": replaced("rounds.jsonl", b"\xff\x00\xfe\n"),
    "an empty line": line(1, ""),
    "a list for a round": line(1, "[]"),
    "a number for a round": line(1, "5"),
    "null for a round": line(1, "null"),
    "deep nesting in a round": line(1, "[" * 100_000),
    "rounds: a directory": directory("rounds.jsonl"),
    "no clients": without("clients"),
    "no BA": without("BA"),
    "no seconds": without("seconds"),
    "no round": without("round"),
    "clients: a number": record(clients=5),
    "clients: numbers": record(clients=[1, 2]),
    "clients: without ids": record(clients=[{"malicious": True}]),
    "clients: a score that is text": record(
        clients=[{"id": 1, "malicious": True, "accepted": True, "score": "NaN"}]
    ),
    "BA: text": record(BA="NaN"),
    "BA: a list": record(BA=[0.5]),
    "BA: true": record(BA=True),
    "BA: a huge whole number": record(BA=10**400),
    "round: text": record(round="one"),
    "round: infinity": record(round=float("inf")),
    "round: NaN": record(round=float("nan")),
    "BA: NaN": record(BA=float("nan")),
    "seconds: text": record(seconds={"train": "long"}),
    "seconds: a list": record(seconds=[1]),
    "seconds: a huge whole number": record(seconds={"train": 10**400}),
    "summary: missing": lambda folder: (folder / "summary.json").unlink(),
    "summary: empty": replaced("summary.json", ""),
    "summary: torn": replaced("summary.json", '{"status": "finis'),
    "summary: a list": replaced("summary.json", "[1]"),
    "summary: binary": replaced("summary.json", b"\xff\xfe\x00"),
    "summary: a directory": directory("summary.json"),
    "summary: other keys": replaced("summary.json", '{"status": "finished", "accuracy": 1}'),
    "summary: BA is text": summary(BA="NaN"),
    "summary: BA is NaN": summary(BA=float("nan")),
    "summary: BA is huge": summary(BA=1e308),
    "summary: BA is a huge whole number": summary(BA=10**400),
    "summary: BA is a list": summary(BA=[1]),
    "summary: status of a later version": summary(status="paused"),
    "summary: an error that is a list": summary(status="failed", error=["a", {"b": 1}]),
    "origin: a directory": directory("origin.json"),
    "origin: edited": replaced("origin.json", '{"choices": {}, "changed": {}, "given": []}'),
    "config: empty": replaced("config.yaml", ""),
    "config: binary": replaced("config.yaml", b"\x00\x01\xff\xfe junk"),
    "config: not YAML": replaced("config.yaml", "defense: {name: krum"),
    "config: a list": replaced("config.yaml", "- 1"),
    "config: a date as a key": replaced(
        "config.yaml", "defense: {name: krum, x: [{2024-01-01: 1}]}"
    ),
    "config: endless": replaced("config.yaml", "&a {defense: {name: krum}, x: [*a]}"),
    "config: a directory": directory("config.yaml"),
    "config: a link to nowhere": dangling,
    "config: deep": replaced("config.yaml", "[" * 20_000),
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("runs")
    add_runs(top, "defense=krum,median")
    return top


@pytest.fixture
def damaged(two_runs: Path, tmp_path: Path) -> Path:
    """A run to damage, next to one that is not."""
    shutil.copytree(two_runs, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run000"


# What fedbench itself would have to write wrongly
RECORDS = [
    name
    for name in DAMAGES
    if name.startswith(("no ", "clients", "BA", "round:", "seconds")) and "NaN" not in name
]


@pytest.mark.parametrize("name", RECORDS)
def test_a_wrong_record_with_a_right_check_costs_one_entry(damaged: Path, name: str) -> None:
    DAMAGES[name](damaged)
    seal(damaged)
    (entry,) = data_of(damaged.parent)["missing"]
    assert entry["status"] == "unreadable"
    assert entry["reason"].startswith("rounds.jsonl")
    assert "\n" not in entry["reason"]


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_costs_one_entry(damaged: Path, name: str) -> None:
    DAMAGES[name](damaged)
    found = data_of(damaged.parent)
    (entry,) = found["missing"]
    assert damaged.name in entry["name"]
    assert "\n" not in entry["reason"]
    assert len(found["runs"]) == 2
    whole = next(run for run in found["runs"] if run["id"] == "run001")
    assert whole["metrics"]["BA"] == six(summary_of(damaged.parent / "run001")["BA"])
    assert len(whole["rounds"]["index"]) == 4


HARMLESS: dict[str, Callable[[Path], None]] = {
    "origin: missing": lambda folder: (folder / "origin.json").unlink(),
    "config: NaN and infinity": config(lr=float("nan"), momentum=float("inf")),
    "config: a huge whole number": config(seed=10**400, rounds=10**400),
    "config: no attack": replaced("config.yaml", "defense: {name: krum}"),
    "config: settings of another version": config(novel={"a": [1, {"b": None}]}, seed="zero"),
    "summary: versions and git of other types": summary(
        versions=[1], git="abc", fedbench_git={"commit": 5}, command=["a"], processor=None
    ),
    "summary: steps of other types": summary(seconds_by_step=[1]),
    "rounds: huge": record(BA=1e308, MA=-1e308, seconds={"train": 1e308, "more": 1e308}),
    "rounds: ids that are text": record(
        clients=[{"id": "<b>", "malicious": "yes", "accepted": "no", "score": None}]
    ),
    "rounds: no clients at all": record(clients=[]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_can_be_shown_is_shown(damaged: Path, name: str) -> None:
    HARMLESS[name](damaged)
    seal(damaged)
    found = data_of(damaged.parent)
    assert found["missing"] == []
    assert all(run["rounds"] is not None for run in found["runs"])
    assert {run["row"] for run in found["runs"]} == {0, 1}


def test_a_last_line_that_a_killed_run_left_is_dropped(damaged: Path) -> None:
    (damaged / "summary.json").unlink()
    with (damaged / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "BA": 0.')
    found = data_of(damaged.parent)
    assert [entry["status"] for entry in found["missing"]] == ["unfinished"]
    assert found["runs"][0]["rounds"]["index"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["a b#c?d%20&e", "<img src=x>", 'it\'s "quoted"', "عربي ☃", "a\nb"]
)
def test_links_lead_to_folders_with_any_name(two_runs: Path, tmp_path: Path, name: str) -> None:
    top = tmp_path / name
    top.mkdir()
    shutil.copytree(two_runs / "run000", tmp_path / "plain")
    (tmp_path / "plain").rename(top / name)
    (run,) = data_of(top)["runs"]
    assert (top / REPORT / unquote(run["folder"])).resolve() == top / name
    assert not {*run["folder"]} & {*'<>"# ?\n'}
    assert run["id"] == name


def test_a_folder_whose_name_is_no_unicode(two_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(two_runs / "run000", tmp_path / "plain")
    os.rename(tmp_path / "plain", os.fsencode(tmp_path) + b"/\xff")
    (run,) = data_of(tmp_path)["runs"]
    assert run["folder"] == "../%FF"
