"""Local training: the same steps as a loop written by hand, with any LightningModule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.attack import OwnTraining
from fedbench.client import Classifier, Malice, train
from fedbench.errors import UserError


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(50, 6, generator=rng), torch.randint(0, 3, (50,), generator=rng)


def linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(6, 3)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_training_is_sgd_with_momentum_on_shuffled_batches(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    x, y = data
    module = Classifier(linear(), lr=0.1, momentum=0.9, weight_decay=0.01)
    train(module, x, y, fabric, epochs=2, batch_size=16, rng=rng())

    # By hand: w <- w - lr * m with m <- 0.9 m + (gradient + 0.01 w), batches of 16, 16, 16, 2.
    weight, bias = (p.detach().clone().requires_grad_() for p in linear().parameters())
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
    draw = rng()
    for _ in range(2):
        order = torch.randperm(50, generator=draw)
        for batch in (order[0:16], order[16:32], order[32:48], order[48:50]):
            logits = x[batch] @ weight.T + bias
            loss = -logits.log_softmax(dim=1)[torch.arange(len(batch)), y[batch]].mean()
            gradients = torch.autograd.grad(loss, [weight, bias])
            with torch.no_grad():
                for p, m, g in zip((weight, bias), momenta, gradients, strict=True):
                    m.mul_(0.9).add_(g + 0.01 * p)
                    p.sub_(0.1 * m)
    torch.testing.assert_close(module.network.weight, weight)
    torch.testing.assert_close(module.network.bias, bias)


def test_momentum_of_one_client_does_not_reach_the_next(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    module, start = Classifier(linear(), lr=0.1, momentum=0.9), linear().state_dict()
    results = []
    for _ in range(2):
        module.network.load_state_dict(start)
        train(module, *data, fabric, epochs=1, batch_size=16, rng=rng())
        results.append(module.network.weight.detach().clone())
    assert torch.equal(*results)


def test_an_attacker_can_bring_its_own_lr_and_objective(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    still = Classifier(linear(), lr=0.1)
    nothing = Malice(OwnTraining(), objective=lambda loss: 0 * loss, project=lambda: None)
    train(still, *data, fabric, epochs=1, batch_size=16, rng=rng(), malice=nothing)
    assert torch.equal(still.network.weight, linear().weight)
    small, large = (Classifier(linear(), lr=0.1) for _ in range(2))
    slow = Malice(OwnTraining(lr=0.01), objective=lambda loss: loss, project=lambda: None)
    train(small, *data, fabric, epochs=1, batch_size=50, rng=rng(), malice=slow)
    train(large, *data, fabric, epochs=1, batch_size=50, rng=rng())
    steps = [m.network.weight - linear().weight for m in (small, large)]
    torch.testing.assert_close(steps[0] * 10, steps[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [
        (50, 16, [16, 16, 16, 2]),
        (49, 16, [16, 16, 17]),
        (5, 16, [5]),
        (1, 16, [1]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_no_batch_of_one_is_left_over(
    fabric: Fabric, n: int, batch_size: int, sizes: list[int]
) -> None:
    seen = []

    class Recorder(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            seen.append(len(batch[1]))
            return super().training_step(batch, batch_idx)

    x, y = torch.zeros(n, 6), torch.zeros(n, dtype=torch.long)
    train(Recorder(linear(), 0.1), x, y, fabric, epochs=1, batch_size=batch_size, rng=rng())
    assert seen == sizes


class Brought(LightningModule):
    """A user's module: its own loss, dict output, optimizer and scheduler."""

    def __init__(self, optimizers: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 3)
        self.optimizers_form = optimizers

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": nn.functional.cross_entropy(self(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        self.used = optimizer
        return {
            "plain": optimizer,
            "list": [optimizer],
            "dict": {"optimizer": optimizer, "lr_scheduler": halved},
            "pair": ([optimizer], [halved]),
            "per step": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": halved, "interval": "step"},
            },
            "two": [optimizer, torch.optim.Adam(self.parameters())],
            "none": None,
        }[self.optimizers_form]


@pytest.mark.parametrize(
    ("form", "final_lr"),
    [("plain", 0.1), ("list", 0.1), ("dict", 0.025), ("pair", 0.025), ("per step", 0.1 / 2**8)],
)
def test_any_lightning_module_trains(
    data: tuple[Tensor, Tensor], fabric: Fabric, form: str, final_lr: float
) -> None:
    module = Brought(form)
    before = nn.functional.cross_entropy(module(data[0]), data[1])
    train(module, *data, fabric, epochs=2, batch_size=16, rng=rng())  # 8 steps
    assert nn.functional.cross_entropy(module(data[0]), data[1]) < before
    assert module.used.param_groups[0]["lr"] == pytest.approx(final_lr)


@pytest.mark.parametrize("form", ["two", "none"])
def test_a_module_without_exactly_one_optimizer_is_refused(
    data: tuple[Tensor, Tensor], fabric: Fabric, form: str
) -> None:
    with pytest.raises(UserError, match="must return one optimizer"):
        train(Brought(form), *data, fabric, epochs=1, batch_size=16, rng=rng())


def test_a_training_step_without_a_loss_is_refused(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    class Silent(Brought):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            return None

    with pytest.raises(UserError, match="must return a loss"):
        train(Silent("plain"), *data, fabric, epochs=1, batch_size=16, rng=rng())
