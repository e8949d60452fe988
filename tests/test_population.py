"""The clients' samples: augmented anew in each epoch, and poisoned after that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedbench.backdoor import BACKDOORS, Collection, Scene
from fedbench.data import Dataset
from fedbench.federation import Federation
from fedbench.images import crop_and_flip
from fedbench.population import Job, Order

Make = Callable[..., Federation]


@pytest.fixture
def samples(
    federation: Make,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A client's samples in an epoch of a round, in a federation whose data set augments them."""
    made = federation(pdr=0.5)
    population = made.population
    population.dataset = replace(population.dataset, augment=crop_and_flip)
    start = made.initial()

    def samples(epoch: int, index: int = 0, poisoned: bool = False) -> tuple[Tensor, Tensor]:
        client = population.malicious[0]
        order = Order(index, population.select(index), start.params, start.buffers)
        return population._samples(order, Job(client, poisoned), epoch, poisoned)

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
    ready = backdoor.prepare(Scene(data, torch.arange(3), lambda x: x))
    assert isinstance(ready, Collection)
    x, y = ready.poison(data.x_train[:40], data.y_train[:40], torch.Generator().manual_seed(0))
    assert y.eq(target).all()
    assert len({image.numpy().tobytes() for image in x}) > 10  # of two images
    assert torch.equal(ready.probe(data.x_test, data.y_test).x, data.x_train[2:3])


def test_without_augmentation_an_epoch_costs_nothing(federation: Make) -> None:
    """What does not change from epoch to epoch is read once."""
    made = federation(local_epochs=5)
    population, asked = made.population, []
    read = population._samples

    def spied(order: Order, job: Job, epoch: int, poisoned: bool) -> tuple[Tensor, Tensor]:
        asked.append(epoch)
        return read(order, job, epoch, poisoned)

    population._samples = spied  # type: ignore[method-assign]
    made.round(made.initial())
    assert asked == [0] * 6
    asked.clear()
    population.dataset = replace(population.dataset, augment=crop_and_flip)
    made.round(made.initial())
    assert asked == [0, 1, 2, 3, 4] * 6
