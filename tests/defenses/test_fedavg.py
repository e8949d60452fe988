"""FedAvg: the plain mean, and the attack it does not stop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.attack import ATTACKS, AttackView
from fedbench.defense import DEFENSES, Aggregate, ServerView

FedAvg = DEFENSES.get("fedavg")
ConstrainAndScale: Any = ATTACKS.get("constrain_and_scale")
floats = st.floats(-1e6, 1e6, width=32)
shapes = st.tuples(st.integers(1, 10), st.integers(1, 3))


def fedavg(updates: Tensor) -> Aggregate:
    n, p = updates.shape
    zeros = torch.zeros(p)
    view = ServerView(0, torch.arange(n), zeros, zeros, {"w": slice(0, p)}, torch.Generator())
    return FedAvg().aggregate(updates, None, view)[0]


def test_by_hand() -> None:
    # (1 + 3 + 5) / 3 = 3 and (2 + 6 + 1) / 3 = 3
    outcome = fedavg(torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]]))
    assert outcome.update.tolist() == [3, 3]
    assert outcome.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert outcome.accepted is not None
    assert outcome.accepted.tolist() == [True] * 3
    assert outcome.scores is None


@settings(derandomize=True, deadline=None, max_examples=300)
@given(hnp.arrays(np.float64, shapes, elements=floats), st.sampled_from(["float32", "float64"]))
def test_against_exact_sums(rows: np.ndarray, dtype: str) -> None:
    """Elements are float32 numbers, so both dtypes represent them exactly."""
    update = fedavg(torch.tensor(rows, dtype=getattr(torch, dtype))).update.tolist()
    for column, found in zip(rows.T, update, strict=True):
        expected = math.fsum(column) / len(column)
        resolution = np.finfo(dtype)
        tolerance = len(column) * resolution.eps * np.abs(column).max() + resolution.tiny
        assert abs(found - expected) <= tolerance


def send(updates: Tensor, gamma: float | str, n_honest: int, server_lr: float) -> Tensor:
    """Change of the global model if all honest updates are zero."""
    n_malicious, p = updates.shape
    view = AttackView(
        index=0,
        global_params=torch.zeros(p),
        layers={},
        n_clients=n_honest + n_malicious,
        n_malicious=n_malicious,
        server_lr=server_lr,
        rng=torch.Generator(),
    )
    sent = ConstrainAndScale(gamma=gamma).craft(updates, view)
    return server_lr * fedavg(torch.cat([torch.zeros(n_honest, p), sent])).update


def test_a_scaled_update_replaces_the_model() -> None:
    # gamma = N / (server_lr M) = 8 / (0.5 * 1) = 16; all powers of two, so nothing is rounded.
    before = torch.tensor([1.0, -2.0, 0.5])
    malicious = torch.tensor([3.0, 7.0, -0.25])
    change = send((malicious - before)[None], "auto", n_honest=7, server_lr=0.5)
    assert torch.equal(before + change, malicious)


def test_an_unscaled_update_is_averaged_with_the_others() -> None:
    change = send(torch.tensor([[8.0, -16.0]]), 1.0, n_honest=7, server_lr=1.0)
    assert change.tolist() == [1, -2]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float32, shapes, elements=st.floats(-1e3, 1e3, width=32)),
    st.integers(0, 20),
    st.floats(0.01, 4),
)
def test_scaled_updates_replace_the_model_by_their_mean(
    rows: np.ndarray, n_honest: int, server_lr: float
) -> None:
    change = send(torch.tensor(rows), "auto", n_honest, server_lr)
    expected = torch.tensor(rows).double().mean(dim=0).float()
    tolerance = 1e-5 * float(np.abs(rows).max())
    torch.testing.assert_close(change, expected, rtol=0, atol=tolerance)
