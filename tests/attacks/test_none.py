"""none: every client is honest, and the same clients are selected as under an attack."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.config import RunConfig
from fedbench.data import Dataset, Images
from fedbench.engine.rank_context import RankContext

NoAttack = ATTACKS.get("none")
ConstrainAndScale = ATTACKS.get("constrain_and_scale")
N_ROUNDS = 5


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (400, 1, 6, 6), generator=rng, dtype=torch.uint8)
    y = torch.arange(400) % 10
    return Images("made", x, y, x[:50], y[:50], n_classes=10, mean=0.5, std=0.25)


def rank_context(dataset: Dataset, attack: Attack, pmr: float = 0.4) -> RankContext:
    config = RunConfig(n_clients=10, pool=20, pmr=pmr, local_epochs=1, batch_size=8)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))
    fabric = Fabric(accelerator="cpu", devices=1)
    return RankContext(config, dataset, network, attack, fabric)


def test_by_hand() -> None:
    # With M = 2 of N = 4, neither the loss 2 nor the rows (1, 2) and (3, 4) change.
    view = AttackView(0, torch.ones(2), {}, 4, 2, server_lr=0.5, rng=torch.Generator())
    loss = torch.tensor(2.0, requires_grad=True)
    params = [nn.Parameter(torch.tensor([5.0, 5.0]))]
    assert NoAttack().objective(loss, params, view).item() == 2
    sent = NoAttack().collude(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), view)
    assert [row.tolist() for row in sent] == [[1, 2], [3, 4]]
    assert NoAttack().craft(torch.tensor([5.0, 6.0]), view).tolist() == [5, 6]


@pytest.mark.parametrize("pmr", [0.0, 0.4, 1.0])
def test_no_client_is_malicious(dataset: Dataset, pmr: float) -> None:
    benign = rank_context(dataset, NoAttack(), pmr)
    for index in range(N_ROUNDS):
        assert not any(p.malicious for p in benign.selection.select(index))


def test_the_same_clients_are_selected_as_under_an_attack(dataset: Dataset) -> None:
    benign = rank_context(dataset, NoAttack())
    attacked = rank_context(dataset, ConstrainAndScale())
    for index in range(N_ROUNDS):
        honest, poisoned = benign.selection.select(index), attacked.selection.select(index)
        assert [p.client for p in honest] == [p.client for p in poisoned]
        assert sum(p.malicious for p in poisoned) == 4  # 0.4 of 10


def test_backdoors_are_still_measured() -> None:
    """An inactive attack still returns backdoors."""
    assert NoAttack().backdoor_settings(["patch"]) == ["patch"]  # the dataset's
    assert NoAttack(backdoors=[{"name": "bars"}]).backdoor_settings(["patch"]) == [{"name": "bars"}]
