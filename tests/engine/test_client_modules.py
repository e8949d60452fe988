"""Each client trains as if it were alone, whatever its module remembers or refers to."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning_modules import Plain, Remembering, by_executor, by_hand, local_training
from rank_contexts import MakeRankContext, first_round, updates_of
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedbench.attack import TrainingOverrides
from fedbench.engine.executors import Auto, Executor, LightningTrainer, Sequential
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.local_training import AttackHooks, Batch
from fedbench.engine.rank_context import RankContext
from fedbench.errors import UserError

EXECUTORS = pytest.mark.parametrize("executor", [Sequential(), LightningTrainer()], ids=str)


class OptimizerOfInit(Plain):
    """Its optimizer is created once; momentum would go from client to client."""

    def __init__(self) -> None:
        super().__init__()
        self.sgd = self.optimizer()

    def configure_optimizers(self) -> Any:
        return self.sgd


class History(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.history.append(1.0)
        return self.loss(batch) * len(self.history)


class CountingLayer(nn.Module):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += self.training
        return x / max(self.n, 1)


class CountingPart(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(CountingLayer())


class LambdaStep(Plain):
    """A function that refers to the module: in a copy, it would refer to the original."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step = lambda batch, batch_idx: self.loss(batch)  # type: ignore[assignment]


