"""Krum: the m clients closest to their N - f - 2 nearest neighbors, by squared distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, ServerView
from fedbench.testing import DefenseContract

Krum: Any = DEFENSES.get("krum")

shapes = st.tuples(st.integers(3, 10), st.integers(1, 4))
tolerated = st.one_of(st.none(), st.integers(0, 9))


def krum(updates: Tensor, f: int | None = None, m: int | str = 1) -> Aggregate:
    n, p = updates.shape
    zeros = torch.zeros(p)
    view = ServerView(0, torch.arange(n), zeros, zeros, {"w": slice(0, p)}, torch.Generator())
    outcome: Aggregate = Krum(f, m).aggregate(updates, None, view)[0]
    return outcome


def chosen_by(outcome: Aggregate) -> int:
    assert outcome.accepted is not None
    assert int(outcome.accepted.sum()) == 1
    return int(outcome.accepted.int().argmax())


def all_chosen_by(outcome: Aggregate) -> list[int]:
    assert outcome.accepted is not None
    return outcome.accepted.nonzero().flatten().tolist()


def largest_f(n: int) -> int:
    """Largest f with n > 2f + 2, the paper's condition."""
    return max(f for f in range(n) if 2 * f + 2 < n)


def scores_by_definition(rows: Sequence[Sequence[float]], f: int | None) -> list[float]:
    """Blanchard et al., section 3: the sum of |V_i - V_j|^2 over the n - f - 2 pairs i -> j.

    Without f, the largest f below (n - 2) / 2.
    """
    n = len(rows)
    if f is None:
        f = largest_f(n)
    scores = []
    for i in range(n):
        distances = [
            math.fsum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True))
            for j in range(n)
            if j != i
        ]
        scores.append(math.fsum(sorted(distances)[: n - f - 2]))
    return scores


def test_by_hand() -> None:
    # N = 5, f = 1: two neighbors each, at squared distances
    #    0: 1 + 9 = 10     1: 1 + 4 = 5     3: 4 + 9 = 13     10: 1 + 49 = 50     11: 1 + 64 = 65
    # With three neighbors (N - f - 1): 110, 86, 62, 131, 165, and the third would win.
    rows = torch.tensor([[0.0], [1.0], [3.0], [10.0], [11.0]])
    for outcome in (krum(rows), krum(rows, f=1)):
        assert outcome.scores is not None
        assert outcome.scores.tolist() == [10, 5, 13, 50, 65]
        assert outcome.update.tolist() == [1]
        assert outcome.weights.tolist() == [0, 1, 0, 0, 0]
        assert outcome.accepted is not None
        assert outcome.accepted.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(("n", "f"), [(3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (30, 13), (31, 14)])
def test_default_f_is_the_largest_in_the_paper(n: int, f: int) -> None:
    assert 2 * f + 2 < n <= 2 * (f + 1) + 2
    rows = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
    default, explicit = krum(rows).scores, krum(rows, f).scores
    assert default is not None
    assert explicit is not None
    assert torch.equal(default, explicit)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.int64, shapes, elements=st.integers(-3, 3)),
    tolerated,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_is_exact_on_integers(rows: np.ndarray, f: int | None, dtype: torch.dtype) -> None:
    """Nothing is rounded and many scores tie: the lowest index wins."""
    assume(f is None or len(rows) - f - 2 >= 1)
    outcome = krum(torch.tensor(rows, dtype=dtype), f)
    expected = scores_by_definition(rows.tolist(), f)
    assert outcome.scores is not None
    assert outcome.scores.tolist() == expected
    assert chosen_by(outcome) == expected.index(min(expected))
    assert outcome.update.tolist() == rows[expected.index(min(expected))].tolist()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, shapes, elements=st.floats(-1, 1, width=32)),
    st.floats(-1e4, 1e4, width=32),
    tolerated,
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition(
    spread: np.ndarray, center: float, f: int | None, dtype: torch.dtype
) -> None:
    """Including rows far from the origin, which differ in their last bits only."""
    assume(f is None or len(spread) - f - 2 >= 1)
    updates = torch.tensor(spread + center, dtype=dtype)
    rows = updates.double().tolist()
    outcome = krum(updates, f)
    expected = scores_by_definition(rows, f)
    assert outcome.scores is not None
    assert outcome.scores.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-11)
    chosen = chosen_by(outcome)
    assert expected[chosen] == pytest.approx(min(expected), rel=1e-9, abs=1e-11)
    assert torch.equal(outcome.update, updates[chosen])


