"""The numbers, histograms and table rows of a round, as W&B gets them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from wandb_records import record

from fedbench.tracking.wandb_rows import (
    LOGGED,
    RANGED,
    client_rows,
    config_key,
    config_values,
    history,
    ranges,
    score_histograms,
)


def scored(benign: list[Any], malicious: list[Any]) -> dict[str, Any]:
    """A round with these scores."""
    template = record(0)["clients"][0]
    clients = [template | {"malicious": False, "score": score} for score in benign]
    clients += [template | {"malicious": True, "score": score} for score in malicious]
    return {**record(0), "clients": clients}


def test_the_accuracy_of_each_backdoor_is_logged() -> None:
    values = history({**record(0), "BA_by_backdoor": {"cross": 0.2, "none_hit": None}})
    assert values["BA/cross"] == 0.2
    assert "BA/none_hit" not in values


def test_no_number_belongs_to_a_single_client() -> None:
    few, many = history(scored([1.0], [2.0])), history(scored([*range(40)], [*range(40)]))
    assert few.keys() == many.keys()


def test_numbers_that_are_not_finite_are_left_out() -> None:
    values = history({**record(0), "MA": math.nan, "norm_ratio": math.inf})
    assert not {"MA", "norm_ratio"} & values.keys()
    assert client_rows(scored([-math.inf], [math.nan])) == [
        [0, 3, False, False, None, 0.0, 0.75, 0.1875],
        [0, 3, True, False, None, 0.0, 0.75, 0.1875],
    ]


def test_scores_of_benign_and_malicious_clients_share_their_bins() -> None:
    found = score_histograms(scored([0.0, 1.0, 1.0, 2.0], [6.0, 8.0]))
    benign, malicious = found["scores/benign"], found["scores/malicious"]
    assert benign.bins == malicious.bins
    assert (benign.bins[0], benign.bins[-1]) == (0.0, 8.0)
    counts = np.add(benign.histogram, malicious.histogram)
    # 64 bins of 1/8: a score s is in bin 8 s, the highest one in the last bin.
    assert {int(i): int(counts[i]) for i in counts.nonzero()[0]} == {
        0: 1,
        8: 2,
        16: 1,
        48: 1,
        63: 1,
    }
    assert (sum(benign.histogram), sum(malicious.histogram)) == (4, 2)


def test_a_defense_without_scores_has_no_histogram() -> None:
    assert score_histograms(record(0, judged=False)) == {}
    assert score_histograms(scored([1.0, 2.0], [])).keys() == {"scores/benign"}


@pytest.mark.parametrize(
    ("scores", "n"),
    [
        ([1.5], 1),
        ([0.0, 0.0], 2),
        ([1.0, None, math.nan, math.inf, -math.inf], 1),
        ([1e308, -1e308], 2),
        ([1.7e308], 1),
        ([1e30, 1e30], 2),
        ([1.0, 1.0 + 2**-52], 2),
        ([5e-324, 1e-323], 2),
        ([2**70, 3], 2),
    ],
)
def test_any_scores_make_a_histogram(scores: list[Any], n: int) -> None:
    histogram = score_histograms(scored(scores, []))["scores/benign"]
    assert sum(histogram.histogram) == n
    json.dumps(histogram.to_json(), allow_nan=False)
    assert histogram.bins == sorted(histogram.bins)


def test_settings_are_plain_values_under_names_that_wandb_can_filter_by() -> None:
    settings = {
        "defense": {"name": "baybfed", "c": 0.5},
        "attack": {"name": "dba", "start": 3},
        "attack_start": 7,
        "n_clients": [15, 30],
        "pmr": 0.2,
    }
    values = config_values(settings, {"defense": "baybfed_literal", "attack": None, "tuned": "x"})
    assert values == {
        "defense": "baybfed_literal",
        "defense__c": 0.5,
        "attack": "dba",
        "attack__start": 3,
        "attack_start": 7,
        "n_clients": "[15, 30]",
        "pmr": 0.2,
    }
    assert all(re.fullmatch(r"[_a-zA-Z][_a-zA-Z0-9]*", name) for name in values)
    assert config_key("dataset.backdoors") == "dataset__backdoors"


def test_ranges_are_of_all_rounds_in_which_a_rate_is_defined() -> None:
    found: dict[str, float] = {}
    for values in ({"BA": 0.3, "MA": 0.5}, {"MA": 0.4}, {"BA": 0.9}, {"BA": 0.1, "pdr": 2.0}):
        found = ranges(found, values)
    assert found == {"BA_min": 0.1, "BA_max": 0.9, "MA_min": 0.4, "MA_max": 0.5}
    assert {*RANGED} <= {*LOGGED}
