"""fedbench.Server on updates that are on a fake GPU."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import fake_gpus
from played import ChecksView
from shipped import published
from torch import Tensor

from fedbench.defense import DEFENSES
from fedbench.server import Server


def parameters(name: str, updates: Tensor, params: Tensor | None) -> list[float]:
    """The global model after two rounds."""
    server = Server(name, None if params is None else {"a.weight": params[:30], "b": params[30:]})
    for _ in range(2):
        result = server.aggregate(updates, client_ids=[4, 2, 9, 1, 3, 5])
    assert server.params is not None
    assert server.params.device == (updates if params is None else params).device
    assert result.update.device == server.params.device
    return [*server.params.tolist(), *result.weights.tolist()]


@pytest.mark.parametrize("name", published(DEFENSES))
def test_a_server_follows_the_device_of_its_model(name: str) -> None:
    """Of the updates if it has none: the model may be on a GPU and the updates not."""
    updates, params = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))
    for given in (None, params[0]):
        expected = parameters(name, updates, given)
        with fake_gpus():
            gpu = None if given is None else given.to("cuda:1")
            found = [parameters(name, updates.to("cuda:1"), gpu)]
            if given is not None:
                found.append(parameters(name, updates, gpu))
        assert all(numbers == expected for numbers in found)


def test_all_inputs_of_a_defense_are_on_one_device() -> None:
    with fake_gpus():
        updates = torch.ones(3, 40, device="cuda:1")
        Server(ChecksView()).aggregate(updates, client_ids=[4, 2, 9])
