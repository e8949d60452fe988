"""Statistics over seeds, against scipy, statsmodels, all sign flips by hand, and worked cases."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbench.report.statistics import (
    MAX_EXACT_SEEDS,
    N_RANDOM_FLIPS,
    PairedComparison,
    compare_paired,
    estimate,
    holm,
    smallest_p,
    whole_differences,
)

# Accuracies on 1000 samples: on a grid, as real ones are, so that ties happen
rates = st.integers(0, 1000).map(lambda hits: hits / 1000)
p_values = st.lists(
    st.one_of(st.integers(0, 1000), st.integers(0, 10**6)).map(lambda n: n / 10**6), max_size=12
)


def by_seed(values):
    return dict(enumerate(values))


def shuffled(values, seed=0):
    items = list(values.items())
    random.Random(seed).shuffle(items)
    return dict(items)


def sign_flip_p(differences):
    """All sign flips; differences are whole numbers, so that sums are exact."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(value >= observed for value in sums) / len(sums)


# --- estimate


def test_worked_example_of_an_estimate():
    # 0.10, 0.20, 0.30: mean 0.2, sd 0.1; t(0.975, 2) = 4.303, half-width 4.303 * 0.1 / sqrt(3)
    # = 0.2484. The interval is -0.0484 .. 0.4484, and a rate cannot be below 0.
    found = estimate({1: 0.1, 2: 0.2, 3: 0.3})
    assert found.n == 3
    assert found.mean == pytest.approx(0.2)
    assert found.sd == pytest.approx(0.1)
    assert found.low == 0
    assert found.high == pytest.approx(0.4484, abs=5e-5)
    assert estimate({1: 0.1, 2: 0.2, 3: 0.3}, bounds=None).low == pytest.approx(-0.0484, abs=5e-5)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12), st.sampled_from([0.8, 0.95, 0.99]))
def test_interval_is_that_of_scipy(values, level):
    found = estimate(by_seed(values), bounds=None, level=level)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found.sd == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    if found.sd > 1e-6:  # scipy's interval is NaN for equal values
        expected = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
        assert (found.low, found.high) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_level_is_95_percent_by_default():
    values = [0.41, 0.48, 0.55, 0.43]
    found = estimate(by_seed(values))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.integers(), rates, min_size=1, max_size=8))
def test_interval_contains_the_mean_and_lies_in_the_range_of_rates(values):
    found = estimate(values)
    if found.n == 1:
        assert (found.sd, found.low, found.high) == (None, None, None)
    else:
        assert 0 <= found.low <= found.mean <= found.high <= 1


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.integers(), rates, min_size=1, max_size=8))
def test_order_of_seeds_does_not_matter(values):
    found = estimate(shuffled(values))
    assert found == estimate(values)
    assert list(found.values) == sorted(values)
    assert found.worst(True) == estimate(values).worst(True)


@settings(derandomize=True, deadline=None)
@given(st.lists(rates, min_size=2, max_size=8), st.integers(-5, 5))
def test_interval_moves_with_the_values(values, shift):
    before = estimate(by_seed(values), bounds=None)
    after = estimate(by_seed([value + shift for value in values]), bounds=None)
    assert after.mean == pytest.approx(before.mean + shift)
    assert after.low == pytest.approx(before.low + shift)
    assert after.high == pytest.approx(before.high + shift)


def test_cutting_loses_no_coverage():
    """The cut interval covers the true mean exactly as often as the uncut one."""
    rng = np.random.default_rng(0)
    for row in rng.beta(0.3, 1.2, size=(500, 3)):
        cut, whole = estimate(by_seed(row)), estimate(by_seed(row), bounds=None)
        assert (cut.low <= 0.2 <= cut.high) == (whole.low <= 0.2 <= whole.high)


def test_a_value_outside_shows_that_the_bounds_do_not_apply():
    seconds = {0: 0.4, 1: 1.4}
    assert estimate(seconds) == estimate(seconds, bounds=None)


def test_equal_values_have_an_interval_without_width():
    found = estimate({0: 0.1, 1: 0.1, 2: 0.1})
    assert (found.sd, found.low, found.high) == (0, found.mean, found.mean)


def test_missing_values_are_left_out():
    values = {0: 0.2, 1: None, 2: math.nan, 3: 0.4, 4: math.inf}
    assert estimate(values) == estimate({0: 0.2, 3: 0.4})
    assert estimate({0: None, 1: math.nan}) is None
    assert estimate({}) is None


def test_seeds_of_every_kind_are_ordered():
    found = estimate({"b": 0.1, 10: 0.1, None: 0.1, 2: 0.1, "a": 0.1, 2.5: 0.1})
    assert list(found.values) == [None, 2, 2.5, 10, "a", "b"]


