"""Ranks over settings, against scipy, scikit-posthocs, brute force and worked cases."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbench.report.rank_test import (
    _cliques,
    blocks_needed,
    compare_ranks,
    signed_rank_p,
    smallest_pair_p,
)
from fedbench.report.statistics import holm

tables = st.integers(3, 5).flatmap(
    lambda k: st.lists(
        st.lists(st.integers(0, 8).map(lambda n: n / 10), min_size=k, max_size=k),
        min_size=2,
        max_size=9,
    )
)


def as_blocks(rows, names="abcdefgh"):
    return {f"s{i}": dict(zip(names[: len(row)], row, strict=True)) for i, row in enumerate(rows)}


def ladder(n_blocks, names="abc"):
    """Blocks in which `a` is always best, then `b`, and so on; no two differences are equal."""
    return {
        f"s{i}": {name: 0.1 * j * (1 + 0.01 * i) for j, name in enumerate(names)}
        for i in range(n_blocks)
    }


def brute_force_p(differences):
    """Wilcoxon's test over all sign flips of the nonzero differences."""
    values = [d for d in differences if d != 0]
    if not values:
        return 1.0
    ranks = stats.rankdata(np.abs(values))
    center = ranks.sum() / 2
    observed = abs(sum(r for r, d in zip(ranks, values, strict=True) if d > 0) - center)
    distances = [
        abs(sum(r for r, up in zip(ranks, signs, strict=True) if up) - center)
        for signs in product((0, 1), repeat=len(values))
    ]
    return sum(d >= observed for d in distances) / len(distances)


# --- Wilcoxon's test


def test_worked_example_of_the_signed_rank_test():
    # |d| = 1, 1, 1, 2, 3, 4 without the zero: ranks 2, 2, 2, 4, 5, 6. The negative one has rank
    # sum 2. Rank sums of at most 2: {}, {2}, {2}, {2}: 4 of 64, twice for both sides: 0.125.
    assert signed_rank_p([1, 1, 2, -1, 0, 3, 4]) == 0.125


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(-6, 6), max_size=9))
@example([1, -1])
@example([0, 0, 0])
def test_signed_rank_test_counts_all_sign_flips(differences):
    found = signed_rank_p(differences)
    assert found == pytest.approx(brute_force_p(differences))
    assert found == signed_rank_p([-d for d in differences])
    assert found == signed_rank_p(sorted(differences))


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30, 50])
def test_signed_rank_test_is_that_of_scipy_without_ties(n):
    differences = np.random.default_rng(n).normal(0.3, 1, n)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank_p(differences.tolist()) == pytest.approx(expected)


def test_signed_rank_test_with_ties_is_scipys_permutation_test():
    differences = [1.0, 1, 2, -1, 3, 4, -2, 2, 5, 1]
    expected = stats.wilcoxon(differences, method=stats.PermutationMethod(n_resamples=2**10))
    assert signed_rank_p(differences) == pytest.approx(expected.pvalue)


def test_many_tied_settings_are_close_to_the_normal_approximation():
    differences = np.random.default_rng(0).integers(-4, 7, 200).tolist()
    expected = stats.wilcoxon(differences, method="asymptotic").pvalue
    assert signed_rank_p(differences) == pytest.approx(expected, abs=0.002)


# --- Ranks and Friedman's test


def test_worked_example_of_ranks():
    # BA, lower is better. s0: a 1, b 2, c 3; s1: a and b tie at 1.5, c 3; s2: b 1, a 2, c 3.
    blocks = as_blocks([[0.1, 0.2, 0.9], [0.0, 0.0, 0.8], [0.3, 0.2, 0.7]])
    found = compare_ranks(blocks, lower_is_better=True)
    assert found.names == ("a", "b", "c")
    assert found.mean_ranks == pytest.approx({"a": 1.5, "b": 1.5, "c": 3})
    assert found.n_blocks == 3
    # Rank sums 4.5, 4.5, 9: 12 / (3 * 3 * 4) * (20.25 + 20.25 + 81) - 3 * 3 * 4 = 4.5; the tie
    # correction divides by 1 - (2**3 - 2) / (3 * (3**3 - 3)) = 11 / 12: 4.909.
    assert found.statistic == pytest.approx(4.5 * 12 / 11)
    assert found.p == pytest.approx(math.exp(-4.5 * 12 / 11 / 2))  # chi-square with 2 degrees
    # Pairs: (a, b) -0.1, 0, 0.1: p = 1; (a, c) and (b, c) three of one sign: 2 / 8, times 3.
    assert found.pair_p == pytest.approx({("a", "b"): 1, ("a", "c"): 0.75, ("b", "c"): 0.75})
    assert found.cliques == (("a", "b", "c"),)
    assert found.dropped == ()


