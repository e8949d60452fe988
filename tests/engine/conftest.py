"""Fixtures for tests of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from simulations import ATTACK_SETTINGS, MakeSimulation
from torch import nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine.simulation import Simulation


@pytest.fixture
def make_simulation(sample: Dataset, fabric: Fabric) -> MakeSimulation:
    """Return a factory of simulations: 8 clients, 3 malicious, and a small network."""

    def make(network: nn.Module | None = None, attack: str = "none", **settings: Any) -> Simulation:
        defaults = {"n_clients": 8, "pmr": 0.4, "batch_size": 16, "model": {"name": "small"}}
        torch.manual_seed(0)
        network = network or nn.Sequential(
            nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10)
        )
        built = ATTACKS.build({"name": attack, **ATTACK_SETTINGS[attack]})
        simulation = Simulation(RunConfig(**defaults | settings), sample, network, built, fabric)
        layout = simulation.replica.layout
        context = simulation.backdoor_context(layout.read_params(), layout.read_buffers())
        patch = BACKDOORS.build({"name": "patch"})
        backdoors = built.backdoor_settings([{"name": "patch"}])
        simulation.set_backdoors([patch.prepare(context) for _ in backdoors])
        return simulation

    return make
