"""reproduction.kept: what is kept of runs, merged by run id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from handmade_runs import a_run, data_of

from fedbench.errors import UserError
from fedbench.report.report_data import ReportData
from fedbench.results.origin import Origin
from fedbench.results.run_reader import RunResult
from reproduction.kept import METRICS, read
from reproduction.kept import keep as keep_sweeps


def keep(data: ReportData, folder: Path) -> list[str]:
    return keep_sweeps(data, folder, ["a", "b", "table3"])


def finished(sweep: str, run_id: str, **given: Any) -> RunResult:
    summary = {"fedbench_git": {"commit": "0123456789abcdef"}, "processor": "a CPU"}
    run = a_run(given.pop("defense", "krum"), given.pop("seed", 41), **given)
    changed = {"non_iid": given.get("non_iid", 0.5), "attack.alpha": 0.5}
    fields = {**run.__dict__, "folder": Path("runs", sweep, run_id), "id": run_id}
    return RunResult(**{**fields, "summary": summary, "origin": Origin({}, changed)})


def test_a_line_has_settings_results_and_where_they_come_from(tmp_path: Path) -> None:
    run = finished("table3", "krum-1", BA=1 / 3, MA_lost=-0.01, non_iid=1.0, censored=["recovery"])
    assert keep(data_of([run]), tmp_path) == ["table3"]
    (line,) = read(tmp_path, "table3").to_dict("records")
    assert (line["dataset"], line["defense"], line["attack"]) == ("mnist", "krum", "dba")
    assert (line["non_iid"], line["n_clients"], line["seed"]) == (1.0, 30, 41)
    assert (line["BA"], line["MA_lost"], line["censored"]) == (0.333333, -0.01, "recovery")
    assert (line["run"], line["commit"], line["processor"]) == ("krum-1", "0123456789", "a CPU")
    assert pd.isna(line["TPR"])
    assert line["attack.alpha"] == ""  # changed in a run that lacks it: another attack's


def test_runs_join_the_kept_ones_and_replace_those_with_their_id(tmp_path: Path) -> None:
    keep(data_of([finished("a", "krum-1", BA=0.1), finished("a", "krum-2", seed=42)]), tmp_path)
    keep(data_of([finished("a", "krum-1", BA=0.2), finished("a", "krum-3", seed=43)]), tmp_path)
    kept = read(tmp_path, "a")
    assert kept["run"].tolist() == ["krum-1", "krum-2", "krum-3"]
    assert kept["BA"].tolist() == [0.2, 0.1, 0.1]


def test_keeping_the_same_runs_again_changes_no_byte(tmp_path: Path) -> None:
    """Whatever their order, and whether they were there before."""
    runs = [
        finished("a", f"krum-{seed}{non_iid}", seed=seed, non_iid=non_iid, BA=seed / 97)
        for seed in (41, 42)
        for non_iid in (0.5, 1.0, 0.0)
    ]
    keep(data_of(runs), tmp_path)
    first = (tmp_path / "a.csv").read_bytes()
    keep(data_of(runs[:2]), tmp_path)
    keep(data_of(runs[::-1]), tmp_path / "again")
    assert (tmp_path / "a.csv").read_bytes() == first
    assert (tmp_path / "again" / "a.csv").read_bytes() == first
    assert read(tmp_path, "a")["non_iid"].tolist() == [0, 0, 0.5, 0.5, 1, 1]


def test_only_finished_runs_are_kept_each_with_its_sweep(tmp_path: Path) -> None:
    runs = [finished("a", "krum-1"), finished("b", "krum-2"), finished("b", "krum-3", seed=42)]
    failed = a_run("median", status="failed", folder=Path("runs/a/median-1"))
    assert keep(data_of([*runs, failed]), tmp_path) == ["a", "b"]
    assert read(tmp_path, "a")["run"].tolist() == ["krum-1"]
    assert len(read(tmp_path, "b")) == 2


def test_other_runs_are_not_kept(tmp_path: Path) -> None:
    assert keep(data_of([finished("default", "krum-1")]), tmp_path) == []
    assert [*tmp_path.iterdir()] == []


def test_a_sweep_that_was_not_run_has_no_lines(tmp_path: Path) -> None:
    kept = read(tmp_path, "table2")
    assert len(kept) == 0
    assert {*METRICS, "dataset", "run"} <= {*kept}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"')
    with pytest.raises(UserError, match=r"a\.csv: not a CSV file"):
        read(tmp_path, "a")