@pytest.mark.parametrize("seed", range(30))
def test_takes_the_first_of_two_tied_clients(seed: int) -> None:
    """With one neighbor each, the two clients of the closest pair have the same score."""
    rows = torch.randn(10, 100, generator=torch.Generator().manual_seed(seed))
    expected = scores_by_definition(rows.double().tolist(), f=7)
    closest = sorted(range(10), key=expected.__getitem__)[:2]
    assert chosen_by(krum(rows, f=7)) == min(closest)


@pytest.mark.parametrize("relative", [1e-2, 1e-4, 1e-6])
def test_chooses_correctly_among_nearly_equal_clients(relative: float) -> None:
    """30 float32 clients; a float32 Gram matrix would choose a different one."""
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        common = torch.randn(400, generator=rng)
        rows = common * (1 + relative * torch.randn(30, 400, generator=rng))
        expected = scores_by_definition(rows.double().tolist(), None)
        outcome = krum(rows)
        assert outcome.scores is not None
        assert outcome.scores.tolist() == pytest.approx(expected, rel=1e-9)
        assert chosen_by(outcome) == expected.index(min(expected))


def poisoned(n: int, n_malicious: int, spread: float) -> Tensor:
    """Malicious rows first, around -4 with standard deviation `spread`; honest rows around 1."""
    rng = torch.Generator().manual_seed(n + n_malicious)
    rows = 1 + torch.randn(n, 100, generator=rng)
    rows[:n_malicious] = -4 + spread * torch.randn(n_malicious, 100, generator=rng)
    return rows


@pytest.mark.parametrize("spread", [1.0, 0.01])
@pytest.mark.parametrize(("n", "n_malicious"), [(10, 1), (10, 3), (30, 6), (30, 13)])
def test_rejects_a_minority(n: int, n_malicious: int, spread: float) -> None:
    outcome = krum(poisoned(n, n_malicious, spread))
    assert chosen_by(outcome) >= n_malicious
    assert outcome.scores is not None
    assert outcome.scores[:n_malicious].min() > outcome.scores[n_malicious:].max()


@pytest.mark.parametrize(("n", "n_malicious"), [(10, 5), (30, 15), (30, 20)])
def test_half_of_the_clients_win_if_they_collude(n: int, n_malicious: int) -> None:
    outcome = krum(poisoned(n, n_malicious, spread=0.01))
    assert chosen_by(outcome) < n_malicious


def test_rejects_scaled_outliers_of_any_norm() -> None:
    for scale in (10, 1e6, 1e30):
        rows = torch.randn(10, 20, generator=torch.Generator().manual_seed(1))
        rows[:3] *= scale
        assert chosen_by(krum(rows)) >= 3


@pytest.mark.parametrize(("n", "f"), [(1, None), (2, None), (3, 1), (10, 8), (10, 20)])
def test_rejects_too_few_clients(n: int, f: int | None) -> None:
    message = rf"krum needs N - f - 2 >= 1, got N={n}, f={f or 0}$"
    with pytest.raises(ValueError, match=message):
        Krum(f).check(n)
    with pytest.raises(ValueError, match=message):
        krum(torch.zeros(n, 2), f)


def test_one_neighbor_is_enough() -> None:
    Krum(f=7).check(10)
    assert krum(torch.eye(10), f=7).scores is not None


