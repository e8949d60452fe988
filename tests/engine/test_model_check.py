"""engine.model_check: wrong models are one clear line before training, and right ones unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning_modules import Plain
from rank_contexts import MakeRankContext
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.config import RunConfig
from fedbench.data import DATASETS
from fedbench.engine.rank_context import RankContext
from fedbench.errors import UserError


def linear(n_in: int = 784, n_out: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(n_in, n_out))


class Wordy(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linear()

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layers(x)}


class Failing(Wordy):
    def forward(self, x: Tensor) -> Any:
        return self.layers(x).nothing


@pytest.mark.parametrize(
    ("network", "line"),
    [
        (linear(n_out=9), "Sequential must return logits (2, 10) for 2 samples, got (2, 9)"),
        (
            nn.Conv2d(1, 10, 3),
            "Conv2d must return logits (2, 10) for 2 samples, got (2, 10, 26, 26)",
        ),
        (nn.Linear(28, 10), "Linear must return logits (2, 10) for 2 samples, got (2, 1, 28, 10)"),
        (Wordy(), "Wordy must return logits (2, 10) for 2 samples, got dict"),
        (
            linear(n_in=700),
            "fails on 2 samples of shape (1, 28, 28): RuntimeError: mat1 and mat2 shapes cannot be "
            "multiplied (2x784 and 700x10)",
        ),
        (
            Failing(),
            "fails on 2 samples of shape (1, 28, 28): Failing.forward: AttributeError: 'Tensor' "
            f"object has no attribute 'nothing' ({__file__}:39)",
        ),
        (nn.Flatten(), "Flatten must have trainable parameters, got none"),
        (linear().requires_grad_(False), "Sequential must have trainable parameters, got none"),
        (
            nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
            "Sequential has lazy layers, use layers of a fixed size",
        ),
    ],
)
def test_wrong_networks(make_rank_context: MakeRankContext, network: nn.Module, line: str) -> None:
    with pytest.raises(UserError) as caught:
        make_rank_context(network)
    assert str(caught.value) == f"model small: {line}"


@pytest.mark.parametrize("missing", ["forward", "training_step", "configure_optimizers"])
def test_missing_methods(make_rank_context: MakeRankContext, missing: str) -> None:
    names = {"forward", "training_step", "configure_optimizers"} - {missing}
    methods = {name: vars(Plain)[name] for name in names}
    incomplete = type("Incomplete", (LightningModule,), methods)
    with pytest.raises(UserError, match=f"^model small: Incomplete must define {missing}$"):
        make_rank_context(incomplete())


def test_a_failing_configure_model(make_rank_context: MakeRankContext) -> None:
    class Unready(Plain):
        def configure_model(self) -> None:
            raise ValueError("no width")

    place = r"\(\S+test_model_check\.py:\d+\)"
    line = rf"^model small: Unready\.configure_model: ValueError: no width {place}$"
    with pytest.raises(UserError, match=line):
        make_rank_context(Unready())


def test_sequences_need_logits_for_every_symbol(fabric: Fabric) -> None:
    data = DATASETS.build({"name": "iot_sample"}).load()
    length, n = data.input_shape[0], data.n_classes
    config = RunConfig(model={"name": "mine"}, partition="natural", n_clients=4)
    attack = ATTACKS.build({"name": "none"})
    every = nn.Embedding(n, n)
    RankContext(config, data, every, attack, fabric)
    last = nn.Sequential(every, nn.Flatten(), nn.Linear(n * length, n))
    line = rf"must return logits \(2, {length}, {n}\) for 2 samples, got \(2, {n}\)$"
    with pytest.raises(UserError, match=line):
        RankContext(config, data, last, attack, fabric)


def test_the_check_leaves_no_trace(make_rank_context: MakeRankContext) -> None:
    """Random numbers, buffers and modes are those of a model that was never called."""

    class Counting(nn.Module):
        count: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(linear(), nn.BatchNorm1d(10), nn.Dropout(0.5))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean += torch.rand(3)
            return self.layers(x)  # type: ignore[no-any-return]

    network = Counting()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    context = make_rank_context(network)  # seeds with 0 before it builds the context
    state = torch.random.get_rng_state()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(part.training for part in context.replica.module.modules())
    torch.manual_seed(0)
    assert torch.equal(torch.random.get_rng_state(), state)
