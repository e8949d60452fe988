"""summary.json: final accuracies, rates over the attacked rounds, seconds by step."""

from __future__ import annotations

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