def test_higher_is_better_reverses_the_ranks():
    found = compare_ranks(ladder(4), lower_is_better=False)
    assert found.names == ("c", "b", "a")
    assert found.mean_ranks == {"c": 1, "b": 2, "a": 3}
    assert list(found.pair_p) == [("c", "b"), ("c", "a"), ("b", "a")]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(tables)
def test_ranks_and_p_values_by_definition(rows):
    found = compare_ranks(as_blocks(rows), lower_is_better=True)
    columns = dict(zip("abcdefgh"[: len(rows[0])], zip(*rows, strict=True), strict=True))
    ranks = np.mean([stats.rankdata(row) for row in rows], axis=0)
    assert found.mean_ranks == pytest.approx(dict(zip(columns, ranks, strict=True)))
    assert list(found.mean_ranks) == list(found.names)
    assert list(found.mean_ranks.values()) == sorted(found.mean_ranks.values())
    if any(len(set(row)) > 1 for row in rows):
        expected = stats.friedmanchisquare(*columns.values())
        assert (found.statistic, found.p) == pytest.approx(tuple(expected))
    else:
        assert (found.statistic, found.p) == (0, 1)
    pairs = list(combinations(found.names, 2))
    assert list(found.pair_p) == pairs
    tenths = {name: [round(10 * value) for value in values] for name, values in columns.items()}
    raw = [
        brute_force_p([x - y for x, y in zip(tenths[a], tenths[b], strict=True)]) for a, b in pairs
    ]
    assert list(found.pair_p.values()) == pytest.approx(holm(raw))
    assert min(found.pair_p.values()) >= found.smallest_p


@settings(derandomize=True, deadline=None, max_examples=40)
@given(tables, st.randoms(use_true_random=False))
def test_order_of_settings_and_defenses_does_not_matter(rows, rng: random.Random):
    blocks = as_blocks(rows)
    mixed = [(setting, rng.sample([*row.items()], len(row))) for setting, row in blocks.items()]
    rng.shuffle(mixed)
    found = compare_ranks({setting: dict(row) for setting, row in mixed}, lower_is_better=True)
    expected = compare_ranks(blocks, lower_is_better=True)
    assert found.names == expected.names
    assert found.cliques == expected.cliques
    assert found.pair_p == pytest.approx(expected.pair_p)
    assert found.p == pytest.approx(expected.p)


def test_pairs_are_those_of_scikit_posthocs():
    posthocs = pytest.importorskip("scikit_posthocs")
    values = np.random.default_rng(1).random((12, 4)) + np.array(
        [0, 0.3, 0.5, 2]
    )  # [settings, defenses]
    found = compare_ranks(as_blocks(values.tolist()), lower_is_better=True)
    expected = posthocs.posthoc_wilcoxon(values.T.tolist(), p_adjust="holm").to_numpy()
    for (a, b), p in found.pair_p.items():
        assert p == pytest.approx(expected["abcd".index(a), "abcd".index(b)])


def test_equal_values_everywhere_are_one_group():
    found = compare_ranks(as_blocks([[0.5] * 4] * 6), lower_is_better=True)
    assert (found.statistic, found.p) == (0, 1)
    assert set(found.mean_ranks.values()) == {2.5}
    assert set(found.pair_p.values()) == {1}
    assert found.cliques == (("a", "b", "c", "d"),)


def test_rounding_error_does_not_break_ties():
    found = compare_ranks(as_blocks([[0.1 + 0.2, 0.3, 0.5]] * 4), lower_is_better=True)
    assert found.mean_ranks == {"a": 1.5, "b": 1.5, "c": 3}
    assert found.pair_p["a", "b"] == 1


# --- What is told apart


def test_clear_order_over_many_settings_is_told_apart():
    found = compare_ranks(ladder(8), lower_is_better=True)
    assert found.p < 0.05
    assert set(found.pair_p.values()) == {3 * 2 / 2**8}
    assert found.cliques == ()
    assert found.differ("a", "b")
    assert found.differ("b", "a")


def test_too_few_settings_tell_nothing_apart_however_clear():
    found = compare_ranks(ladder(6), lower_is_better=True)
    assert found.p < 0.05  # Friedman's test sees it
    assert set(found.pair_p.values()) == {found.smallest_p} == {3 * 2 / 2**6}
    assert found.cliques == (("a", "b", "c"),)
    assert found.blocks_needed == 7


