"""alie: mean - z * std of the honest updates, z as large as a majority supports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from untargeted import (
    Make,
    assert_refused,
    centres,
    columns_of,
    dtypes,
    exchange,
    nearly_equal,
    sent_by,
    spreads,
    view_of,
)

from fedbench.attack import ATTACKS
from fedbench.defense import DEFENSES, ServerView
from fedbench.errors import UserError
from fedbench.results.run_dir import Record

ALIE: Any = ATTACKS.get("alie")


def largest_z(n: int, m: int) -> float:
    """Baruch et al.: Phi(z) = (n - m - s) / (n - m), s = floor(n / 2 + 1) - m.

    At least one supporter; 0 where that leaves nobody, and so no z.
    """
    s = max(n // 2 + 1 - m, 1)
    return float(stats.norm.ppf((n - m - s) / (n - m))) if n - m > s else 0.0


def by_definition(rows: Tensor, z: float) -> list[float]:
    expected = []
    for mean, column in columns_of(rows):
        squares = math.fsum((value - mean) ** 2 for value in column)
        std = math.sqrt(squares / (len(column) - 1)) if len(column) > 1 else 0.0
        expected.append(mean - z * std)
    return expected


def test_by_hand() -> None:
    # N = 8, M = 3: s = 5 - 3 = 2 supporters, Phi(z) = (5 - 2) / 5 = 0.6, z = 0.2533.
    # Of 1, 2, 3, 4, 5 the mean is 3 and the variance 10 / 4: 3 - 0.2533 * 1.5811 = 2.5994.
    # Where all say 7, so do the malicious.
    known = torch.tensor([[1.0, 7.0], [5.0, 7.0], [3.0, 7.0], [2.0, 7.0], [4.0, 7.0]])
    sent = ALIE().collude(torch.full((3, 2), -99.0), view_of(8, 3, known))
    assert len(sent) == 3
    for row in sent:
        assert row.tolist() == pytest.approx([2.5994, 7], abs=1e-4)
    # z = -2 by choice: 3 + 2 * 1.5811
    for row in ALIE(z=-2).collude(torch.zeros(3, 2), view_of(8, 3, known)):
        assert row.tolist() == pytest.approx([6.1623, 7], abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 10, 11, 15, 30, 31, 50, 51, 100])
def test_z_is_the_largest_that_is_supported(n: int) -> None:
    """Read off what is sent when mean and std are 0 and 1."""
    for m in range(1, n):
        known = torch.zeros(n - m, 1, dtype=torch.float64)
        if n - m == 1:
            assert sent_by(ALIE(), known, m).tolist() == [0]  # nobody could support it
            continue
        known[1] = math.sqrt((n - m - 1) / 2)
        known[0] = -known[1]
        assert known.std().item() == pytest.approx(1)
        z = -sent_by(ALIE(), known, m).item()
        assert z == pytest.approx(largest_z(n, m), abs=1e-9)
        if 2 * m > n:  # a majority by itself: as if one honest client were needed
            assert stats.norm.cdf(z) == pytest.approx(1 - 1 / (n - m))


@pytest.mark.parametrize(("n", "m"), [(30, 6), (30, 13), (50, 12), (50, 24), (51, 5)])
def test_as_many_honest_clients_stand_further_out_as_are_needed(n: int, m: int) -> None:
    """On average over coordinates: floor(n / 2) + 1 - m, who with the m are a majority."""
    known = torch.randn(n - m, 20_000, generator=torch.Generator().manual_seed(n))
    supporters = (known < sent_by(ALIE(), known, m)).sum(dim=0).double().mean().item()
    assert supporters == pytest.approx(n // 2 + 1 - m, abs=0.25)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    spreads,
    centres,
    st.one_of(st.just("auto"), st.floats(-5, 5), st.integers(-3, 3)),
    st.integers(1, 10),
    dtypes,
    st.booleans(),
)
def test_by_definition(
    spread: np.ndarray,
    centre: float,
    z: float | str,
    n_others: int,
    dtype: torch.dtype,
    omniscient: bool,
) -> None:
    known = torch.tensor(spread + centre, dtype=dtype)
    sent = sent_by(ALIE(omniscient=omniscient, z=z), known, n_others)
    n_malicious = n_others if omniscient else len(known)
    auto = largest_z(len(known) + n_others, n_malicious)
    deviations = auto if isinstance(z, str) else z
    error = 16 * torch.finfo(dtype).eps * (1 + abs(deviations)) * float(known.abs().max())
    expected = by_definition(known, deviations)
    assert sent.double().tolist() == pytest.approx(expected, rel=0, abs=error + 1e-36)


@pytest.mark.parametrize("z", ["auto", 1.5, -3])
def test_nearly_equal_updates(z: float | str) -> None:
    """The way from the mean, itself of 1e-4 of the row, is right to 1%: sample std, not of all."""
    known = nearly_equal(17, 500, seed=1)
    deviations = largest_z(30, 13) if isinstance(z, str) else z
    sent = np.array(sent_by(ALIE(z=z), known, 13).tolist())
    mean, expected = (np.array(by_definition(known, value)) for value in (0.0, deviations))
    assert np.linalg.norm(sent - expected) < 0.01 * np.linalg.norm(expected - mean)


def test_what_is_sent_is_of_the_honest_rows_of_the_round(federation: Make) -> None:
    """N = 6 and M = 3: s = 1, z = Phi^-1(2 / 3)."""
    attacked = exchange(federation, ALIE(), pmr=0.5)
    expected = by_definition(attacked.honest, 0.4307272992954576)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-8)


def test_without_omniscience_it_is_of_ones_own_rows(federation: Make) -> None:
    """With the same z: the number of clients is public."""
    attacked = exchange(federation, ALIE(omniscient=False), pmr=0.5)
    expected = by_definition(attacked.own, 0.4307272992954576)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-8)
    others = np.array(by_definition(attacked.honest, 0.4307272992954576))
    assert np.abs(others - expected).max() > 1e-3


def test_a_single_client_that_knows_itself_alone_is_honest(federation: Make) -> None:
    attacked = exchange(federation, ALIE(z=3, omniscient=False), pmr=0.17)
    assert len(attacked.sent) == 1
    assert torch.equal(attacked.sent, attacked.own)


@pytest.mark.parametrize("omniscient", [True, False])
@pytest.mark.parametrize(("z", "deviations"), [("auto", 0), (1.5, 1.5)])
def test_every_client_malicious(
    federation: Make, omniscient: bool, z: float | str, deviations: float
) -> None:
    """Their own rows are what they know; nobody's support is needed."""
    attacked = exchange(federation, ALIE(omniscient=omniscient, z=z), pmr=1.0)
    assert len(attacked.sent) == 6
    expected = by_definition(attacked.own, deviations)
    for row in attacked.sent:
        assert row.isfinite().all()
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-8)


