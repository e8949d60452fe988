"""alie: mean - z * std of the honest updates, with the largest z that a majority supports."""

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
    centers,
    columns_of,
    dtypes,
    nearly_equal,
    sent_by,
    sent_updates,
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

    s is at least 1; z is 0 if no other honest client is left.
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
    # First coordinate: 1, 2, 3, 4, 5 have mean 3 and variance 10 / 4: 3 - 0.2533 * 1.5811 = 2.5994.
    # Second coordinate: all are 7, so the malicious value is 7.
    honest = torch.tensor([[1.0, 7.0], [5.0, 7.0], [3.0, 7.0], [2.0, 7.0], [4.0, 7.0]])
    sent = ALIE().collude(torch.full((3, 2), -99.0), view_of(8, 3, honest))
    assert len(sent) == 3
    for row in sent:
        assert row.tolist() == pytest.approx([2.5994, 7], abs=1e-4)
    # z = -2 as a setting: 3 + 2 * 1.5811
    for row in ALIE(z=-2).collude(torch.zeros(3, 2), view_of(8, 3, honest)):
        assert row.tolist() == pytest.approx([6.1623, 7], abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 10, 11, 15, 30, 31, 50, 51, 100])
def test_auto_z_is_the_largest_that_a_majority_supports(n: int) -> None:
    """With mean 0 and std 1, the malicious update is -z."""
    for m in range(1, n):
        honest = torch.zeros(n - m, 1, dtype=torch.float64)
        if n - m == 1:
            assert sent_by(ALIE(), honest, m).tolist() == [0]  # no client is left to support it
            continue
        honest[1] = math.sqrt((n - m - 1) / 2)
        honest[0] = -honest[1]
        assert honest.std().item() == pytest.approx(1)
        z = -sent_by(ALIE(), honest, m).item()
        assert z == pytest.approx(largest_z(n, m), abs=1e-9)
        if 2 * m > n:  # a majority without supporters: z as if it needed one
            assert stats.norm.cdf(z) == pytest.approx(1 - 1 / (n - m))


@pytest.mark.parametrize(("n", "m"), [(30, 6), (30, 13), (50, 12), (50, 24), (51, 5)])
def test_honest_clients_further_from_the_mean_complete_a_majority(n: int, m: int) -> None:
    """On average over coordinates there are floor(n / 2) + 1 - m of them."""
    honest = torch.randn(n - m, 20_000, generator=torch.Generator().manual_seed(n))
    supporters = (honest < sent_by(ALIE(), honest, m)).sum(dim=0).double().mean().item()
    assert supporters == pytest.approx(n // 2 + 1 - m, abs=0.25)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    spreads,
    centers,
    st.one_of(st.just("auto"), st.floats(-5, 5), st.integers(-3, 3)),
    st.integers(1, 10),
    dtypes,
    st.booleans(),
)
def test_by_definition(
    spread: np.ndarray,
    center: float,
    z: float | str,
    n_others: int,
    dtype: torch.dtype,
    omniscient: bool,
) -> None:
    honest = torch.tensor(spread + center, dtype=dtype)
    sent = sent_by(ALIE(omniscient=omniscient, z=z), honest, n_others)
    n_malicious = n_others if omniscient else len(honest)
    auto = largest_z(len(honest) + n_others, n_malicious)
    deviations = auto if isinstance(z, str) else z
    error = 16 * torch.finfo(dtype).eps * (1 + abs(deviations)) * float(honest.abs().max())
    expected = by_definition(honest, deviations)
    assert sent.double().tolist() == pytest.approx(expected, rel=0, abs=error + 1e-36)


@pytest.mark.parametrize("z", ["auto", 1.5, -3])
def test_nearly_equal_updates(z: float | str) -> None:
    """The distance from the mean, 1e-4 of the row, is right to 1%, with ddof 1 and not 0."""
    honest = nearly_equal(17, 500, seed=1)
    deviations = largest_z(30, 13) if isinstance(z, str) else z
    sent = np.array(sent_by(ALIE(z=z), honest, 13).tolist())
    mean, expected = (np.array(by_definition(honest, value)) for value in (0.0, deviations))
    assert np.linalg.norm(sent - expected) < 0.01 * np.linalg.norm(expected - mean)


def test_in_a_round_it_uses_the_honest_updates(federation: Make) -> None:
    """N = 6 and M = 3: s = 1, z = Phi^-1(2 / 3)."""
    attacked = sent_updates(federation, ALIE(), pmr=0.5)
    expected = by_definition(attacked.honest, 0.4307272992954576)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-8)


def test_without_omniscience_it_uses_the_malicious_clients_updates(federation: Make) -> None:
    """z is the same, because the number of clients is public."""
    attacked = sent_updates(federation, ALIE(omniscient=False), pmr=0.5)
    expected = by_definition(attacked.clean, 0.4307272992954576)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-8)
    others = np.array(by_definition(attacked.honest, 0.4307272992954576))
    assert np.abs(others - expected).max() > 1e-3


def test_a_single_client_without_omniscience_sends_its_honest_update(federation: Make) -> None:
    attacked = sent_updates(federation, ALIE(z=3, omniscient=False), pmr=0.17)
    assert len(attacked.sent) == 1
    assert torch.equal(attacked.sent, attacked.clean)


@pytest.mark.parametrize("omniscient", [True, False])
@pytest.mark.parametrize(("z", "deviations"), [("auto", 0), (1.5, 1.5)])
def test_every_client_malicious(
    federation: Make, omniscient: bool, z: float | str, deviations: float
) -> None:
    """The attack uses their own updates, and auto z is 0."""
    attacked = sent_updates(federation, ALIE(omniscient=omniscient, z=z), pmr=1.0)
    assert len(attacked.sent) == 6
    expected = by_definition(attacked.clean, deviations)
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


def test_krum_selects_an_update_near_the_mean() -> None:
    """The paper's claim: it is closer to its neighbors than any honest update."""
    honest = torch.randn(24, 500, generator=torch.Generator().manual_seed(2))
    for z, fooled in (("auto", True), (0.5, True), (5.0, False)):
        sent = sent_by(ALIE(z=z), honest, 6)
        # Make the malicious rows differ: distances of 0 between them would win by themselves.
        rows = torch.cat([honest, sent + 0.01 * torch.arange(6)[:, None]])
        assert (chosen_by_krum(rows) >= 24) is fooled


def test_ma_falls_with_z(after_rounds: Callable[..., Record]) -> None:
    assert after_rounds(ALIE(z=0))["MA"] > 0.55  # malicious clients send the honest mean
    assert after_rounds(ALIE(z=5))["MA"] < 0.4


@pytest.mark.parametrize(
    "z", ["best", "Auto", "", "1.5", float("nan"), float("inf"), float("-inf")]
)
def test_z_out_of_range_is_refused(z: float | str) -> None:
    assert_refused("alie", "z", z)


def test_omniscient_must_be_a_bool() -> None:
    with pytest.raises(UserError, match="omniscient=perhaps") as refused:
        ATTACKS.build({"name": "alie", "omniscient": "perhaps"})
    assert "\n" not in str(refused.value)
