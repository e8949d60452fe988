"""engine.client_data: samples per round and epoch: augmented, then poisoned."""

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
from fedbench.engine.client_selection import Participant
from fedbench.engine.rank_context import RankContext
from fedbench.federation import Federation

Make = Callable[..., Federation]
Samples = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def samples(federation: Make) -> Samples:
    """Return a function that reads a malicious client's samples, with augmentation."""
    data = federation(pdr=0.5).rank_context.data
    data.dataset = replace(data.dataset, augment=crop_and_flip)

    def read(epoch: int, index: int = 0, poisoned: bool = False) -> tuple[Tensor, Tensor]:
        return data.samples(index, data.malicious[0], epoch, poisoned)

    return read


def test_augmentation_differs_between_epochs_and_rounds(samples: Samples) -> None:
    (x, y), (same, _), (next_epoch, y_next), (next_round, _) = (
        samples(*key) for key in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(x, same)
    assert not torch.equal(x, next_epoch)
    assert not torch.equal(x, next_round)
    assert torch.equal(y, y_next)


def test_augmentation_does_not_move_the_trigger(samples: Samples) -> None:
    """Augmented samples are stamped: half of them, always in the patch's corner."""
    for epoch in range(3):
        (x, y), (clean, labels) = samples(epoch, poisoned=True), samples(epoch)
        stamped = (x[:, 0, -4:, -4:] == 255).all(dim=(1, 2))
        assert int(stamped.sum()) == (len(x) + 1) // 2
        assert y[stamped].eq(0).all()
        assert torch.equal(x[~stamped], clean[~stamped])
        assert torch.equal(y[~stamped], labels[~stamped])
        assert torch.equal(x[..., :-4, :], clean[..., :-4, :])  # pixels outside the trigger


def test_backdoor_samples_are_augmented_like_the_data_set(sample: Dataset) -> None:
    data = replace(sample, augment=crop_and_flip)
    semantic = {"name": "semantic", "dataset": "fmnist_sample", "train": [0, 1], "test": [2]}
    target = next(c for c in range(10) if c not in data.y_train[:3])
    backdoor = BACKDOORS.build({**semantic, "target": target})
    prepared = backdoor.prepare(BackdoorContext(data, torch.arange(3), lambda x: x))
    assert isinstance(prepared, BackdoorSamples)
    x, y = prepared.poison(data.x_train[:40], data.y_train[:40], torch.Generator().manual_seed(0))
    assert y.eq(target).all()
    assert len({image.numpy().tobytes() for image in x}) > 10  # from two images
    assert torch.equal(prepared.evaluation_set(data.x_test, data.y_test).x, data.x_train[2:3])


def test_samples_are_read_once_unless_augmentation_changes_them(federation: Make) -> None:
    server = federation(local_epochs=5)
    data, epochs = server.rank_context.data, []
    original = data.samples

    def samples(index: int, client: int, epoch: int, poisoned: bool) -> tuple[Tensor, Tensor]:
        epochs.append(epoch)
        return original(index, client, epoch, poisoned)

    data.samples = samples  # type: ignore[method-assign]
    server.round(server.initial())
    assert epochs == [0] * 6
    epochs.clear()
    data.dataset = replace(data.dataset, augment=crop_and_flip)
    server.round(server.initial())
    assert epochs == [0, 1, 2, 3, 4] * 6


SPLITS = [{"non_iid": 1.0}, {"partition": "dirichlet", "dirichlet_alpha": 0.3}]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_pretraining_has_its_own_partition(federation: Make, split: dict[str, Any]) -> None:
    """Before round 0, clients hold the samples of a run with non_iid=pretrain_non_iid."""
    data = federation(**split, pretrain_non_iid=0.25).rank_context.data
    plain, benign = (federation(**s).rank_context.data for s in (split, {"non_iid": 0.25}))
    for index, expected, other in ((-3, benign, plain), (-1, benign, plain), (0, plain, benign)):
        for client in range(6):
            shard = expected.shards[client]
            assert not torch.equal(shard, other.shards[client])
            x, y = data.samples(index, client, 0, poisoned=False)
            assert torch.equal(x, data.dataset.x_train[shard])
            assert torch.equal(y, data.dataset.y_train[shard])
            assert data.cost(index, Participant(client, malicious=False)) == len(shard)
    assert all(map(torch.equal, data.shards, plain.shards))
    assert torch.equal(data.malicious_samples(), plain.malicious_samples())


@pytest.mark.parametrize("split", [*SPLITS, {"non_iid": 0.25}], ids=str)
def test_pretrain_non_iid_gives_the_model_of_that_non_iid(
    federation: Make, split: dict[str, Any]
) -> None:
    """Bit by bit. Without pretrain_non_iid the model differs."""

    def pretrained(**settings: Any) -> Tensor:
        server = federation(pretrain_rounds=2, **settings)
        state = server.initial()
        while state.next_round < 0:
            state = server.pretrain(state)
        return state.params

    assert torch.equal(pretrained(**split, pretrain_non_iid=0.25), pretrained(non_iid=0.25))
    if split != {"non_iid": 0.25}:
        assert not torch.equal(pretrained(**split), pretrained(non_iid=0.25))


def test_natural_partition_also_holds_in_pretraining(sample: Dataset, fabric: Fabric) -> None:
    owned = replace(sample, owners=torch.arange(600) % 8)
    config = RunConfig(n_clients=8, partition="natural", pretrain_non_iid=0.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    data = RankContext(config, owned, network, ATTACKS.build({"name": "none"}), fabric).data
    assert data.pretrain_shards is data.shards
    assert all(len(owned.owners[shard].unique()) == 1 for shard in data.shards)
