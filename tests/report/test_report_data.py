"""What a report is made from: rows, swept settings, estimates over seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from handmade_runs import seal
from sweep_folders import add_sweep

from fedbench.report.report_data import bounds_of, read_report_data


def test_swept_settings_in_order_of_the_table(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum,flame", "pmr=0.5,0.2,0.3", "attack=dba,alie", "seed=0")
    data = read_report_data([tmp_path])
    assert data.defenses == ["krum", "flame"]
    attack, pmr = data.swept
    assert (attack.name, attack.labels, attack.is_numeric) == (
        "attack",
        ["alie (omniscient)", "dba"],
        False,
    )
    assert (pmr.name, pmr.labels, pmr.values) == ("pmr", ["0.2", "0.3", "0.5"], [0.2, 0.3, 0.5])
    assert pmr.is_numeric
    assert data.setting(data.rows[0], "pmr") == "0.2"


def test_values_are_in_order_even_if_combinations_are_missing(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum", "attack=dba", "pmr=0.2,10e-2", "seed=0")
    add_sweep(tmp_path, "defense=krum", "attack=alie", "pmr=0.3", "seed=0")
    assert read_report_data([tmp_path]).swept[1].values == [0.1, 0.2, 0.3]


def test_a_setting_with_one_value_is_not_swept(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum,flame", "pmr=0.3", "seed=0,1")
    assert read_report_data([tmp_path]).swept == []


def test_estimates_use_finished_runs_only(tmp_path: Path) -> None:
    folders = add_sweep(tmp_path, "defense=krum", "seed=0,1,2")
    for folder, value in zip(folders, (0.1, 0.3, 0.9), strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"BA": value, "TPR": None}))
        seal(folder)
    (folders[2] / "summary.json").unlink()
    data = read_report_data([tmp_path])
    (row,) = data.rows
    found = data.estimate(row, "BA")
    assert found is not None
    assert found.values == {0: 0.1, 1: 0.3}
    assert found.mean == pytest.approx(0.2)
    assert data.estimate(row, "TPR") is None


def test_bounds() -> None:
    assert bounds_of("BA/0") == bounds_of("AUC") == (0, 1)
    assert bounds_of("cosine") == (-1, 1)
    assert bounds_of("MA_lost") == (-1, 1)
    assert bounds_of("BA_cumulative") == (0, 1)
    assert bounds_of("lifespan_50") == bounds_of("recovery") == (0, math.inf)
    assert bounds_of("seconds") is bounds_of("norm_ratio") is None


def test_runs_without_settings_are_no_rows(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, "defense=krum", "seed=0")
    add_sweep(tmp_path, "defense=median", "seed=0")
    (folder / "config.yaml").write_text("- 1")
    data = read_report_data([tmp_path])
    assert [row.defense for row in data.rows] == ["median"]
    assert len(data.comparison.rows) == 2
    assert [run.status for run in data.missing] == ["unreadable"]
