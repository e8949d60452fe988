"""Two ranks on two fake GPUs give the bits of one rank on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_ranks import two_ranks
from lightning.fabric import Fabric
from played import images
from torch import nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.config import RunConfig
from fedbench.defense import DEFENSES
from fedbench.engine.executors import Sequential
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

SEEDED = threading.Lock()  # the threads of two ranks share torch's generator


class FailsOnGpu1(nn.Module):
    """Raises while training on cuda:1."""

    def forward(self, x: Any) -> Any:
        if x.device == torch.device("cuda:1") and self.training:
            raise RuntimeError("out of memory")
        return x


def ranks_on(fabric: Fabric, *layers: nn.Module) -> RankGroup:
    data = images().to(fabric.device)
    config = RunConfig(
        n_clients=5, pmr=0.4, local_epochs=1, batch_size=5, pretrain_rounds=1, model={"name": "own"}
    )
    attack = ATTACKS.build({"name": "edge_case"})
    with SEEDED:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(1, 2, 5, stride=4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4), *layers
        )
        context = RankContext(config, data, network, attack, fabric)  # saves and restores the state
    return RankGroup(Sequential(), context)


def records(ranks: RankGroup) -> tuple[list[Record], list[float]]:
    """Records of two rounds after a benign one, and the parameters at the end."""
    federation = Federation(ranks, DEFENSES.build({"name": "foolsgold"}))
    state = federation.pretrain(federation.initial())
    federation.prepare([BACKDOORS.build({"name": "tail", "target": 2})], state)
    found = []
    for _ in range(2):
        state, record = federation.round(state)
        found.append({**record, "seconds": None})
    return found, [*state.params.tolist(), *state.buffers.tolist()]


@pytest.mark.parametrize("n_available", [2, 1])
def test_two_gpus_give_the_bits_of_the_cpu(n_available: int) -> None:
    """Also if one of them has to wait."""
    expected = records(ranks_on(Fabric(accelerator="cpu", devices=1)))
    with two_ranks(lambda fabric: ranks_on(fabric).serve()) as fabric:
        ranks = ranks_on(fabric)
        ranks.available = lambda: n_available
        assert str(ranks) == "sequential on 2 cuda devices"
        found = records(ranks)
        ranks.stop()
    assert found == expected


def test_a_failure_on_the_second_gpu_is_reported_by_the_first() -> None:
    with two_ranks(lambda fabric: ranks_on(fabric, FailsOnGpu1()).serve()) as fabric:
        ranks = ranks_on(fabric, FailsOnGpu1())
        with pytest.raises(UserError, match=r"client \d in pretraining: .*out of memory"):
            records(ranks)
        ranks.stop()
