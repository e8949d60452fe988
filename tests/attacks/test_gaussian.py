"""gaussian: clients send N(0, std^2) noise without training, independently in each round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from untargeted import (
    NOT_ABOVE_0,
    Make,
    assert_refused,
    dtypes,
    sent_updates,
    view_of,
)

from fedbench.attack import ATTACKS
from fedbench.defense import DEFENSES
from fedbench.engine.client_runner import ClientRunner
from fedbench.results.run_dir import Record

Gaussian: Any = ATTACKS.get("gaussian")


def noise(p: int, std: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    sent: Tensor = Gaussian(std).craft(torch.zeros(p, dtype=dtype), view_of(10, 2, seed=seed))
    return sent


def assert_unrelated(a: Tensor, b: Tensor) -> None:
    """The correlation is within five standard deviations of that of independent draws."""
    assert abs(np.corrcoef(a.numpy(), b.numpy())[0, 1]) < 5 / math.sqrt(len(a))


def test_by_hand() -> None:
    # The generator draws standard normal (d_1, d_2, d_3); std = 4 gives 4 d_i. The update passed in
    # does not matter.
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(7))
    view = view_of(10, 2, seed=7)
    sent = Gaussian(std=4.0).craft(torch.tensor([1e6, -5.0, torch.nan]), view)
    assert sent.tolist() == [4 * d for d in drawn.tolist()]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 300), st.floats(1e-6, 1e6), st.integers(0, 1000), dtypes)
def test_std_scales_the_same_draws(p: int, std: float, seed: int, dtype: torch.dtype) -> None:
    sent, unit = noise(p, std, seed, dtype), noise(p, 1.0, seed, dtype)
    assert (sent.shape, sent.dtype) == ((p,), dtype)
    expected = [std * value for value in unit.double().tolist()]
    rel = 2 * torch.finfo(dtype).eps
    assert sent.double().tolist() == pytest.approx(expected, rel=rel, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("std", [0.01, 1.0, 30.0])
def test_coordinates_are_normal_and_independent(std: float, dtype: torch.dtype) -> None:
    p = 200_000
    sent = noise(p, std, seed=3, dtype=dtype).double() / std
    assert abs(sent.mean()) < 5 / math.sqrt(p)
    assert abs(sent.square().mean() - 1) < 5 * math.sqrt(2 / p)
    assert stats.kstest(sent.numpy(), "norm").pvalue > 1e-3
    for distance in (1, 2, 16, 1000):
        assert_unrelated(sent[distance:], sent[:-distance])


def test_noise_is_independent_across_clients_and_rounds(federation: Make) -> None:
    rounds = [sent_updates(federation, Gaussian(), index) for index in range(3)]
    rows = torch.cat([attacked.sent for attacked in rounds])
    assert len(rows) == 6  # two malicious clients in three rounds
    for i in range(6):
        for j in range(i):
            assert_unrelated(rows[i], rows[j])


def test_in_a_round_clients_send_only_noise(federation: Make) -> None:
    """It is uncorrelated with the client's honest update and with the global model."""
    attacked = sent_updates(federation, Gaussian(std=0.5))
    parameters = federation().initial().params
    assert attacked.sent.shape == (2, 7850)
    for row, clean in zip(attacked.sent, attacked.clean, strict=True):
        assert stats.kstest(row.double().numpy() / 0.5, "norm").pvalue > 1e-3
        for other in (clean, *attacked.honest, parameters):
            assert_unrelated(row, other)


def test_same_seed_same_noise(federation: Make) -> None:
    first, again = (sent_updates(federation, Gaussian()).sent for _ in range(2))
    assert torch.equal(first, again)
    assert_unrelated(sent_updates(federation, Gaussian(), seed=1).sent[0], first[0])


@pytest.mark.parametrize(("name", "n_trained"), [("gaussian", 4), ("sign_flip", 6)])
def test_malicious_clients_do_not_train(
    federation: Make, monkeypatch: pytest.MonkeyPatch, name: str, n_trained: int
) -> None:
    """Two of six clients are malicious; under an attack that trains, all six train."""
    trained: list[Any] = []
    usual = ClientRunner._local_training

    def counting(self: ClientRunner, *args: Any, **kwargs: Any) -> Any:
        trained.append(args)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(ClientRunner, "_local_training", counting)
    made = federation(attack=ATTACKS.build({"name": name}))
    assert made.rank_context.attack.trains is (n_trained == 6)
    made.round(replace(made.initial(), next_round=0))
    assert len(trained) == n_trained


def test_every_client_malicious(federation: Make) -> None:
    attacked = sent_updates(federation, Gaussian(), pmr=1.0)
    assert len(attacked.sent) == 6
    assert attacked.sent.isfinite().all()
    for i in range(6):
        for j in range(i):
            assert_unrelated(attacked.sent[i], attacked.sent[j])


def test_noise_breaks_averaging_but_not_krum(after_rounds: Callable[..., Record]) -> None:
    """The paper's claim: averaging tolerates no such client, Krum selects honest ones."""
    krum = DEFENSES.build({"name": "krum"})
    assert after_rounds(ATTACKS.build({"name": "none"}))["MA"] > 0.55
    assert after_rounds(Gaussian(std=3.0))["MA"] < 0.3
    withstood = after_rounds(Gaussian(std=3.0), defense=krum)["MA"]
    assert withstood > 0.45
    assert (
        after_rounds(Gaussian(std=30.0), defense=krum)["MA"] == withstood
    )  # no noise was selected


@pytest.mark.parametrize("std", NOT_ABOVE_0)
def test_std_out_of_range_is_refused(std: float) -> None:
    assert_refused("gaussian", "std", std)
