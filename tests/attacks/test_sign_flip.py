"""sign_flip: an honest update times -scale."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from untargeted import (
    NOT_ABOVE_0,
    Make,
    assert_refused,
    dtypes,
    nearly_equal,
    sent_updates,
    view_of,
)

from fedbench.attack import ATTACKS
from fedbench.results.run_dir import Record

SignFlip: Any = ATTACKS.get("sign_flip")
vectors = hnp.arrays(
    np.float64, st.integers(1, 9), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)


def sent_for(update: Tensor, scale: float) -> Tensor:
    sent: Tensor = SignFlip(scale).craft(update, view_of(10, 2))
    return sent


def by_definition(update: Tensor, scale: float) -> list[float]:
    return [float(-Fraction(scale) * Fraction(value)) for value in update.double().tolist()]


def test_by_hand() -> None:
    # -2.5 * (1, -2, 0) = (-2.5, 5, 0)
    assert sent_for(torch.tensor([1.0, -2.0, 0.0]), 2.5).tolist() == [-2.5, 5, 0]
    # N = 10, M = 2, all updates (1, -2): the mean is (8 - 2 * scale) / 10 times (1, -2),
    # which is 0 for scale = 4 and changes sign above.
    update = torch.tensor([1.0, -2.0])
    for scale, mean in [(2.0, [0.4, -0.8]), (4.0, [0, 0]), (5.0, [-0.2, 0.4])]:
        rows = torch.stack([update] * 8 + [sent_for(update, scale)] * 2)
        assert rows.mean(dim=0).tolist() == pytest.approx(mean)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(vectors, st.floats(0.01, 1e6), dtypes)
def test_by_definition(values: np.ndarray, scale: float, dtype: torch.dtype) -> None:
    update = torch.tensor(values, dtype=dtype)
    sent = sent_for(update, scale)
    assert (sent.shape, sent.dtype) == (update.shape, dtype)
    rel = 2 * torch.finfo(dtype).eps
    expected = by_definition(update, scale)
    assert sent.double().tolist() == pytest.approx(expected, rel=rel, abs=1e-36)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(vectors, st.integers(-3, 10), dtypes)
def test_powers_of_two_are_exact(values: np.ndarray, power: int, dtype: torch.dtype) -> None:
    """They only change the exponent, so the reverse gives back the same bits."""
    update = torch.tensor(values, dtype=dtype)
    assert torch.equal(sent_for(update, 2.0**power) * -(2.0**-power), update)


def test_nearly_equal_updates_stay_apart() -> None:
    rows = nearly_equal(10, 500, seed=0)
    sent = torch.stack([sent_for(row, 3.0) for row in rows])
    for row, update in zip(sent, rows, strict=True):
        assert row.tolist() == pytest.approx(by_definition(update, 3.0), rel=2e-7)
    torch.testing.assert_close(torch.pdist(sent), 3 * torch.pdist(rows), rtol=1e-3, atol=0)


def test_each_client_sends_its_negated_update(federation: Make) -> None:
    attacked = sent_updates(federation, SignFlip(scale=4.0))
    assert torch.equal(attacked.sent, -4 * attacked.clean)
    assert not torch.equal(attacked.sent[0], attacked.sent[1])  # clients do not collude
    assert all(row.abs().max() > 0 for row in attacked.sent)


def test_every_client_malicious(federation: Make) -> None:
    attacked = sent_updates(federation, SignFlip(scale=2.0), pmr=1.0)
    assert len(attacked.sent) == 6
    assert attacked.sent.isfinite().all()
    assert torch.equal(attacked.sent, -2 * attacked.clean)


def test_ma_falls_above_the_bound(after_rounds: Callable[..., Record]) -> None:
    """M = 2 of N = 6: above scale (N - M) / M = 2 the model unlearns."""
    learning = after_rounds(ATTACKS.build({"name": "none"}))["MA"]
    held_back = after_rounds(SignFlip(scale=1.0))["MA"]
    unlearning = after_rounds(SignFlip(scale=5.0))["MA"]
    assert learning > 0.55
    assert unlearning < 0.2
    assert unlearning < held_back < learning


@pytest.mark.parametrize("scale", NOT_ABOVE_0)
def test_scale_out_of_range_is_refused(scale: float) -> None:
    assert_refused("sign_flip", "scale", scale)
