"""reproduction.claims: which runs measure a number of the paper, and the verdict on it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from fedbench.report.reported import Publication, ReportedValue
from reproduction.claims import Claim, Verdict, claims_of, over_seeds

PAPER = Publication(("A. Author",), "A paper", "S&P", 2023, "https://example.org")


def stated(dataset: str = "mnist", defense: str = "krum", **given: Any) -> ReportedValue:
    metrics = given.pop("metrics", {"BA": 0.0})
    settings = {key.replace("__", "."): value for key, value in given.items()}
    attack = "constrain_and_scale"
    return ReportedValue(PAPER, "Table 3", dataset, attack, defense, settings, metrics, "")


def kept(*rows: dict[str, Any]) -> pd.DataFrame:
    usual = {"dataset": "mnist", "attack": "constrain_and_scale", "defense": "krum", "pmr": 0.2}
    usual |= {"n_clients": 30, "seed": 41, "BA": 0.0, "MA": 0.9, "run": "krum-1"}
    return pd.DataFrame([{**usual, **row} for row in rows])


def claim(paper: float, *ours: float, dataset: str = "mnist", **given: Any) -> Claim:
    runs = kept(*({"seed": seed, "BA": ba} for seed, ba in enumerate(ours)))
    found = over_seeds(runs, "BA") if ours else None
    return Claim(stated(), "BA", paper, found, dataset, **given)


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (0.0, [0.02], Verdict.REPRODUCED),  # 2 points
        (0.0, [0.021], Verdict.PARTLY),
        (0.5, [0.4], Verdict.PARTLY),  # 10 points
        (0.5, [0.399], Verdict.NOT),
        (0.5, [0.2, 0.8], Verdict.REPRODUCED),  # the mean counts
        (0.5, [0.8, 0.9], Verdict.NOT),  # although the t-interval, 0.2 to 1, contains 0.5
        (0.5, [], Verdict.UNTESTED),
    ],
)
def test_verdict_by_distance(paper: float, ours: list[float], verdict: Verdict) -> None:
    assert claim(paper, *ours).verdict == verdict


def test_no_ba_is_expected_to_fall_below_that_of_a_clean_model() -> None:
    assert claim(0.0, 0.05).verdict == Verdict.PARTLY
    assert claim(0.0, 0.05, clean=0.04).verdict == Verdict.REPRODUCED
    assert claim(0.9, 0.89, clean=0.04).verdict == Verdict.REPRODUCED


def test_other_data_does_not_test_a_number_but_may_agree_with_it() -> None:
    found = claim(0.0, 0.01, dataset="fmnist")
    assert (found.verdict, found.agreement) == (Verdict.UNTESTED, Verdict.REPRODUCED)


def test_claims_are_of_runs_with_all_stated_settings() -> None:
    runs = kept(
        {"pmr": 0.3, "BA": 0.1},
        {"pmr": 0.2, "BA": 0.2},
        {"pmr": 0.3, "BA": 0.3, "defense": "median"},
        {"pmr": 0.3, "BA": 0.4, "attack": "dba"},
        {"pmr": 0.3, "BA": 0.5, "dataset": "fmnist"},
    )
    (found,) = claims_of([stated(pmr=0.3, n_clients=30)], runs, {})
    assert found.ours is not None
    assert found.ours.mean == 0.1
    (unknown,) = claims_of([stated(pdr=0.1)], runs, {})  # a setting that was not kept
    assert unknown.ours is None


def test_shares_are_the_same_if_the_number_of_malicious_clients_is() -> None:
    third = claims_of([stated(pmr=0.33)], kept({"pmr": 1 / 3}), {})  # both are 10 of 30
    fewer = claims_of([stated(pmr=0.33)], kept({"pmr": 0.3}), {})
    assert (third[0].ours is None, fewer[0].ours is None) == (False, True)


def test_ranges_of_clients_are_compared_as_text() -> None:
    runs = kept({"n_clients": "[40, 90]"})
    (found,) = claims_of([stated(n_clients="[40, 90]")], runs, {})
    assert found.ours is not None


def test_the_papers_own_data_comes_first_and_a_stand_in_is_marked() -> None:
    reported = stated("cifar10")
    both = kept({"dataset": "cifar10", "BA": 0.5}, {"dataset": "fmnist", "BA": 0.1})
    (own,) = claims_of([reported], both, {})
    (other,) = claims_of([reported], both[1:], {"fmnist": 0.09})
    assert (own.dataset, own.stands_in) == ("cifar10", False)
    assert (other.dataset, other.stands_in, other.clean) == ("fmnist", True, 0.09)


def test_every_metric_is_a_claim_and_only_ba_has_a_floor() -> None:
    reported = stated(metrics={"MA": 0.9, "BA": 0.0})
    found = claims_of([reported], kept({}), {"mnist": 0.03})
    assert [(c.metric, c.clean) for c in found] == [("BA", 0.03), ("MA", 0.0)]


def test_two_runs_of_a_seed_are_no_repetition() -> None:
    with pytest.raises(ValueError, match="several runs of a seed: krum-1, krum-2"):
        over_seeds(kept({}, {"run": "krum-2"}), "BA")