def chosen_by_krum(rows: Tensor) -> int:
    n, p = rows.shape
    zeros = torch.zeros(p)
    view = ServerView(0, torch.arange(n), zeros, zeros, {}, torch.Generator())
    accepted = DEFENSES.build({"name": "krum"}).aggregate(rows, None, view)[0].accepted
    assert accepted is not None
    return int(accepted.int().argmax())


def test_krum_takes_what_is_a_little_off_the_mean() -> None:
    """The paper's claim: no honest client is as near to its neighbours."""
    honest = torch.randn(24, 500, generator=torch.Generator().manual_seed(2))
    for z, fooled in (("auto", True), (0.5, True), (5.0, False)):
        sent = sent_by(ALIE(z=z), honest, 6)
        # Not identical, so that it is not their distance of 0 that wins.
        rows = torch.cat([honest, sent + 0.01 * torch.arange(6)[:, None]])
        assert (chosen_by_krum(rows) >= 24) is fooled


def test_the_accuracy_falls_with_z(after_rounds: Callable[..., Record]) -> None:
    assert after_rounds(ALIE(z=0))["MA"] > 0.55  # all send the honest mean
    assert after_rounds(ALIE(z=5))["MA"] < 0.4


@pytest.mark.parametrize(
    "z", ["best", "Auto", "", "1.5", float("nan"), float("inf"), float("-inf")]
)
def test_a_z_out_of_range_is_refused(z: float | str) -> None:
    assert_refused("alie", "z", z)


def test_omniscience_is_yes_or_no() -> None:
    with pytest.raises(UserError, match="omniscient=perhaps") as refused:
        ATTACKS.build({"name": "alie", "omniscient": "perhaps"})
    assert "\n" not in str(refused.value)