def test_no_pair_differs_unless_friedmans_test_does():
    found = compare_ranks(ladder(8), lower_is_better=True)
    assert not replace(found, p=0.05).differ("a", "c")
    # Over 8 settings, a always beats c, and d, e, f, g are noise around them: the pair's raw p is
    # small, Friedman's is not.
    rng = np.random.default_rng(0)
    blocks = {
        f"s{i}": {
            "a": 0.500 + i,
            "c": 0.501 + i,
            **dict(zip("defg", rng.random(4) + i, strict=True)),
        }
        for i in range(8)
    }
    found = compare_ranks(blocks, lower_is_better=True)
    assert found.p > 0.05
    assert found.cliques == (found.names,)
    assert not found.differ("a", "c")


def test_two_groups_over_many_settings():
    # a and b alternate, c and d alternate far behind: two bars.
    rows = [[0.1, 0.2, 0.8, 0.9] if i % 2 else [0.2, 0.1, 0.9, 0.8] for i in range(12)]
    found = compare_ranks(as_blocks(rows), lower_is_better=True)
    assert found.cliques == (("a", "b"), ("c", "d"))


@pytest.mark.parametrize(
    ("different", "cliques"),
    [
        ([], ["abcd"]),
        (["ad"], ["abc", "bcd"]),
        (["ac", "ad", "bd"], ["ab", "bc", "cd"]),
        (["ab", "ac", "ad"], ["bcd"]),
        (["ab", "bc", "cd"], []),  # a and c are not told apart but are not neighbors
        (["ab", "ac", "ad", "bc", "bd", "cd"], []),
        (["bc"], ["ab", "cd"]),
    ],
)
def test_cliques_are_the_longest_runs_of_neighbors(different, cliques):
    found = _cliques("abcd", lambda a, b: a + b in different)
    assert ["".join(clique) for clique in found] == cliques


@pytest.mark.parametrize(
    ("n_defenses", "needed"),
    [(3, 7), (4, 8), (5, 9), (6, 10), (8, 11), (10, 11), (15, 13), (20, 13)],
)
def test_blocks_needed(n_defenses, needed):
    assert blocks_needed(n_defenses) == needed
    assert smallest_pair_p(n_defenses, needed) < 0.05 <= smallest_pair_p(n_defenses, needed - 1)


def test_smallest_pair_p_is_at_most_1():
    # 3 pairs times 2 / 2**7; 45 pairs times 2 / 2**2 is above 1.
    assert smallest_pair_p(3, 7) == 6 / 128
    assert smallest_pair_p(10, 2) == 1


# --- What is left out


def test_too_few_defenses_or_settings():
    assert compare_ranks({}, True) is None
    assert compare_ranks(ladder(5, "ab"), True) is None
    assert compare_ranks(ladder(1), True) is None
    assert compare_ranks(ladder(2), True) is not None
    assert compare_ranks({"s0": {}, "s1": {"a": None}}, True) is None


def test_one_failed_run_drops_its_setting_only():
    blocks = ladder(5)
    blocks["s2"]["b"] = None
    found = compare_ranks(blocks, lower_is_better=True)
    assert found.n_blocks == 4
    assert found.names == ("a", "b", "c")
    assert found.dropped == ("s2: no value of b",)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_defense_without_the_metric_is_dropped(missing):
    """TPR of `median`, which judges no client."""
    blocks = {setting: {**row, "median": missing} for setting, row in ladder(5).items()}
    found = compare_ranks(blocks, lower_is_better=True)
    assert found.names == ("a", "b", "c")
    assert found.n_blocks == 5
    assert found.dropped == ("median: no value in any setting",)


def test_a_setting_without_the_metric_is_dropped():
    """TPR with `attack=none`."""
    found = compare_ranks({"none": dict.fromkeys("abc"), **ladder(4)}, lower_is_better=True)
    assert found.n_blocks == 4
    assert found.dropped == ("none: values of 0 of 3 defenses",)


def test_a_defense_that_was_rarely_run_does_not_drop_the_settings():
    blocks = ladder(5)
    blocks["s0"]["new"] = 0.1
    blocks["s1"]["new"] = 0.1
    found = compare_ranks(blocks, lower_is_better=True)
    assert found.names == ("a", "b", "c")
    assert found.n_blocks == 5
    assert found.dropped == ("new: values in 2 of 5 settings",)


def test_settings_with_a_single_defense_do_not_drop_the_others():
    """Variants of one defense, run in settings of their own."""
    extra = {f"x{i}": {"a": 0.1} for i in range(20)}
    found = compare_ranks({**extra, **ladder(4)}, lower_is_better=True)
    assert found.names == ("a", "b", "c")
    assert found.n_blocks == 4
    assert found.dropped[0] == "x0: values of 1 of 3 defenses"
    assert len(found.dropped) == 20