def test_worst_seed_depends_on_the_direction():
    found = estimate({0: 0.3, 1: 0.9, 2: 0.1, 3: 0.9, 4: 0.1})
    assert found.worst(lower_is_better=True) == (1, 0.9)
    assert found.worst(lower_is_better=False) == (2, 0.1)


def test_n_above_counts_values_above_the_limit_only():
    found = estimate({0: 0.5, 1: 0.51, 2: 0.2, 3: 1.0})
    assert found.n_above() == 2
    assert found.n_above(0.2) == 3
    assert found.n_above(1.0) == 0


@pytest.mark.parametrize(
    ("values", "split"),
    [([0.0, 1.0], True), ([0.5, 0.51], True), ([0.5, 0.2], False), ([0.6, 0.9], False)],
)
def test_split_means_that_some_seeds_are_above_half_and_some_are_not(values, split):
    assert estimate(by_seed(values)).is_split is split


def test_one_seed_is_never_split():
    assert not estimate({0: 0.9}).is_split
    assert not estimate({0: 0.1}).is_split


# --- compare_paired


def test_worked_example_of_a_comparison():
    # Differences 3, 1, -1 (in percent), sum 3. The sums of the 8 sign flips are 5 and -5 once
    # each, 3 and -3 twice each, 1 and -1 once each: 6 of 8 are at least 3 in size, p = 0.75.
    # The mean is 1, the sd 2, t(0.975, 2) = 4.303: 1 -+ 4.303 * 2 / sqrt(3) = 1 -+ 4.968.
    found = compare_paired({1: 0.33, 2: 0.21, 3: 0.10}, {1: 0.30, 2: 0.20, 3: 0.11})
    assert found.n == 3
    assert found.mean == pytest.approx(0.01)
    assert (found.low, found.high) == pytest.approx((-0.03968, 0.05968), abs=5e-6)
    assert found.p == 0.75
    assert found.smallest_p == 0.25
    assert found.exact


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=7))
@example([(0.9, 0.8), (0.3, 0.2), (0.0, 0.1)])  # equal differences, not so in floating point
@example([(0.5, 0.5), (0.7, 0.7)])
def test_p_is_the_share_of_all_sign_flips(pairs):
    a, b = zip(*pairs, strict=True)
    found = compare_paired(by_seed(a), by_seed(b))
    assert found.p == sign_flip_p([round(1000 * x) - round(1000 * y) for x, y in pairs])


def test_p_is_that_of_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.random(9), rng.random(9) - 0.1
    expected = stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert compare_paired(by_seed(a), by_seed(b)).p == pytest.approx(expected.pvalue, abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.dictionaries(st.integers(0, 30), st.tuples(rates, rates), min_size=1, max_size=16),
    st.integers(-3, 3),
)
def test_properties_of_a_comparison(pairs, shift):
    a = {seed: pair[0] for seed, pair in pairs.items()}
    b = {seed: pair[1] for seed, pair in pairs.items()}
    found = compare_paired(a, b)
    assert found.smallest_p <= found.p <= 1
    mirrored = compare_paired(b, a)
    assert mirrored.p == found.p
    assert mirrored.mean == -found.mean
    assert compare_paired(shuffled(a, 1), shuffled(b, 2)) == found
    moved = compare_paired(
        {seed: value + shift for seed, value in a.items()},
        {seed: value + shift for seed, value in b.items()},
    )
    assert moved.p == found.p
    assert moved.mean == pytest.approx(found.mean)
    if found.n > 1:
        assert found.low <= found.mean <= found.high
        assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_only_shared_seeds_with_two_values_count():
    a = {0: 0.9, 1: 0.8, 2: None, 3: 0.7, 4: 0.1}
    b = {0: 0.5, 1: 0.6, 2: 0.3, 3: math.nan, 5: 0.1}
    assert compare_paired(a, b) == compare_paired({0: 0.9, 1: 0.8}, {0: 0.5, 1: 0.6})
    assert compare_paired({0: 0.9}, {1: 0.9}) is None
    assert compare_paired({0: 0.9}, {0: None}) is None
    assert compare_paired({}, {}) is None


def test_pairing_removes_what_the_seeds_share():
    """The seeds differ by far more than the defenses, yet the difference is clear."""
    a = {seed: 0.1 * seed for seed in range(8)}
    b = {seed: 0.1 * seed + 0.01 + 0.001 * (seed % 2) for seed in range(8)}
    found = compare_paired(a, b)
    assert found.p == found.smallest_p == 2 / 2**8
    assert found.high < 0


def test_one_seed_decides_nothing():
    found = compare_paired({7: 0.9}, {7: 0.1})
    assert found == PairedComparison(1, pytest.approx(0.8), None, None, 1.0, 1.0)


@pytest.mark.parametrize("n", [2, 6, 20])
def test_equal_defenses_have_p_1(n):
    same = {seed: 0.1 * (seed % 7) for seed in range(n)}
    found = compare_paired(same, same)
    assert (found.p, found.mean, found.low, found.high) == (1, 0, 0, 0)