def test_rejects_negative_f() -> None:
    with pytest.raises(ValueError, match="f must be 0 or more, got -1"):
        Krum(f=-1)


def test_multi_krum_by_hand() -> None:
    # The rows above score 10, 5, 13, 50, 65. The best two are 1 and 0, the best three 1, 0, 3.
    rows = torch.tensor([[10.0], [3.0], [11.0], [1.0], [0.0]])
    for m, chosen, mean in [(1, [3], 1.0), (2, [3, 4], 0.5), (3, [1, 3, 4], 4 / 3)]:
        outcome = krum(rows, f=1, m=m)
        assert outcome.scores is not None
        assert outcome.scores.tolist() == [50, 13, 65, 5, 10]
        assert all_chosen_by(outcome) == chosen
        assert outcome.update.tolist() == pytest.approx([mean])
        share = [1 / m if i in chosen else 0 for i in range(5)]
        assert outcome.weights.tolist() == pytest.approx(share)
    # auto: N - f = 4. All five: their mean.
    for f in (None, 1):
        assert all_chosen_by(krum(rows, f, "auto")) == [0, 1, 3, 4]
        assert krum(rows, f, "auto").update.tolist() == [3.5]
        assert krum(rows, f, 5).update.tolist() == [5]


def test_multi_krum_takes_the_first_of_tied_clients() -> None:
    rows = torch.tensor([[0.0], [9.0], [0.0], [0.0], [0.0], [0.0]])
    for m, chosen in [(1, [0]), (2, [0, 2]), (4, [0, 2, 3, 4]), (6, list(range(6)))]:
        assert all_chosen_by(krum(rows, m=m)) == chosen
    same = torch.ones(40, 3)
    for m in (1, 7, 39):
        assert all_chosen_by(krum(same, m=m)) == list(range(m))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    hnp.arrays(np.int64, shapes, elements=st.integers(-3, 3)),
    tolerated,
    st.one_of(st.just("auto"), st.integers(1, 10)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_multi_krum_is_exact_on_integers(
    rows: np.ndarray, f: int | None, m: int | str, dtype: torch.dtype
) -> None:
    """Scores are exact and many of them tie, so the chosen clients are known for certain."""
    n = len(rows)
    assume(f is None or n - f - 2 >= 1)
    n_chosen = n - (largest_f(n) if f is None else f) if isinstance(m, str) else m
    assume(n_chosen <= n)
    outcome = krum(torch.tensor(rows, dtype=dtype), f, m)
    expected = scores_by_definition(rows.tolist(), f)
    assert outcome.scores is not None
    assert outcome.scores.tolist() == expected
    chosen = sorted(range(n), key=lambda i: (expected[i], i))[:n_chosen]
    assert all_chosen_by(outcome) == sorted(chosen)
    assert outcome.update.tolist() == pytest.approx(rows[chosen].mean(axis=0), rel=1e-6, abs=1e-6)
    share = [(i in chosen) / n_chosen for i in range(n)]
    assert outcome.weights.tolist() == pytest.approx(share)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float64, shapes, elements=st.floats(-1, 1, width=32)),
    st.floats(-1e4, 1e4, width=32),
    tolerated,
    st.integers(1, 10),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_multi_krum_against_the_definition(
    spread: np.ndarray, center: float, f: int | None, m: int, dtype: torch.dtype
) -> None:
    n = len(spread)
    assume((f is None or n - f - 2 >= 1) and m <= n)
    updates = torch.tensor(spread + center, dtype=dtype)
    expected = scores_by_definition(updates.double().tolist(), f)
    outcome = krum(updates, f, m)
    chosen = all_chosen_by(outcome)
    assert len(chosen) == m
    best = sorted(expected)[:m]
    assert sorted(expected[i] for i in chosen) == pytest.approx(best, rel=1e-9, abs=1e-11)
    mean = updates.double()[chosen].mean(dim=0)
    torch.testing.assert_close(outcome.update.double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("m", [1, 5, 15, "auto"])
def test_multi_krum_chooses_correctly_among_nearly_equal_clients(m: int | str) -> None:
    """Float32 rows that differ by 1e-4 of their norm, far from the origin."""
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        common = torch.randn(400, generator=rng)
        rows = common * (1 + 1e-4 * torch.randn(30, 400, generator=rng))
        expected = scores_by_definition(rows.double().tolist(), None)
        n_chosen = 30 - largest_f(30) if isinstance(m, str) else m
        best = sorted(range(30), key=expected.__getitem__)[:n_chosen]
        assert all_chosen_by(krum(rows, m=m)) == sorted(best)


@pytest.mark.parametrize("m", ["auto", 2, 5])
@pytest.mark.parametrize(("n", "n_malicious"), [(10, 1), (10, 3), (30, 6), (30, 13)])
def test_multi_krum_rejects_a_minority(n: int, n_malicious: int, m: int | str) -> None:
    outcome = krum(poisoned(n, n_malicious, spread=0.01), m=m)
    n_chosen = n - largest_f(n) if isinstance(m, str) else m
    chosen = all_chosen_by(outcome)
    assert len(chosen) == n_chosen
    assert min(chosen) >= n_malicious


def test_m_above_the_number_of_honest_clients_accepts_malicious_ones() -> None:
    rows = poisoned(10, 3, spread=0.01)
    assert min(all_chosen_by(krum(rows, m=7))) >= 3
    assert min(all_chosen_by(krum(rows, m=8))) < 3
    torch.testing.assert_close(krum(rows, m=10).update, rows.mean(dim=0))


@pytest.mark.parametrize(("n", "m"), [(3, 4), (5, 6), (10, 300)])
def test_rejects_m_above_the_number_of_clients(n: int, m: int) -> None:
    """The message names both values, and `check` raises it before training starts."""
    for attempt in (lambda: Krum(m=m).check(n), lambda: krum(torch.zeros(n, 2), m=m)):
        with pytest.raises(ValueError, match=rf"^krum needs .*\b{n}\b") as refused:
            attempt()
        assert f"m={m}" in str(refused.value)
    Krum(m=n).check(n)
    Krum(m="auto").check(n)


@pytest.mark.parametrize("m", [0, -1, -30, "best", "Auto", ""])
def test_rejects_m_out_of_range(m: int | str) -> None:
    with pytest.raises(ValueError, match=rf"^m must be .*auto.*, got .*{m}") as refused:
        Krum(m=m)
    assert "1" in str(refused.value).partition(", got")[0]  # the range


@pytest.mark.parametrize(("n", "f"), [(10, 4), (10, 5), (10, 7), (4, 1), (30, 14), (30, 27)])
def test_warns_of_f_beyond_the_paper(n: int, f: int) -> None:
    warning = Krum(f=f).warning(n)
    assert isinstance(warning, str)
    assert "\n" not in warning
    assert f"N={n}" in warning
    assert f"f={f}" in warning
    Krum(f=f).check(n)


@pytest.mark.parametrize(("n", "f"), [(3, 0), (4, 0), (5, 1), (10, 3), (30, 13), (31, 14)])
def test_does_not_warn_of_f_within_the_paper(n: int, f: int) -> None:
    assert Krum(f=f).warning(n) is None
    assert Krum(f=f + 1).warning(n) is not None


def test_never_warns_of_the_default_f() -> None:
    for m in (1, "auto"):
        assert [Krum(m=m).warning(n) for n in range(3, 200)] == [None] * 197


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = (
        {"name": "krum", "m": "auto"},
        {"name": "krum", "f": 0, "m": 3},
    )
    invalid: ClassVar[Any] = {"f": [-1, -20], "m": [0, -2, "best"]}
