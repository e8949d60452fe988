"""benchmarks: each one runs and reports the expected rows; no test asserts a speed."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from pages import run

import fedbench
from benchmarks.__main__ import main

ROOT = Path(fedbench.__file__).parent.parent
Record = dict[str, Any]


def quick(path: Path, *arguments: str) -> tuple[str, list[Record]]:
    """Run with --quick; return the printed table and the rows of the JSON file, after checks."""
    words = shlex.join(["-m", "benchmarks", *arguments, "--quick", "--json", str(path)])
    done = run(words, ROOT, path=str(ROOT), timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        times = [*row["seconds"], *row["against_seconds"]]
        assert times
        assert all(0 < seconds < math.inf for seconds in times)
    return done.stdout, rows


def pairs(rows: list[Record]) -> list[tuple[str, str | None]]:
    return [(row["what"], row["against"]) for row in rows]


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "training")
    two = "fedbench, 2 processes"
    assert pairs(rows) == [("fedbench", "by hand"), (two, "fedbench")]
    assert rows[0]["case"].split(",")[0] == "cnn"
    notes = rows[0]["notes"]
    # Two processes give the same bits; the hand-written loop shuffles differently.
    assert notes["MA fedbench"] == notes[f"MA {two}"]
    assert notes["MA fedbench"] == pytest.approx(notes["MA by hand"], abs=0.1)


@pytest.mark.slow
def test_value_of_every_fast_path(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "value")
    assert pairs(rows) == [
        ("captured steps", "autograd"),
        ("fused SGD", "plain SGD"),
        ("vectorized", "sequential"),
    ]
    assert 0 < rows[2]["notes"]["worst"] < 1e-5
    assert rows[2]["notes"]["auto stacks"] == 1


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "trainer")
    assert pairs(rows) == [("trainer", "sequential")]
    assert rows[0]["notes"]["ms/client"] > rows[0]["notes"]["more/client"]


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "sweep")
    assert pairs(rows) == [("in parallel", "one after another"), ("further run", None)]


@pytest.mark.slow
def test_growth(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "growth")
    assert [row["case"] for row in rows] == [
        "10 clients",
        "30 clients",
        "10,000 parameters",
        "100,000 parameters",
    ]
    assert [row["notes"]["per unit"] for row in rows[::2]] == [1, 1]
    assert all(row["notes"]["peak MB"] > 100 for row in rows)


@pytest.mark.slow
def test_aggregate(tmp_path: Path) -> None:
    chosen = ("fedavg", "krum", "dp")
    _, rows = quick(tmp_path / "rows.json", "aggregate", "--clients", "4", "--defense", *chosen)
    expected = [("gram", "mean"), ("fedavg", "mean"), ("fedavg", "target")]
    expected += [("krum", "mean"), ("krum", "target"), ("dp", "mean")]
    assert [pair for pair in pairs(rows) if pair != ("krum", "byzfl")] == expected * 2


@pytest.mark.slow
def test_posts(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "posts")
    assert pairs(rows) == [("reader", "parsing alone")] * 2
    assert [row["case"] for row in rows] == ["RC_made", "RC_made.zst"]
    assert all(row["notes"]["posts"] == 10_000 and row["notes"]["MB/s"] > 0 for row in rows)


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "startup")
    assert pairs(rows) == [("to the first round", "import torch")]


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    required = {"byzfl": ("byzfl", "scipy"), "flwr": ("flwr", "ray")}
    peers = [
        name for name, modules in required.items() if all(map(importlib.util.find_spec, modules))
    ]
    _, rows = quick(tmp_path / "rows.json", "peers")
    assert pairs(rows) == [("fedbench", peer) for peer in (peers or (None,)) for _ in range(2)]
    assert {row["case"].split(", ")[-1] for row in rows} == {"a round", "start-up"}
    for row in rows:
        # A client's samples fit into one batch, so shuffling changes nothing.
        if row["against"] == "flwr" and row["notes"]:
            assert row["notes"]["MA"] == pytest.approx(row["notes"]["MA of flwr"], abs=0.005)


@pytest.mark.slow
def test_recurrent_prints_and_saves_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "rows.json"
    table, rows = quick(path, "recurrent")
    assert pairs(rows) == [("vmap", "sequential")] * 2
    assert [row["case"].split(",")[0] for row in rows] == ["gru", "lstm"]
    _, *lines, last = table.splitlines()
    assert last == f"saved to {path}"
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"recurrent   {row['case']} ")
        assert f"  {row['ratio']:#.3g}  " in line
        assert row["ratio"] == pytest.approx(row["seconds"][0] / row["against_seconds"][0])
        assert row["times_as_fast"] == pytest.approx(1 / row["ratio"])
    saved = json.loads(path.read_text())
    assert {"cpu", "cores", "python", "torch", "commit"} <= saved["machine"].keys()
    assert saved["options"]["threads"] == 1
    assert saved["started"]


def write_results(path: Path, ratios: dict[str, float], **machine: str) -> str:
    """Write a results file with one row per ratio; return its path."""
    rows = [
        {"benchmark": "b", "case": "c", "what": what, "against": "a", "ratio": ratio}
        for what, ratio in ratios.items()
    ]
    options = {"threads": 1, "repeats": 5, "quick": False}
    path.write_text(json.dumps({"machine": machine, "options": options, "rows": rows}))
    return str(path)


def test_compare_reports_changed_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_results(
        tmp_path / "old.json", {"same": 2.0, "faster": 2.0, "gone": 1.0}, torch="2.12.0"
    )
    new = write_results(
        tmp_path / "new.json", {"same": 2.0, "faster": 1.5, "new": 3.0}, torch="2.13.0"
    )
    assert main(["--compare", old, new]) == 0
    difference, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert difference == ["torch:", "2.12.0", "->", "2.13.0"]
    assert [row[2] for row in rows] == ["same", "faster", "gone", "new"]
    assert [row[4:] for row in rows] == [
        ["2", "2", "+0.0", "%"],
        ["2", "1.50", "-25.0", "%"],
        ["1", "-", "-"],
        ["-", "3", "-"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainin"], "trainin: no such benchmark; did you mean training? (known: aggregate, "),
        (["startup", "--defense", "krum"], "--defense: must be used with aggregate, got startup"),
        (["aggregate", "--defense", "krumm"], "did you mean krum?"),
        (["--compare", "none.json", "none.json"], "none.json: cannot be read"),
        (["--compare", "README.md", "README.md"], "README.md: not written by python -m benchmarks"),
    ],
)
def test_user_errors_print_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*arguments, "--json", str(tmp_path / "rows.json")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("benchmarks: ")
    assert printed.count("\n") == 1


@pytest.mark.slow
def test_report(tmp_path: Path) -> None:
    _, rows = quick(tmp_path / "rows.json", "report")
    assert pairs(rows) == [("page", "json.loads"), ("everything", "json.loads")]
    assert rows[0]["case"] == "10 runs, 2 rounds, 4 clients"