def test_rounding_error_is_no_difference():
    assert compare_paired(dict.fromkeys(range(8), 0.1 + 0.2), dict.fromkeys(range(8), 0.3)).p == 1


def test_interval_can_be_cut_to_the_range_of_differences():
    a, b = {0: 1.0, 1: 0.3}, {0: 0.0, 1: 0.3}
    assert compare_paired(a, b).high > 1
    assert compare_paired(a, b, bounds=(-1.0, 1.0)).high == 1
    assert compare_paired(a, b, bounds=(-1.0, 1.0)).low == -1


@pytest.mark.parametrize("n", range(1, MAX_EXACT_SEEDS + 1))
def test_smallest_p_is_reached_if_all_differences_have_one_sign(n):
    found = compare_paired(dict.fromkeys(range(n), 0.9), dict.fromkeys(range(n), 0.2))
    assert found.p == found.smallest_p == smallest_p(n) == 2 / 2**n
    assert found.exact


def test_many_seeds_are_tested_with_random_flips_and_this_is_said():
    n = MAX_EXACT_SEEDS + 1
    found = compare_paired(dict.fromkeys(range(n), 0.9), dict.fromkeys(range(n), 0.2))
    assert not found.exact
    assert found.smallest_p == 2 / (N_RANDOM_FLIPS + 1)
    # A fixed seed: the page must not change from call to call.
    rng = np.random.default_rng(0)
    a, b = by_seed(rng.random(20)), by_seed(rng.random(20) + 0.2)
    assert compare_paired(a, b) == compare_paired(a, b)
    # For 20 differences, the t-test is close to the sign-flip test.
    expected = stats.ttest_rel([*a.values()], [*b.values()]).pvalue
    assert compare_paired(a, b).p == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("p", "stars"),
    [(0.06, ""), (0.05, ""), (0.049, "*"), (0.01, "*"), (0.0099, "**"), (0.0009, "***"), (1, "")],
)
def test_stars_from_six_seeds_on(p, stars):
    found = compare_paired(dict.fromkeys(range(6), 0.9), dict.fromkeys(range(6), 0.2))
    assert found.stars == "*"  # 2 / 2**6 = 0.03125
    assert replace(found, p=p).stars == stars
    assert replace(found, p=p, n=5).stars == ""


def test_five_seeds_cannot_reach_a_star():
    assert smallest_p(5) > 0.05 > smallest_p(6)


# --- holm


def test_worked_example_of_holm():
    # Sorted: 0.01 * 3 = 0.03, 0.03 * 2 = 0.06, 0.04 * 1 = 0.04, raised to the 0.06 before it.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_holm_of_none_and_of_one():
    assert holm([]) == []
    assert holm([0.2]) == [0.2]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_holm_is_that_of_statsmodels(n):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    values = np.random.default_rng(n).random(n).round(1) / 10  # with ties
    assert holm(values.tolist()) == pytest.approx(multitest.multipletests(values, method="holm")[1])


@settings(derandomize=True, deadline=None)
@given(p_values)
def test_holm_rejects_step_by_step(values):
    """The smallest p is compared with alpha / m, the next with alpha / (m - 1), up to a failure."""
    alpha = 0.05 + 1e-7  # no product of a p-value and a whole number
    rejected = set()
    order = sorted(range(len(values)), key=values.__getitem__)
    for place, index in enumerate(order):
        if values[index] > alpha / (len(values) - place):
            break
        rejected.add(index)
    assert {index for index, p in enumerate(holm(values)) if p <= alpha} == rejected


@settings(derandomize=True, deadline=None)
@given(p_values)
def test_holm_keeps_the_order_and_never_lowers_a_p_value(values):
    corrected = holm(values)
    assert len(corrected) == len(values)
    assert all(raw <= new <= 1 for raw, new in zip(values, corrected, strict=True))
    pairs = sorted(zip(values, corrected, strict=True))
    assert [new for _, new in pairs] == sorted(corrected)


# --- whole_differences


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=8), st.integers(-6, 6))
def test_equal_differences_are_equal_whole_numbers(pairs, power):
    xs = [x * 10.0**power for x, _ in pairs]
    ys = [y * 10.0**power for _, y in pairs]
    found = whole_differences(xs, ys)
    exact = [round(1000 * x) - round(1000 * y) for x, y in pairs]
    for i, j in product(range(len(pairs)), repeat=2):
        assert (found[i] < found[j]) == (exact[i] < exact[j])
        assert (abs(found[i]) == abs(found[j])) == (abs(exact[i]) == abs(exact[j]))


def test_differences_of_extreme_values():
    assert whole_differences([], []) == []
    assert whole_differences([0.0], [0.0]) == [0]
    assert whole_differences([5e-324, 1e-300], [0.0, 0.0]) == [0, 1]
    assert whole_differences([1e12], [1e12 - 1]) == [1]
