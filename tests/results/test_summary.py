"""summary.json: final accuracies, rates over the attacked rounds, seconds by step."""

from __future__ import annotations

import pytest
from test_run_dir import record

from fedbench.results.summary import summarise


def test_final_accuracies_and_total_seconds() -> None:
    summary = summarise([record(0), record(1)])
    assert summary["MA"] == 0.6
    assert summary["rounds"] == 2
    assert summary["seconds"] == 3.5
    assert summary["seconds_by_step"] == {"train": 2.0, "aggregate": 1.0, "evaluate": 0.5}


def test_rounds_of_an_older_version_may_lack_a_step() -> None:
    steps = {"train": 4.0, "collude": 2.0, "aggregate": 0.5, "evaluate": 0.25}
    summary = summarise([record(0), record(1, seconds=steps)])
    assert list(summary["seconds_by_step"].items()) == [
        *(("train", 5.0), ("collude", 2.0), ("aggregate", 1.0), ("evaluate", 0.5))
    ]
    assert summary["seconds"] == 8.5
    assert summarise([record(0, seconds=steps), record(1)])["seconds"] == 8.5


def test_rates_cover_the_attacked_rounds_only() -> None:
    missed = [{"malicious": True, "accepted": True}, {"malicious": False, "accepted": False}]
    quiet = record(0, attacked=False, AUC=None, clients=[{"malicious": False, "accepted": False}])
    attacked = (
        record(1, clients=missed * 3),
        record(2, clients=[*missed, *record(2)["clients"]]),
    )
    summary = summarise([quiet, *attacked])
    # Poisoned: 1 of 5 rejected. Benign, in attacked rounds: 1 of 5 accepted.
    assert (summary["TPR"], summary["TNR"]) == (0.2, 0.2)


def test_without_an_attack_tnr_covers_all_rounds() -> None:
    honest = [{"malicious": False, "accepted": True}] * 3
    rejected = [{"malicious": False, "accepted": False}]
    rounds = [record(i, attacked=False, AUC=None, clients=honest + rejected) for i in range(2)]
    summary = summarise(rounds)
    assert (summary["TPR"], summary["TNR"], summary["AUC"]) == (None, 0.75, None)


def test_a_rule_that_judges_no_client_has_no_rates() -> None:
    unjudged = [{"malicious": bad, "accepted": None} for bad in (True, False)]
    summary = summarise([record(0, clients=unjudged, AUC=None)])
    assert (summary["TPR"], summary["TNR"], summary["AUC"]) == (None, None, None)


def test_durability_of_the_backdoor() -> None:
    # Attacked in rounds 1 and 2. BA since round 1: (0.9 + 0.8 + 0.6 + 0.3 + 0.05) / 5 = 0.53.
    # BA is below 50 % two rounds after round 2, below 10 % three rounds after it.
    accuracies = [0.5, 0.9, 0.8, 0.6, 0.3, 0.05]
    rounds = [record(i, attacked=i in (1, 2), BA=ba) for i, ba in enumerate(accuracies)]
    summary = summarise(rounds)
    assert summary["BA_cumulative"] == pytest.approx(0.53)
    assert (summary["lifespan_50"], summary["lifespan_10"]) == (2, 3)
    assert summary["rounds_after_attack"] == 3


def test_durability_counts_evaluated_rounds_only() -> None:
    # evaluate_every=2 of 5 rounds: rounds 1, 3 and the last one
    accuracies = [None, 0.8, None, 0.6, 0.1]
    rounds = [record(i, attacked=i < 2, BA=ba) for i, ba in enumerate(accuracies)]
    summary = summarise(rounds)
    assert summary["BA_cumulative"] == pytest.approx(0.5)
    assert (summary["lifespan_50"], summary["lifespan_10"]) == (3, 3)


def test_no_durability_without_an_attack_or_a_backdoor() -> None:
    benign = summarise([record(i, attacked=False, BA=0.1) for i in range(3)])
    untargeted = summarise([record(i, attacked=i == 0, BA=None) for i in range(3)])
    for summary in (benign, untargeted):
        assert summary["BA_cumulative"] is summary["lifespan_50"] is summary["lifespan_10"] is None
    assert benign["rounds_after_attack"] is None
    assert untargeted["rounds_after_attack"] == 2


def test_an_attack_until_the_last_round_has_no_lifespan() -> None:
    summary = summarise([record(i, BA=0.9) for i in range(3)])
    assert summary["BA_cumulative"] == pytest.approx(0.9)
    assert summary["lifespan_50"] is summary["lifespan_10"] is None
    assert summary["rounds_after_attack"] == 0
