"""Runs and table as CSV."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pandas as pd
import pytest
from handmade_runs import a_run, data_of, with_seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.report.csv_tables import runs_csv, table_csv
from fedbench.results.run_reader import RunResult


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def test_one_line_per_run_with_the_right_types() -> None:
    runs = [
        a_run("krum", 1, BA=0.25, TPR=None, pmr=0.3, flag=True, lr=1, n_clients=[40, 90]),
        a_run("krum", 2, "failed", reason='no "memory", sorry', pmr=0.2, flag=False, attack="none"),
    ]
    frame = pd.read_csv(io.StringIO(runs_csv(data_of(runs))))
    assert list(frame["seed"]) == [1, 2]
    assert frame["pmr"].tolist() == [0.3, 0.2]
    assert frame["BA"][0] == 0.25
    assert math.isnan(frame["BA"][1])
    assert frame["TPR"].isna().all()
    assert frame["flag"].tolist() == [True, False]
    assert frame["attack"].tolist() == ["dba", "none"]
    assert frame["n_clients"].tolist() == ["[40, 90]", "30"]
    assert frame["status"].tolist() == ["finished", "failed"]
    assert frame["reason"][1] == 'no "memory", sorry'
    assert frame["run_id"][0] == runs[0].folder.name
    types = {name: str(frame[name].dtype) for name in ("seed", "pmr", "BA", "flag", "counted")}
    assert types == {
        **{"seed": "int64", "pmr": "float64", "BA": "float64"},
        **{"flag": "bool", "counted": "bool"},
    }


def test_the_order_of_columns_does_not_depend_on_the_runs() -> None:
    runs = [a_run("krum", zeta=1), a_run("flame", alpha=2, by_backdoor={"1": 0.1, "0": 0.2})]
    first, second = (runs_csv(data_of(order)).splitlines()[0] for order in (runs, runs[::-1]))
    assert first == second
    assert first.split(",") == [
        *("run_id", "status", "counted", "defense", "attack", "dataset", "pmr", "seed"),
        *("BA", "MA", "TPR", "TNR", "AUC", "seconds", "norm_ratio", "cosine", "benign_cosine"),
        *("BA_cumulative", "lifespan_50", "lifespan_10", "rounds_after_attack"),
        *("MA_lost", "recovery"),
        *("BA/0", "BA/1", "alpha", "model", "n_clients", "rounds", "zeta", "folder", "reason"),
    ]


def test_a_repeated_run_is_listed_but_not_counted() -> None:
    runs = [a_run("krum", folder=f"runs/{name}") for name in ("old", "new")]
    found = records(runs_csv(data_of(runs)))
    assert [(row["run_id"], row["counted"]) for row in found] == [("old", "False"), ("new", "True")]


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_is_read_back(name: str, reason: str) -> None:
    run = RunResult(a_run("x").folder, "failed", {"defense": "krum", "note": name}, {}, reason)
    text = runs_csv(data_of([run]))
    (row,) = records(text)
    for given_text, found in ((name, row["note"]), (reason, row["reason"])):
        expected = given_text.replace("\0", "\ufffd")
        assert found in (expected, "'" + expected)
        assert (found != expected) <= expected.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert text.encode("utf-8").endswith(b"\r\n")


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+cmd|' /C calc'!A0", "'-2+cmd|' /C calc'!A0"),
        ("+1", "+1"),
        ("-1e-3", "-1e-3"),
        ("-", "'-"),
        ("a=b", "a=b"),
        (-0.5, "-0.5"),
        ("\ud800", "?"),
        (None, ""),
    ],
)
def test_spreadsheets_run_no_formula(value: Any, cell: str) -> None:
    (row,) = records(runs_csv(data_of([a_run("krum", option=value)])))
    assert row["option"] == cell


def test_the_table_has_statistics_of_every_metric() -> None:
    # BA 0.1, 0.3, 0.8: mean 0.4, squared deviations 0.09 + 0.01 + 0.16 = 0.26, sd sqrt(0.13);
    # t = 4.3027 with two degrees of freedom: half-width 4.3027 * sqrt(0.13 / 3) = 0.8957, cut.
    runs = with_seeds("krum", [0.1, 0.3, 0.8], pmr=0.2) + with_seeds("flame", [0.5], pmr=0.3)
    frame = pd.read_csv(io.StringIO(table_csv(data_of(runs))))
    krum, flame = frame.to_dict("records")
    assert list(frame)[:4] == ["pmr", "defense", "runs", "finished"]
    assert (krum["pmr"], krum["defense"], krum["runs"]) == (0.2, "krum", 3)
    found = [krum[f"BA_{name}"] for name in ("mean", "sd", "low", "high", "n", "n_above")]
    assert found == pytest.approx([0.4, math.sqrt(0.13), 0.0, 1.0, 3, 1])
    assert (krum["BA_worst"], krum["BA_worst_seed"]) == (0.8, 2)
    assert (krum["MA_worst"], krum["MA_worst_seed"]) == (0.8, 0)
    assert "MA_n_above" not in krum
    assert flame["BA_n"] == 1
    assert math.isnan(flame["BA_sd"])
    assert math.isnan(flame["BA_low"])
    assert flame["TPR_n"] == 0
    assert math.isnan(flame["TPR_mean"])


def test_the_table_has_the_chosen_columns_and_numeric_settings() -> None:
    scale = [a_run("krum", attack={"name": "scale", "alpha": a}, cosine=0.5) for a in (0.5, 0.9)]
    runs = [*scale, a_run("krum", attack="dba"), a_run("krum", attack="dba", depth=None)]
    frame = pd.read_csv(io.StringIO(table_csv(data_of(runs, ["cosine"]))))
    assert [name for name in map(str, frame) if name.startswith("cosine")] == [
        f"cosine_{name}" for name in ("mean", "sd", "low", "high", "n", "worst", "worst_seed")
    ]
    assert not any(name.startswith("BA") for name in map(str, frame))
    assert frame["attack.alpha"].dtype == float
    assert frame["attack.alpha"].isna().sum() == 2
    assert frame["cosine_worst"].isna().all()


def test_lower_bounds_are_counted() -> None:
    # Lifespans of 4 and at least 8 rounds: the mean of 6 is a lower bound.
    runs = [
        a_run("krum", 0, lifespan_50=4, MA_lost=0.25),
        a_run("krum", 1, lifespan_50=8, MA_lost=-0.05, censored=["lifespan_50"]),
    ]
    frame = pd.read_csv(io.StringIO(table_csv(data_of(runs, ["lifespan_50", "MA_lost"]))))
    (row,) = frame.to_dict("records")
    assert (row["lifespan_50_mean"], row["lifespan_50_n_censored"]) == (6, 1)
    assert (row["lifespan_50_worst"], row["lifespan_50_worst_seed"]) == (8, 1)
    assert row["MA_lost_mean"] == pytest.approx(0.1)
    assert (row["MA_lost_worst"], row["MA_lost_worst_seed"]) == (0.25, 0)
    assert "MA_lost_n_censored" not in row
    assert row["lifespan_50_low"] == 0  # 6 -+ 25.4
    assert row["lifespan_50_high"] == pytest.approx(6 + 12.706 * 2, abs=0.01)


def test_rows_without_finished_runs_are_empty() -> None:
    (row,) = records(table_csv(data_of([a_run("krum", status="running")])))
    assert (row["runs"], row["finished"], row["BA_n"], row["BA_mean"]) == ("1", "0", "0", "")
