"""engine.trainer_needs: which modules the fast loop does not train exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_modules import NEED_TRAINER, Plain
from rank_contexts import MakeRankContext
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from fedbench.engine.executors import Auto, Sequential, Vectorized
from fedbench.engine.local_training import Batch, Classifier
from fedbench.engine.trainer_needs import trainer_attributes, training_hooks, why_trainer
from fedbench.errors import UserError
from fedbench.models import MODELS

# Hooks that Lightning documents for training; its classes have more methods
DOCUMENTED = {
    *("prepare_data", "setup", "teardown", "configure_callbacks", "configure_gradient_clipping"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "on_before_batch_transfer"),
    *("transfer_batch_to_device", "on_after_batch_transfer"),
}


def test_hooks_are_those_of_lightning_without_evaluation() -> None:
    assert training_hooks() >= DOCUMENTED
    words = ("validation", "test", "predict", "dataloader", "checkpoint")
    assert not [name for name in training_hooks() if any(word in name for word in words)]


@pytest.mark.parametrize("name", sorted(training_hooks()))
def test_each_override_needs_the_trainer(name: str) -> None:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(LightningModule, name)(self, *args, **kwargs)

    overriding = type("Net", (Plain,), {name: method})
    assert why_trainer(overriding()) == f"Net overrides {name}"
    mixed_in = type("Net", (type("Mixin", (), {name: method}), Plain), {})
    assert why_trainer(mixed_in()) == f"Net overrides {name}"
    patched = Plain()
    setattr(patched, name, method)
    assert why_trainer(patched) == f"Plain overrides {name}"


class Evaluated(Plain):
    """Uses the Trainer, but only where training does not go."""

    def __init__(self) -> None:
        super().__init__()
        self._build()

    def _build(self) -> None:
        self.width = 12

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.best = self.trainer.current_epoch

    def on_validation_epoch_end(self) -> None:
        self.log("epoch", self.current_epoch)

    def train_dataloader(self) -> Any:
        return []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["epoch"] = self.current_epoch


@pytest.mark.parametrize("kind", [Plain, Evaluated])
def test_plain_modules_do_not_need_the_trainer(kind: type[Plain]) -> None:
    assert why_trainer(kind()) is None


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18_light", "lstm", "gru"])
def test_shipped_networks_do_not_need_the_trainer(name: str) -> None:
    shape = (3, 32, 32) if name in ("mlp", "cnn", "resnet18_light") else (8,)
    network = MODELS.build({"name": name}).build(shape, 10)
    assert why_trainer(Classifier(network, lr=0.1)) is None


@pytest.mark.parametrize(("kind", "reason"), NEED_TRAINER.items())
def test_reasons(kind: type[Plain], reason: str, make_rank_context: MakeRankContext) -> None:
    assert why_trainer(kind()) == reason
    context = make_rank_context(kind())
    for name, executor in (("sequential", Sequential()), ("vectorized", Vectorized())):
        line = f"executor={name}: cannot train model small, {reason}; use trainer or auto"
        with pytest.raises(UserError) as caught:
            executor.backend(context.replica, context.config)
        assert str(caught.value) == line
    assert str(Auto().backend(context.replica, context.config)) == f"trainer ({reason})"


def test_attributes_that_need_a_trainer_are_those_of_lightning() -> None:
    assert trainer_attributes() >= {
        *("trainer", "current_epoch", "global_step", "optimizers", "lr_schedulers", "logger"),
        *("manual_backward", "print", "all_gather", "global_rank"),
    }
    assert not trainer_attributes() & {"log", "log_dict", "device", "dtype", "hparams", "forward"}


@pytest.mark.parametrize("name", sorted(trainer_attributes()))
def test_each_use_of_the_trainer_is_seen(name: str) -> None:
    """In methods, nested functions, properties and parents."""
    source = f"lambda self, *args: [getattr(f, '{name}')() for f in (lambda: self.{name},)]"
    uses = eval(source)
    reason = f"Net.helper uses self.{name}"
    assert why_trainer(type("Net", (Plain,), {"helper": uses})()) == reason
    assert why_trainer(type("Net", (Plain,), {"helper": property(uses)})()) == reason
    assert why_trainer(type("Net", (Plain,), {"helper": staticmethod(uses)})()) == reason
    parent = type("Parent", (Plain,), {"helper": uses})
    assert why_trainer(type("Net", (parent,), {})()) == reason


@pytest.mark.parametrize("name", ["maybe_unfreeze", "predict_logits", "update_latest"])
def test_helpers_may_have_the_names_of_evaluation(name: str) -> None:
    """Only Lightning's own hooks of evaluation are left out."""
    helper = type("Net", (Plain,), {name: lambda self: self.current_epoch})
    assert why_trainer(helper()) == f"Net.{name} uses self.current_epoch"


