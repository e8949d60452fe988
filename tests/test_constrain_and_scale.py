"""constrain_and_scale: a loss that keeps near the global model, an update that replaces it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedbench.attack import ATTACKS, AttackView

ConstrainAndScale: Any = ATTACKS.get("constrain_and_scale")
floats = st.floats(-100, 100, width=32)


def view_of(
    global_params: Tensor, n_clients: int = 10, n_malicious: int = 2, server_lr: float = 1.0
) -> AttackView:
    rng = torch.Generator()
    return AttackView(0, global_params, {}, n_clients, n_malicious, server_lr, rng)


def test_by_hand() -> None:
    # |w - G| = |(3, 4)| = 5 with w in two tensors; 0.75 * 8 + 0.25 * 5 = 7.25
    params = [torch.tensor([[4.0]]), torch.tensor([6.0])]
    view = view_of(torch.tensor([1.0, 2.0]))
    assert ConstrainAndScale(alpha=0.75).objective(torch.tensor(8.0), params, view).item() == 7.25
    # gamma = 10 / (0.5 * 2) = 10
    sent = ConstrainAndScale().craft(
        torch.tensor([1.0, -2.0]), view_of(torch.zeros(2), server_lr=0.5)
    )
    assert sent.tolist() == [10, -20]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(3), st.integers(2, 9)), elements=floats),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_objective_and_its_gradient(rows: np.ndarray, alpha: float, dtype: torch.dtype) -> None:
    """For the loss c.w: the value, and alpha c + (1 - alpha) (w - G) / |w - G|."""
    local, anchor, slope = rows.tolist()
    distance = math.dist(local, anchor)
    assume(distance > 1e-3)
    whole = torch.tensor(local, dtype=dtype)
    params = [nn.Parameter(whole[:1].clone()), nn.Parameter(whole[1:].view(1, -1).clone())]
    loss = torch.cat([p.reshape(-1) for p in params]) @ torch.tensor(slope, dtype=dtype)
    view = view_of(torch.tensor(anchor, dtype=dtype))
    objective = ConstrainAndScale(alpha=alpha).objective(loss, params, view)
    objective.backward()

    task = math.fsum(c * w for c, w in zip(slope, local, strict=True))
    scale = sum(abs(c * w) for c, w in zip(slope, local, strict=True)) + distance
    assert objective.item() == pytest.approx(
        alpha * task + (1 - alpha) * distance, abs=1e-5 * scale
    )
    gradient = [g for p in params if p.grad is not None for g in p.grad.reshape(-1).tolist()]
    expected = [
        alpha * c + (1 - alpha) * (w - g) / distance
        for c, w, g in zip(slope, local, anchor, strict=True)
    ]
    assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_alpha_1_is_the_plain_loss() -> None:
    loss = torch.tensor(2.5, requires_grad=True)
    params = [nn.Parameter(torch.tensor([7.0]))]
    assert ConstrainAndScale(alpha=1).objective(loss, params, view_of(torch.zeros(1))) is loss


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_at_the_global_model_the_gradient_is_that_of_the_loss(alpha: float) -> None:
    """|w - G| has no gradient where a client starts; it counts as zero, not as NaN."""
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    loss = param @ torch.tensor([3.0, 5.0])
    ConstrainAndScale(alpha=alpha).objective(loss, [param], view_of(param.detach())).backward()
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([alpha * 3, alpha * 5])


def trained(alpha: float) -> tuple[float, float]:
    """A malicious model after training, from G: its task loss |w - t|^2 and its way |w - G|."""
    anchor, wanted = torch.zeros(4), torch.full((4,), 2.0)
    param = nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([param], lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        loss = (param - wanted).square().sum()
        ConstrainAndScale(alpha=alpha).objective(loss, [param], view_of(anchor)).backward()
        optimizer.step()
    return (param - wanted).square().sum().item(), param.detach().norm().item()


def test_a_lower_alpha_stays_nearer_and_learns_less() -> None:
    """Where alpha * 2 (|t| - d) = 1 - alpha, so at d = |t| - (1 - alpha) / (2 alpha); |t| = 4."""
    outcomes = [trained(alpha) for alpha in (1.0, 0.7, 0.3)]
    for alpha, (loss, distance) in zip((1.0, 0.7, 0.3), outcomes, strict=True):
        short = (1 - alpha) / (2 * alpha)
        assert distance == pytest.approx(4 - short, abs=0.01)
        assert loss == pytest.approx(short**2, abs=0.01)


def test_alpha_0_pulls_back_to_the_global_model() -> None:
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    loss = param.sum()
    ConstrainAndScale(alpha=0).objective(loss, [param], view_of(torch.zeros(2))).backward()
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])  # a step along -grad leads to G


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=floats),
    st.integers(0, 30),
    st.floats(0.01, 10),
    st.one_of(st.just("auto"), st.floats(0.01, 1000), st.integers(1, 100)),
)
def test_craft_scales_each_row(
    rows: np.ndarray, n_honest: int, server_lr: float, gamma: float | str
) -> None:
    m = len(rows)
    view = view_of(torch.zeros(rows.shape[1]), n_honest + m, m, server_lr)
    factor = (n_honest + m) / (server_lr * m) if isinstance(gamma, str) else gamma
    updates = torch.tensor(rows)
    sent = ConstrainAndScale(gamma=gamma).craft(updates, view)
    assert sent.shape == rows.shape
    assert torch.equal(updates, torch.tensor(rows))
    np.testing.assert_allclose(
        sent.numpy(), rows.astype(np.float64) * factor, rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be between 0 and 1, got {alpha}"):
        ConstrainAndScale(alpha=alpha)
