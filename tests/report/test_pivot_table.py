"""Tables of rows x columns: their axes and sections, and what is bold and underlined."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import a_run, data_of, with_seeds

from fedbench.errors import UserError
from fedbench.report.pivot_table import PivotTable, half_width, marks, number, pivot
from fedbench.report.statistics import Estimate, estimate
from fedbench.results.run_reader import RunResult


def an_estimate(mean: float, half: float | None) -> Estimate:
    """Return an estimate with a given interval."""
    if half is None:
        return Estimate({0: mean}, mean, None, None, None)
    return Estimate({0: mean, 1: mean}, mean, 0.0, mean - half, mean + half)


def sweep(**values: Sequence[Any]) -> list[Any]:
    """Return a run of krum and of flame for every combination of values."""
    runs = [{"defense": name} for name in ("krum", "flame")]
    for key, options in values.items():
        runs = [{**run, key: option} for run in runs for option in options]
    return [a_run(**run) for run in runs]


def shape(table: PivotTable) -> tuple[list[str], list[str], list[str]]:
    return table.rows, table.columns, list(table.sections)


def test_one_setting_has_metrics_as_columns() -> None:
    table = pivot(data_of(sweep()))
    assert shape(table) == (["krum", "flame"], [""], [""])
    assert (table.row_key, table.column_key) == ("defense", "")


def test_attacks_are_columns_and_other_settings_sections() -> None:
    data = data_of(sweep(pmr=[0.3, 0.2], attack=["dba", "alie"], rounds=[9, 10]))
    table = pivot(data)
    assert shape(table) == (
        ["krum", "flame"],
        ["alie", "dba"],
        [f"pmr {pmr}, rounds {rounds}" for pmr in (0.2, 0.3) for rounds in (9, 10)],
    )
    assert {len(section) for section in table.sections.values()} == {4}


def test_attacks_are_columns_also_with_several_data_sets() -> None:
    table = pivot(data_of(sweep(dataset=["mnist", "fmnist"], attack=["dba", "alie"])))
    assert shape(table)[1:] == (["alie", "dba"], ["dataset fmnist", "dataset mnist"])


def test_without_several_attacks_the_first_swept_setting_makes_the_columns() -> None:
    table = pivot(data_of(sweep(pmr=[0.2, 0.3], rounds=[9, 10])))
    assert shape(table) == (["krum", "flame"], ["pmr 0.2", "pmr 0.3"], ["rounds 9", "rounds 10"])


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (["pmr"], (["krum", "flame"], ["pmr 0.2", "pmr 0.3"], ["attack alie", "attack dba"])),
        (["pmr", "attack"], (["0.2", "0.3"], ["alie", "dba"], ["defense krum", "defense flame"])),
        (["attack", "defense"], (["alie", "dba"], ["krum", "flame"], ["pmr 0.2", "pmr 0.3"])),
        (["defense"], (["alie", "dba"], ["krum", "flame"], ["pmr 0.2", "pmr 0.3"])),
    ],
)
def test_by_names_columns_or_rows_and_columns(by: list[str], expected: Any) -> None:
    data = data_of(sweep(attack=["dba", "alie"], pmr=[0.2, 0.3]))
    assert shape(pivot(data, by=by)) == expected


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (["atack"], r"--by atack: 'atack' .*; did you mean attack\? \(known: attack, defense\)"),
        (["defense", "pmr"], r"--by defense,pmr: 'pmr' .* \(known: attack, defense\)"),
        (["attack", "attack"], "--by attack,attack: must be"),
        (["defense", "attack", "defense"], "must be a setting for columns, or ROWS,COLUMNS"),
    ],
)
def test_an_unknown_axis_is_a_user_error(by: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pivot(data_of(sweep(attack=["dba", "alie"])), by=by)


def test_parameters_of_an_attack_join_its_name() -> None:
    scale = [{"name": "scale", "alpha": alpha} for alpha in (0.9, 0.5)]
    table = pivot(data_of(sweep(attack=[*scale, {"name": "dba"}])))
    assert shape(table)[1:] == (["dba", "scale alpha=0.5", "scale alpha=0.9"], [""])


def test_sections_leave_out_settings_that_a_run_lacks() -> None:
    attacks = [{"name": "scale", "alpha": alpha} for alpha in (0.5, 0.9)]
    table = pivot(data_of(sweep(attack=[*attacks, "dba"], pmr=[0.2, 0.3])), by=["pmr"])
    assert list(table.sections) == [
        "attack dba",
        "attack scale, attack.alpha 0.5",
        "attack scale, attack.alpha 0.9",
    ]


def test_missing_combinations_have_no_cell() -> None:
    runs = [a_run("krum", attack="dba", pmr=0.2), a_run("flame", attack="alie", pmr=0.3)]
    table = pivot(data_of(runs))
    assert {name: [*section] for name, section in table.sections.items()} == {
        "pmr 0.2": [("krum", "dba")],
        "pmr 0.3": [("flame", "alie")],
    }
    assert table.rows_of("pmr 0.3") == ["flame"]


def test_settings_that_look_alike_keep_their_own_rows() -> None:
    table = pivot(data_of([a_run("krum", option=value) for value in (None, "null")]))
    assert len(table.cells()) == 2


def test_estimates_are_those_of_the_seeds() -> None:
    (cell,) = pivot(data_of(with_seeds("krum", [0.1, 0.3, None]))).cells()
    found = cell.estimates["BA"]
    assert found is not None
    assert dict(found.values) == {0: 0.1, 1: 0.3}
    assert cell.estimates["TPR"] is None


def test_runs_without_a_result() -> None:
    unreadable = RunResult(Path("runs/x"), "unreadable", {}, {}, "config.yaml: not YAML")
    table = pivot(data_of([*sweep(), a_run("median", status="failed"), unreadable]))
    assert table.rows == ["krum", "flame", "median"]
    assert table.sections[""]["median", ""].estimates["BA"] is None


@pytest.mark.parametrize(
    ("metric", "given", "expected"),
    [
        # Lower is better: 10 +- 5 is best. 18 +- 4 starts at 14 < 15; 20 +- 4 starts at 16 > 15.
        ("BA", [(0.10, 0.05), (0.18, 0.04), (0.20, 0.04)], ["best", "tie", ""]),
        # Higher is better: 90 +- 5 is best. 82 +- 4 ends at 86 > 85; 80 +- 4 at 84 < 85.
        ("MA", [(0.80, 0.04), (0.90, 0.05), (0.82, 0.04)], ["", "best", "tie"]),
        ("BA/0", [(0.1, 0.01), (0.2, 0.01)], ["best", ""]),
        ("seconds", [(10.0, 1.0), (9.0, 0.5)], ["tie", "best"]),
        # 84.04 and 83.96 are both printed as 84.0.
        ("MA", [(0.8404, 0.0), (0.8396, 0.0), (0.8394, 0.0)], ["best", "best", ""]),
        # One seed each: no intervals, no ties
        ("BA", [(0.1, None), (0.101, None)], ["best", ""]),
        # A single seed within the interval of the best, and the other way round
        ("BA", [(0.1, 0.05), (0.14, None), (0.16, None)], ["best", "tie", ""]),
        ("BA", [(0.1, None), (0.14, 0.05), (0.16, 0.05)], ["best", "tie", ""]),
        # Nothing to compare with, and no better direction
        ("BA", [(0.1, 0.05), None], ["", ""]),
        ("BA", [None, None], ["", ""]),
        ("cosine", [(0.1, 0.05), (0.2, 0.05)], ["", ""]),
    ],
)
def test_best_and_ties(metric: str, given: Any, expected: list[str]) -> None:
    estimates = [None if pair is None else an_estimate(*pair) for pair in given]
    assert marks(metric, estimates) == expected


def test_defenses_are_compared_in_the_same_setting_wherever_they_stand() -> None:
    better = {("krum", 0.2): 0.1, ("flame", 0.2): 0.5, ("krum", 0.3): 0.9, ("flame", 0.3): 0.6}
    data = data_of([a_run(name, pmr=pmr, BA=ba) for (name, pmr), ba in better.items()])
    for by in (["defense", "pmr"], ["pmr", "defense"]):
        table = pivot(data, by=by)
        best = {cell.row.defense for cell in table.cells() if cell.marks["BA"] == "best"}
        values = [(c.row.defense, c.marks["BA"]) for c in table.cells()]
        assert best == {"krum", "flame"}
        assert sorted(values) == [("flame", ""), ("flame", "best"), ("krum", ""), ("krum", "best")]
        (cell,) = [c for c in table.cells() if c.row.values == [0.3] and c.marks["BA"] == "best"]
        assert cell.row.defense == "flame"


def test_numbers() -> None:
    shown = [number(*pair) for pair in (("BA", 0.8333), ("seconds", 12.34), ("cosine", -0.001))]
    assert shown == ["83.3", "12.3", "0.00"]
    assert number("BA", 1.0) == "100.0"
    assert number("cosine", -0.5) == "-0.50"


def test_half_width_reaches_the_farther_end_of_a_cut_interval() -> None:
    one = estimate({0: 0.5})
    # Mean 0.5, t = 12.706 with one degree of freedom, sd 0.7071: 12.706 * 0.7071 / sqrt(2) = 6.35,
    # which is cut to [0, 1]. 0.8 and 0.9: 12.706 * 0.0707 / sqrt(2) = 0.635, cut to [0.215, 1].
    both, above = estimate({0: 0.0, 1: 1.0}), estimate({0: 0.8, 1: 0.9})
    assert one is not None
    assert both is not None
    assert above is not None
    assert half_width(one) is None
    assert half_width(both) == pytest.approx(0.5)
    assert half_width(above) == pytest.approx(0.6353, abs=1e-4)