def test_parts_that_are_lightning_modules_are_looked_at() -> None:
    class Part(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.current_epoch

    class Whole(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

    assert why_trainer(Whole()) == "Part.forward uses self.current_epoch"


def configured(function: Any) -> type[Plain]:
    """A module whose `configure_optimizers` applies a function to an SGD optimizer."""
    return type(
        "Net",
        (Plain,),
        {"configure_optimizers": lambda self: function(SGD(self.parameters(), lr=0.1))},
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda sgd: sgd,
        lambda sgd: [sgd],
        lambda sgd: ([sgd], [StepLR(sgd, 1)]),
        lambda sgd: [{"optimizer": sgd, "lr_scheduler": StepLR(sgd, 1)}],
        lambda sgd: {"optimizer": sgd, "lr_scheduler": {"scheduler": StepLR(sgd, 1)}},
        lambda sgd: {
            "optimizer": sgd,
            "lr_scheduler": {"scheduler": OneCycleLR(sgd, 1.0, 10), "interval": "step"},
        },
    ],
)
def test_one_optimizer_with_at_most_one_scheduler_does_not(function: Any) -> None:
    assert why_trainer(configured(function)()) is None


class Foreign:
    """Not one of torch's schedulers."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda sgd: ([sgd], [StepLR(sgd, 1), LambdaLR(sgd, float)]), "Net has 2 schedulers"),
        (
            lambda sgd: ([sgd], [{"scheduler": StepLR(sgd, 1), "monitor": "loss"}]),
            "StepLR monitors loss",
        ),
        (lambda sgd: ([sgd], [Foreign(sgd)]), "Foreign is not an LRScheduler"),
    ],
)
def test_other_schedulers_need_the_trainer(function: Any, reason: str) -> None:
    assert why_trainer(configured(function)()) == reason


class OwnStep(SGD):
    """As SAM does, it may call the closure itself."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnZeroGrad(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def with_hook(sgd: SGD) -> SGD:
    sgd.register_step_pre_hook(lambda *_: None)
    return sgd


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda sgd: OwnStep(sgd.param_groups, lr=0.1), "OwnStep defines step"),
        (lambda sgd: OwnZeroGrad(sgd.param_groups, lr=0.1), "OwnZeroGrad defines zero_grad"),
        (with_hook, "SGD has hooks"),
    ],
)
def test_optimizers_that_the_fast_loop_would_drive_differently(function: Any, reason: str) -> None:
    assert why_trainer(configured(function)()) == reason


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda sgd: None, "Net.configure_optimizers must return one optimizer, got None"),
        (lambda sgd: [sgd, sgd], "Net.configure_optimizers returns 2 optimizers: set self.auto"),
        (lambda sgd: 3, "Net.configure_optimizers: Unknown configuration for model optimizers"),
        (lambda sgd: sgd.missing, "AttributeError: 'SGD' object has no attribute 'missing'"),
    ],
)
def test_wrong_optimizers_are_a_user_error(function: Any, line: str) -> None:
    with pytest.raises(UserError) as caught:
        why_trainer(configured(function)())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_looking_changes_nothing() -> None:
    """`configure_optimizers` is tried on a copy."""

    class Drawing(Plain):
        n_calls = 0

        def configure_optimizers(self) -> Any:
            self.n_calls += 1
            return SGD(self.parameters(), lr=float(torch.rand(())))

    module = Drawing()
    before = torch.random.get_rng_state()
    assert why_trainer(module) is None
    assert module.n_calls == 0
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_step_on_a_data_iterator_needs_the_trainer() -> None:
    class Iterating(Plain):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return self.loss(next(dataloader_iter)[0])

    assert why_trainer(Iterating()) == "Iterating.training_step takes dataloader_iter"


def test_globals_named_like_attributes_do_not_count() -> None:
    """`logger.info` at module level is no use of `self.logger`."""

    class Logging(Plain):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            trainer, logger = nn.functional, print
            logger(end="")
            return trainer.cross_entropy(self(batch[0]), batch[1])

    assert why_trainer(Logging()) is None
