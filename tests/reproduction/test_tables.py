"""reproduction.tables: Markdown by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from test_claims import kept, stated

from reproduction.claims import claims_of, over_seeds
from reproduction.experiments import Experiment, Reason
from reproduction.tables import (
    breaking_table,
    claims_table,
    grouped,
    interval,
    results_table,
    stopped_table,
    summary_table,
    table,
)


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def seeds(values: list[float], **given: Any) -> list[dict[str, Any]]:
    """A run per value of BA, with seeds 41, 42, ..."""
    return [{"seed": 41 + i, "BA": ba, **given} for i, ba in enumerate(values)]


def test_table_aligns_all_but_the_first_columns_to_the_right() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "-"),
        ([0.5], "50.0"),
        ([0.5, 0.5], "50.0"),
        ([0.1, 0.2, 0.3], "20.0 [0.0, 44.8]"),  # 0.2 +- 4.303 * 0.1 / sqrt(3)
        ([-0.0], "0.0"),
    ],
)
def test_interval(values: list[float], expected: str) -> None:
    runs = kept(*seeds(values)) if values else kept({})[:0]
    assert interval(over_seeds(runs, "BA")) == expected


def test_claims_show_both_numbers_a_mark_and_the_reason() -> None:
    reported = [
        stated(pmr=0.2, metrics={"BA": 0.01, "MA": 0.9214}),
        stated("cifar10", metrics={"BA": 0.5}),
        stated("reddit", metrics={"BA": 0.5}),
    ]
    runs = kept(*seeds([0.0, 0.0]), {"dataset": "fmnist", "BA": 0.9})
    found = claims_of(reported, runs, {})
    # BA and MA of the first, then one each
    _, _, own, other, missing = lines(claims_table(found, ["", "a", "b", ""]))
    assert own == ["`mnist`", "`krum pmr=0.2`", "1 → 0.0 ✓", "92.14 → 90.0 ≈", "", "2", "a"]
    assert other == ["`cifar10`", "`krum`", "50 → 90.0 (✗)", "", "`fmnist`", "1", "b"]
    assert missing == ["`reddit`", "`krum`", "50 → -", "", "", "0", ""]


def test_summary_counts_verdicts() -> None:
    runs = kept(*seeds([0.0]), {"dataset": "fmnist", "BA": 0.9})
    reported = [stated(metrics={"BA": 0.0, "MA": 0.1}), stated("cifar10"), stated("reddit")]
    found = claims_of(reported, runs, {})
    _, _, one, total = lines(summary_table({"One": found, "None": []}))
    assert one == ["One", "4", "1", "0", "1", "2"]
    assert total == ["**all**", "4", "1", "0", "1", "2"]


def test_results_are_means_by_setting_in_the_papers_order() -> None:
    runs = kept(
        *seeds([0.1, 0.3], defense="median"),
        *seeds([0.5], defense="fedavg"),
        *seeds([0.7], defense="baybfed"),
    )
    _, _, *rows = lines(results_table(runs, ["defense"], ["BA"]))
    assert [row[0] for row in rows] == ["`fedavg`", "`median`", "`baybfed`"]
    assert rows[1][1:] == ["20.0 [0.0, 100.0]", "2"]


def test_rounds_are_no_percentages_and_lower_bounds_are_marked() -> None:
    runs = kept(
        {"lifespan_50": 20.0, "recovery": 1.0, "censored": "lifespan_50"},
        {"seed": 42, "lifespan_50": 10.0, "recovery": 1.0, "censored": ""},
    )
    _, _, row = lines(results_table(runs, ["defense"], ["lifespan_50", "recovery"]))
    assert row == ["`krum`", "≥ 15.0 [0.0, 78.5]", "1.0", "2"]


def test_a_defense_breaks_at_the_first_value_with_ba_above_a_half() -> None:
    runs = kept(
        *seeds([0.4, 0.5], pmr=0.2),
        *seeds([0.4, 0.7], pmr=0.3),
        *seeds([0.9, 0.9], pmr=0.4),
        *seeds([0.1], pmr=0.2, defense="median"),
    )
    head, _, krum, median = lines(breaking_table(runs, "pmr"))
    assert head == ["defense", "pmr 0.2", "pmr 0.3", "pmr 0.4", "fails from"]
    assert krum == ["`krum`", "45.0", "**55.0**", "**90.0**", "0.3"]
    assert median == ["`median`", "10.0", "", "", "-"]


def test_who_stops_the_attack_and_what_it_costs() -> None:
    attacked = kept(
        {"defense": "fedavg", "BA": 0.99, "MA": 0.88},
        {"defense": "krum", "BA": 0.13, "MA": 0.80},  # within 10 points of the clean model
        {"defense": "median", "BA": 0.14, "MA": 0.89},
        {"defense": "flame", "BA": 0.01, "MA": 0.90},
    )
    benign = kept({"defense": "fedavg", "MA": 0.9})
    _, _, row = lines(stopped_table(attacked, benign, {"mnist": 0.031}))
    assert row == ["`mnist`", "90.0", "flame (0.0), krum (-10.0)", "median (-1.0), fedavg (-2.0)"]


def test_groups_keep_numbers_in_natural_order() -> None:
    runs = pd.DataFrame({"pmr": [0.5, 10, 9, 0.25]})
    assert [key for (key,), _ in grouped(runs, ["pmr"])] == [0.25, 0.5, 9, 10]


def test_the_first_reason_that_fits_counts() -> None:
    reasons = [
        Reason("krum on words", {"defense": ["krum"], "dataset": ["reddit"]}),
        Reason("at pmr 0.5", {"pmr": [0.5], "metric": ["BA"]}),
        Reason("other"),
    ]
    experiment = Experiment("Title", ["sweep"], reasons=reasons)
    runs = kept({"BA": 0.5}, {"BA": 0.5, "pmr": 0.5}, {"BA": 0.0, "pmr": 0.3})
    reported = [stated(pmr=0.2), stated(pmr=0.5), stated(pmr=0.3), stated("reddit")]
    whys = [experiment.why(claim) for claim in claims_of(reported, runs, {})]
    assert whys == ["other", "at pmr 0.5", "", ""]  # reproduced, and not run
