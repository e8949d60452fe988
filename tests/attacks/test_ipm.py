"""ipm: all malicious clients send -epsilon times the mean of the honest updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from untargeted import (
    NOT_ABOVE_0,
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
from fedbench.results.run_dir import Record

IPM: Any = ATTACKS.get("ipm")


def by_definition(rows: Tensor, epsilon: float) -> list[float]:
    return [-epsilon * mean for mean, _ in columns_of(rows)]


def test_by_hand() -> None:
    # The mean of (1, 2) and (3, -6) is (2, -2); times -0.5 it is (-1, 1), sent by all three.
    honest = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    sent = IPM(epsilon=0.5).collude(torch.full((3, 2), 99.0), view_of(5, 3, honest))
    assert [row.tolist() for row in sent] == [[-1, 1]] * 3
    # Without omniscience: the mean of the malicious updates (99, 0) and (1, 4) is (50, 2).
    own = torch.tensor([[99.0, 0.0], [1.0, 4.0]])
    sent = IPM(epsilon=0.5, omniscient=False).collude(own, view_of(5, 2))
    assert [row.tolist() for row in sent] == [[-25, -1]] * 2


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    spreads,
    centers,
    st.floats(0.01, 100),
    st.integers(1, 10),
    dtypes,
    st.booleans(),
)
def test_by_definition(
    spread: np.ndarray,
    center: float,
    epsilon: float,
    n_others: int,
    dtype: torch.dtype,
    omniscient: bool,
) -> None:
    honest = torch.tensor(spread + center, dtype=dtype)
    sent = sent_by(IPM(epsilon=epsilon, omniscient=omniscient), honest, n_others)
    error = 8 * torch.finfo(dtype).eps * epsilon * float(honest.abs().max())
    expected = by_definition(honest, epsilon)
    assert sent.double().tolist() == pytest.approx(expected, rel=0, abs=error + 1e-36)


def test_nearly_equal_updates() -> None:
    honest = nearly_equal(30, 500, seed=0)
    sent = sent_by(IPM(epsilon=0.7), honest, 6)
    assert sent.tolist() == pytest.approx(by_definition(honest, 0.7), rel=1e-6, abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.05, 30))
def test_the_inner_product_with_the_honest_mean_is_negative_above_the_bound(
    n_honest: int, n_malicious: int, epsilon: float
) -> None:
    """The paper's theorem for averaging: ((N - M) |mean|^2 - epsilon M |mean|^2) / N."""
    honest = torch.randn(n_honest, 50, generator=torch.Generator().manual_seed(0)).double()
    sent = sent_by(IPM(epsilon=epsilon), honest, n_malicious)
    together = torch.cat([honest, sent.expand(n_malicious, -1)]).mean(dim=0)
    product = float(together @ honest.mean(dim=0) / honest.mean(dim=0).square().sum())
    n = n_honest + n_malicious
    assert product == pytest.approx((n_honest - epsilon * n_malicious) / n, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_in_a_round_it_uses_the_honest_updates(federation: Make, epsilon: float) -> None:
    attacked = sent_updates(federation, IPM(epsilon=epsilon))
    assert attacked.sent.shape == (2, 7850)
    expected = by_definition(attacked.honest, epsilon)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-9)


def test_without_omniscience_it_uses_the_malicious_clients_updates(federation: Make) -> None:
    attacked = sent_updates(federation, IPM(epsilon=2.0, omniscient=False))
    expected = by_definition(attacked.clean, 2.0)
    for row in attacked.sent:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-9)
    others = np.array(by_definition(attacked.honest, 2.0))
    assert np.abs(others - expected).max() > 1e-3


@pytest.mark.parametrize("omniscient", [True, False])
def test_every_client_malicious(federation: Make, omniscient: bool) -> None:
    attacked = sent_updates(federation, IPM(epsilon=2.0, omniscient=omniscient), pmr=1.0)
    assert len(attacked.honest) == 0
    expected = by_definition(attacked.clean, 2.0)
    for row in attacked.sent:
        assert row.isfinite().all()
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-9)


def test_at_the_bound_the_mean_update_is_zero(federation: Make) -> None:
    """M = 2 of N = 6 and epsilon = 2: 4 means - 2 * 2 means = 0."""
    attacked = sent_updates(federation, IPM(epsilon=2.0))
    rows = torch.cat([attacked.honest, attacked.sent]).double()
    assert rows.mean(dim=0).norm() < 1e-6 * attacked.honest.norm()


def test_ma_falls_above_the_bound(after_rounds: Callable[..., Record]) -> None:
    """The bound is epsilon = (N - M) / M = 2. Below it, the model learns more slowly."""
    learning = after_rounds(ATTACKS.build({"name": "none"}))["MA"]
    slowed = after_rounds(IPM(epsilon=0.5))["MA"]
    unlearning = after_rounds(IPM(epsilon=5.0))["MA"]
    assert min(learning, slowed) > 0.55
    assert unlearning < 0.3


@pytest.mark.parametrize("epsilon", NOT_ABOVE_0)
def test_epsilon_out_of_range_is_refused(epsilon: float) -> None:
    assert_refused("ipm", "epsilon", epsilon)
