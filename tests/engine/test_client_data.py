"""engine.client_data: samples by round, augmented in each epoch, then poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS, BackdoorContext, BackdoorSamples
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.datasets.images import crop_and_flip
from fedbench.engine.selection import Participant
from fedbench.engine.simulation import Simulation
from fedbench.federation import Federation

Make = Callable[..., Federation]


@pytest.fixture
def samples(
    federation: Make,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A client's samples in an epoch of a round, in a federation whose data set augments them."""
    made = federation(pdr=0.5)
    data = made.simulation.data
    data.dataset = replace(data.dataset, augment=crop_and_flip)

    def samples(epoch: int, index: int = 0, poisoned: bool = False) -> tuple[Tensor, Tensor]:
        return data.samples(index, data.malicious[0], epoch, poisoned)

    return samples


def test_samples_are_augmented_anew_in_each_epoch_and_round(
    samples: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    (one, y), (again, _), (later, y_later), (next_round, _) = (
        samples(*key) for key in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, later)
    assert not torch.equal(one, next_round)
    assert torch.equal(y, y_later)


def test_a_trigger_stays_where_it_is(samples: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """The patch is stamped on what augmentation has made: half of the samples, in its corner."""
    for epoch in range(3):
        (x, y), (clean, labels) = samples(epoch, poisoned=True), samples(epoch)
        stamped = (x[:, 0, -4:, -4:] == 255).all(dim=(1, 2))
        assert int(stamped.sum()) == (len(x) + 1) // 2
        assert y[stamped].eq(0).all()
        assert torch.equal(x[~stamped], clean[~stamped])
        assert torch.equal(y[~stamped], labels[~stamped])
        assert torch.equal(x[..., :-4, :], clean[..., :-4, :])  # elsewhere as without a trigger


def test_a_collection_is_augmented_as_the_data_set_is(sample: Dataset) -> None:
    data = replace(sample, augment=crop_and_flip)
    semantic = {"name": "semantic", "dataset": "fmnist_sample", "train": [0, 1], "test": [2]}
    target = next(c for c in range(10) if c not in data.y_train[:3])
    backdoor = BACKDOORS.build({**semantic, "target": target})
    ready = backdoor.prepare(BackdoorContext(data, torch.arange(3), lambda x: x))
    assert isinstance(ready, BackdoorSamples)
    x, y = ready.poison(data.x_train[:40], data.y_train[:40], torch.Generator().manual_seed(0))
    assert y.eq(target).all()
    assert len({image.numpy().tobytes() for image in x}) > 10  # of two images
    assert torch.equal(ready.evaluation_set(data.x_test, data.y_test).x, data.x_train[2:3])


def test_without_augmentation_an_epoch_costs_nothing(federation: Make) -> None:
    """What does not change from epoch to epoch is read once."""
    made = federation(local_epochs=5)
    data, asked = made.simulation.data, []
    read = data.samples

    def spied(index: int, client: int, epoch: int, poisoned: bool) -> tuple[Tensor, Tensor]:
        asked.append(epoch)
        return read(index, client, epoch, poisoned)

    data.samples = spied  # type: ignore[method-assign]
    made.round(made.initial())
    assert asked == [0] * 6
    asked.clear()
    data.dataset = replace(data.dataset, augment=crop_and_flip)
    made.round(made.initial())
    assert asked == [0, 1, 2, 3, 4] * 6


OWN = [{"non_iid": 1.0}, {"partition": "dirichlet", "dirichlet_alpha": 0.3}]


@pytest.mark.parametrize("own", OWN, ids=str)
def test_benign_rounds_have_samples_of_their_own(federation: Make, own: dict[str, Any]) -> None:
    """Before round 0 a client holds what it would in a run of that non_iid, then its own data."""
    made = federation(**own, pretrain_non_iid=0.25).simulation.data
    plain, benign = (federation(**s).simulation.data for s in (own, {"non_iid": 0.25}))
    for index, expected, other in ((-3, benign, plain), (-1, benign, plain), (0, plain, benign)):
        for client in range(6):
            shard = expected.shards[client]
            assert not torch.equal(shard, other.shards[client])
            x, y = made.samples(index, client, 0, poisoned=False)
            assert torch.equal(x, made.dataset.x_train[shard])
            assert torch.equal(y, made.dataset.y_train[shard])
            assert made.cost(index, Participant(client, malicious=False)) == len(shard)
    assert all(map(torch.equal, made.shards, plain.shards))
    assert torch.equal(made.malicious_samples(), plain.malicious_samples())


@pytest.mark.parametrize("own", [*OWN, {"non_iid": 0.25}], ids=str)
def test_benign_rounds_of_a_non_iid_lead_to_one_model(
    federation: Make, own: dict[str, Any]
) -> None:
    """To the bit that of a run which has that non_iid itself; without it, another."""

    def trained(**settings: Any) -> Tensor:
        made = federation(pretrain_rounds=2, **settings)
        state = made.initial()
        while state.next_round < 0:
            state = made.pretrain(state)
        return state.params

    assert torch.equal(trained(**own, pretrain_non_iid=0.25), trained(non_iid=0.25))
    if own != {"non_iid": 0.25}:
        assert not torch.equal(trained(**own), trained(non_iid=0.25))


def test_owners_keep_their_samples_in_benign_rounds(sample: Dataset, fabric: Fabric) -> None:
    data = replace(sample, owners=torch.arange(600) % 8)
    config = RunConfig(n_clients=8, partition="natural", pretrain_non_iid=0.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    made = Simulation(config, data, network, ATTACKS.build({"name": "none"}), fabric).data
    assert made.pretrain_shards is made.shards
    assert all(len(data.owners[shard].unique()) == 1 for shard in made.shards)