class WeakReference(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.me = weakref.ref(self)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        me = self.me()
        assert me is not None
        return me.loss(batch)


class ParameterAttribute(Plain):
    """A copy of a parameter has no attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.lr = 0.0  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": getattr(p, "lr", 0.1)} for p in self.parameters()]
        return SGD(groups)


class GradientHook(Plain):
    """A copy of a parameter has no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[operator]


class StoredFeatures(Plain):
    """A hook stores what a later step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(self.store)

    def store(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.features = output

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) + 0.01 * self.features.square().mean()


class ReadsGradients(Plain):
    """As in Lightning, gradients of the last step are there until the loss is computed."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        gradient = self.layers[1].weight.grad
        return self.loss(batch) * (1.0 if gradient is None else 1 + float(gradient.abs().max()))


MODULES: list[type[Plain]] = [
    *(OptimizerOfInit, History, CountingPart, Remembering),
    *(LambdaStep, WeakReference, ParameterAttribute, GradientHook, StoredFeatures, ReadsGradients),
]


def rebuilt(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return kind()

    return build


@EXECUTORS
@pytest.mark.parametrize("kind", MODULES)
def test_every_client_trains_as_alone_with_an_ordinary_trainer(
    kind: type[Plain], executor: Executor, make_rank_context: MakeRankContext
) -> None:
    context = make_rank_context(rebuilt(kind), local_epochs=2, batch_size=20)
    updates = updates_of(executor, context)
    start = first_round(context).params
    for position in (0, 2):
        module = rebuilt(kind)()
        assert isinstance(module, Plain)
        expected = by_hand(module, local_training(context, position), copied=False)
        assert torch.equal(updates[position], expected.params - start)


class CountingNetwork(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10), CountingLayer())


@EXECUTORS
def test_plain_networks_with_state_do_not_share_it(
    executor: Executor, make_rank_context: MakeRankContext
) -> None:
    context = make_rank_context(rebuilt(CountingNetwork))
    updates = updates_of(executor, context)
    for position in (0, 3):
        alone = by_executor(executor, context, position)
        assert torch.equal(updates[position], alone.params - first_round(context).params)


def test_shipped_layers_are_not_built_again(make_rank_context: MakeRankContext) -> None:
    """They have no state beside parameters and buffers, and building costs time."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    context = make_rank_context(network)
    assert context.replica.client().module is context.replica.module


def test_python_and_numpy_draw_by_client(make_rank_context: MakeRankContext) -> None:
    class Drawing(Plain):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.loss(batch) * (np.random.rand() + random.random())

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    for executor in (Sequential(), LightningTrainer()):
        context = make_rank_context(rebuilt(Drawing))
        first, again = updates_of(executor, context), updates_of(executor, context)
        assert torch.equal(first, again)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


# Uses of the Trainer that reading the class does not show


def epoch_of(module: Any) -> int:
    return int(module.current_epoch)


class Helper(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + epoch_of(self))


class ByName(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + getattr(self, "global_step"))  # noqa: B009


def partial_step(module: Any, batch: Batch, batch_idx: int) -> Tensor:
    return module.loss(batch) * (1 + module.current_epoch)  # type: ignore[no-any-return]


class PartialStep(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.training_step = functools.partial(partial_step, self)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [(Helper, "current_epoch"), (ByName, "global_step"), (PartialStep, "current_epoch")],
)
def test_hidden_uses_of_the_trainer_are_an_error_and_not_zero(
    kind: type[Plain], attribute: str, make_rank_context: MakeRankContext
) -> None:
    context = make_rank_context(rebuilt(kind))
    line = f"{kind.__name__} uses {attribute} of Lightning's Trainer; set executor=trainer"
    with pytest.raises(UserError) as caught:
        by_executor(Auto(), context)
    assert str(caught.value) == line
    module = rebuilt(kind)()
    assert isinstance(module, Plain)
    expected = by_hand(module, local_training(context), copied=False)
    assert torch.equal(by_executor(LightningTrainer(), context).params, expected.params)


class Vector(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1].long(), reduction="none")


class Detached(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch).detach()


@EXECUTORS
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Vector, r"^training_step must return one number, got shape \(16,\)$"),
        (Detached, r"^training_step must return a loss that depends on the parameters$"),
    ],
)
def test_losses_without_gradients_are_a_user_error(
    kind: type[Plain], line: str, executor: Executor, make_rank_context: MakeRankContext
) -> None:
    with pytest.raises(UserError, match=line):
        by_executor(executor, make_rank_context(kind()))


# Modules that are no LightningModule to fedbench


def test_a_compiled_lightning_module_keeps_its_training(make_rank_context: MakeRankContext) -> None:
    expected = by_executor(Sequential(), make_rank_context(rebuilt(Plain)))
    compiled = rebuilt(lambda: torch.compile(Plain(), backend="eager"))
    found = by_executor(Sequential(), make_rank_context(compiled))
    assert torch.equal(found.params, expected.params)


class Lookalike(nn.Sequential):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Optimizer:
        raise NotImplementedError


def test_modules_of_another_lightning_are_refused(make_rank_context: MakeRankContext) -> None:
    network = Lookalike(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(UserError, match=r"Lookalike defines its own training; it must be a Lightn"):
        make_rank_context(network)
    base = type("LightningModule", (nn.Sequential,), {"__module__": "pytorch_lightning.core"})
    old = type("Old", (base,), {})(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(UserError, match="Old is a LightningModule of the package pytorch_lightnin"):
        make_rank_context(old)


# Attacks, callbacks


def trained(context: RankContext, hooks: AttackHooks | None) -> FlatModel:
    training = local_training(context)
    out = FlatModel(*map(torch.empty_like, first_round(context).model))
    backend = LightningTrainer().backend(context.replica, context.config)
    attacked = type(training)(**{**vars(training), "hooks": hooks})
    backend.fit(first_round(context).model, [attacked], [out])
    return out


def test_accumulated_batches_share_one_penalty(make_rank_context: MakeRankContext) -> None:
    class Accumulating(Plain):
        def configure_callbacks(self) -> Any:
            return [GradientAccumulationScheduler({0: 1000})]

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=1.0)

    def penalty(loss: Tensor, params: Any) -> Tensor:
        return loss * 0 + sum(param.sum() for param in params)

    context = make_rank_context(rebuilt(Accumulating), local_epochs=1, batch_size=20)
    n_batches = -(-len(local_training(context).samples(0)[1]) // 20)
    out = trained(context, AttackHooks(TrainingOverrides(), penalty, lambda params: None))
    # The epoch ends before 1000 batches: their shares of one penalty with gradient 1 remain.
    moved = out.params - first_round(context).params
    assert torch.allclose(moved, torch.tensor(-n_batches / 1000), atol=1e-6)


def test_an_attacks_learning_rate_leaves_schedulers_in_place(
    make_rank_context: MakeRankContext,
) -> None:
    class Watching(Plain):
        def on_train_batch_end(self, *args: Any) -> None:
            self.lr_schedulers().get_last_lr()  # type: ignore[union-attr]

    rates: list[float] = []

    class Recording(Watching):
        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            optimizer.register_step_post_hook(
                lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
            )

    context = make_rank_context(rebuilt(Recording), local_epochs=1, batch_size=20)
    hooks = AttackHooks(TrainingOverrides(lr=0.02), lambda loss, _: loss, lambda _: None)
    trained(context, hooks)
    assert {*rates} == {0.02}


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_to_the_last_checkpoint_is_not_written(
    exists: bool,
    make_rank_context: MakeRankContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Linking(Plain):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint("saved", save_last="link", every_n_train_steps=1)]

    monkeypatch.chdir(tmp_path)
    if exists:
        Path("saved").mkdir()
    by_executor(LightningTrainer(), make_rank_context(rebuilt(Linking)))
    assert [*tmp_path.rglob("*.ckpt")] == []
