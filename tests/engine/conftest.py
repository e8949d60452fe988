"""Fixtures for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from rank_contexts import ATTACK_SETTINGS, MakeRankContext
from torch import nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine.rank_context import RankContext


@pytest.fixture
def make_rank_context(sample: Dataset, fabric: Fabric) -> MakeRankContext:
    """Return a factory of rank_contexts: 8 clients, 3 malicious, and a small network.

    A network is copied for each client that needs a new one; a function builds it again.
    """

    def make(
        network: nn.Module | Callable[[], nn.Module] | None = None,
        attack: str = "none",
        **settings: Any,
    ) -> RankContext:
        defaults = {"n_clients": 8, "pmr": 0.4, "batch_size": 16, "model": {"name": "small"}}
        torch.manual_seed(0)
        network = network or nn.Sequential(
            nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10)
        )
        rebuild = None if isinstance(network, nn.Module) else network
        network = network if isinstance(network, nn.Module) else network()
        built = ATTACKS.build({"name": attack, **ATTACK_SETTINGS[attack]})
        config = RunConfig(**defaults | settings)
        rank_context = RankContext(config, sample, network, built, fabric, rebuild)
        layout = rank_context.replica.layout
        context = rank_context.backdoor_context(layout.read_params(), layout.read_buffers())
        patch = BACKDOORS.build({"name": "patch"})
        backdoors = built.backdoor_settings([{"name": "patch"}])
        rank_context.set_backdoors([patch.prepare(context) for _ in backdoors])
        return rank_context

    return make
