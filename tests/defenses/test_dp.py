"""DP: clipping limits each client to S / N of the mean; noise is added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, ServerView
from fedbench.testing import DefenseContract

DP: Any = DEFENSES.get("dp")
HUGE = 1e30  # its square overflows float32

shapes = st.tuples(st.integers(1, 9), st.integers(1, 5))
usual = st.floats(-10, 10, width=32)
extreme = st.sampled_from([0.0, 1.0, -1.0, HUGE, -HUGE, 1e-30, 2.0**-126])
dtypes = st.sampled_from([torch.float32, torch.float64])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def dp(updates: Tensor, clip: float, noise: float = 0.0, seed: int = 0) -> Aggregate:
    n, p = updates.shape
    zeros = torch.zeros(p, dtype=updates.dtype)
    rng = torch.Generator().manual_seed(seed)
    view = ServerView(0, torch.arange(n), zeros, zeros, {"w": slice(0, p)}, rng)
    outcome: Aggregate = DP(clip=clip, noise=noise).aggregate(updates, None, view)[0]
    return outcome


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clipped_by_definition(row: Sequence[float], clip: float) -> list[float]:
    """u / max(1, |u| / S), without squares that could overflow."""
    length = math.hypot(*row)
    return [value / max(1.0, length / clip) for value in row]


def mean_by_definition(rows: Sequence[Sequence[float]], clip: float) -> list[float]:
    clipped = [clipped_by_definition(row, clip) for row in rows]
    return [math.fsum(column) / len(rows) for column in zip(*clipped, strict=True)]


def test_by_hand() -> None:
    # S = 5. |(6, 8)| = 10, so it is halved: (3, 4). |(-3, 4)| = 5 and |(0, 1)| = 1 are unchanged.
    # The mean is (3 - 3 + 0, 4 + 4 + 1) / 3 = (0, 3).
    rows = torch.tensor([[6.0, 8.0], [-3.0, 4.0], [0.0, 1.0]])
    outcome = dp(rows, clip=5)
    assert outcome.update.tolist() == pytest.approx([0, 3], abs=1e-6)
    assert outcome.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert outcome.accepted is None  # it does not judge clients
    assert outcome.scores is None
    # S = 1: (.6, .8), (-.6, .8), (0, 1), mean (0, 2.6 / 3).
    assert dp(rows, clip=1).update.tolist() == pytest.approx([0, 2.6 / 3], abs=1e-6)
    # S = 100 clips no update: (3, 13) / 3.
    assert dp(rows, clip=100).update.tolist() == pytest.approx([1, 13 / 3])


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    hnp.arrays(np.float64, shapes, elements=st.one_of(usual, extreme)),
    st.sampled_from([1e-3, 0.5, 1.0, 7.0, 1e3]),
    dtypes,
)
def test_without_noise_against_the_definition(
    rows: np.ndarray, clip: float, dtype: torch.dtype
) -> None:
    updates = torch.tensor(rows, dtype=dtype)
    outcome = dp(updates, clip)
    expected = mean_by_definition(updates.double().tolist(), clip)
    largest = min(clip, float(updates.double().abs().max()))
    tolerance = 4 * torch.finfo(dtype).eps * largest + torch.finfo(dtype).tiny
    assert outcome.update.dtype == dtype
    assert outcome.update.tolist() == pytest.approx(expected, rel=0, abs=tolerance)
    assert outcome.weights.tolist() == pytest.approx([1 / len(rows)] * len(rows))
    assert float(outcome.update.double().norm()) <= clip * (1 + 1e-6)


@both_dtypes
@pytest.mark.parametrize("length", [2.0, 1e3, 1e19, 1e30, 1e38])
def test_an_update_of_any_norm_contributes_at_most_s_over_n(
    length: float, dtype: torch.dtype
) -> None:
    """Beyond S only the direction counts. The squares of the last two overflow float32."""
    honest = 0.01 * randn(9, 40).to(dtype)
    direction = randn(40, seed=1).double()
    direction /= direction.norm()
    attack = (length * direction).to(dtype)
    assert attack.isfinite().all()
    with_it = dp(torch.cat([honest, attack[None]]), clip=1).update.double()
    without = honest.double().sum(dim=0) / 10
    torch.testing.assert_close(with_it - without, direction / 10, rtol=1e-5, atol=1e-8)


@both_dtypes
def test_short_updates_are_unchanged(dtype: torch.dtype) -> None:
    row = randn(1, 100).to(dtype)
    just_above = float(row.double().norm()) * (1 + 1e-6)
    for n in (1, 2):
        update = dp(row.expand(n, -1).clone(), clip=just_above).update
        assert torch.equal(update, row[0])
    rows = randn(7, 100).to(dtype)
    longest = float(rows.double().norm(dim=1).max())
    mean = rows.double().mean(dim=0).to(dtype)
    torch.testing.assert_close(dp(rows, clip=longest * (1 + 1e-6)).update, mean)
    for scale in (1e-10, 1e-30):
        assert torch.equal(dp(row * scale, clip=1).update, row[0] * scale)


def test_zero_stays_zero() -> None:
    assert dp(torch.zeros(5, 3), clip=1).update.tolist() == [0, 0, 0]
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert dp(rows, clip=1).update.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("ratio", [0.999999, 1.0, 1.000001])
def test_at_the_bound(ratio: float) -> None:
    row = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    clipped = dp(row, clip=5 * ratio).update
    assert clipped.tolist() == pytest.approx([3 * min(ratio, 1), 4 * min(ratio, 1)], rel=1e-12)


@pytest.mark.parametrize("n_params", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_the_norm_covers_all_parameters(n_params: int) -> None:
    """Float32 rows that differ by 1e-4, with P around the width of a chunk."""
    rows = randn(n_params) * (1 + 1e-4 * randn(4, n_params, seed=1))
    update = dp(rows, clip=2).update.double().numpy()
    exact = rows.double().numpy()
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    np.testing.assert_allclose(update, (exact * 2 / lengths).mean(axis=0), rtol=2e-6, atol=1e-12)


@both_dtypes
@pytest.mark.parametrize("sigma", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("n", [1, 10])
def test_noise_has_the_configured_standard_deviation(
    n: int, sigma: float, dtype: torch.dtype
) -> None:
    """N(0, sigma^2) on each coordinate, whatever the updates, N and S."""
    n_params = 100_000
    rows = 0.1 * randn(n, n_params).to(dtype)
    for clip in (0.2, 20.0):
        exact, noisy = dp(rows, clip).update, dp(rows, clip, sigma).update
        noise = (noisy.double() - exact.double()) / sigma
        assert noisy.dtype == dtype
        assert float(noise.mean()) == pytest.approx(0, abs=5 / math.sqrt(n_params))
        assert float(noise.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * n_params))
        beyond = float((noise.abs() > 2).double().mean())
        assert beyond == pytest.approx(math.erfc(math.sqrt(2)), abs=0.004)  # 4.55 % of a Gaussian
        halves = torch.stack(noise.split(n_params // 2))
        assert abs(float(halves.prod(dim=0).mean())) < 0.03  # no draw is used twice


def test_noise_depends_on_the_seed_only() -> None:
    rows = randn(5, 50)
    first = dp(rows, clip=1, noise=0.1, seed=3).update
    assert torch.equal(dp(rows, clip=1, noise=0.1, seed=3).update, first)
    other = dp(rows, clip=1, noise=0.1, seed=4).update
    assert ((first - other).abs() > 1e-6).float().mean() > 0.9
    for seed in (3, 4):
        assert torch.equal(dp(rows, clip=1, seed=seed).update, dp(rows, clip=1).update)


def test_clipping_undoes_model_replacement() -> None:
    """Model replacement scales an update by N; clipped, it counts as much as any other."""
    honest = 0.1 * randn(29, 100)
    clip = float(honest.norm(dim=1).median())
    backdoor = randn(100, seed=1)
    backdoor *= clip / backdoor.norm()
    rows = torch.cat([honest, 30 * backdoor[None]])
    undefended = float(rows.mean(dim=0) @ backdoor / backdoor.norm() ** 2)
    defended = float(dp(rows, clip).update @ backdoor / backdoor.norm() ** 2)
    assert undefended == pytest.approx(1, abs=0.1)
    assert defended == pytest.approx(1 / 30, abs=0.1)


@pytest.mark.parametrize(
    ("clip", "noise", "field", "value"),
    [
        (0.0, 0.1, "clip", "0.0"),
        (-1.5, 0.1, "clip", "-1.5"),
        (math.nan, 0.1, "clip", "nan"),
        (math.inf, 0.1, "clip", "inf"),
        (1.0, -0.25, "noise", "-0.25"),
        (1.0, math.nan, "noise", "nan"),
        (1.0, math.inf, "noise", "inf"),
    ],
)
def test_rejects_settings_out_of_range(clip: float, noise: float, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be .+, got {value}$"):
        DP(clip=clip, noise=noise)


def test_accepts_zero_noise() -> None:
    assert DP(clip=1e-6, noise=0.0).noise == 0


class TestContract(DefenseContract):
    """With settings that change the computation or the state."""

    plugins = ({"name": "dp", "clip": 1e-6, "noise": 0.0},)
    invalid: ClassVar[Any] = {
        "clip": [0.0, -1.0, math.nan, math.inf, -math.inf],
        "noise": [-0.1, math.nan, math.inf, -math.inf],
    }
