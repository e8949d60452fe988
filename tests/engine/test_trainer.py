"""engine.trainer: Lightning's own Trainer trains clients, honest and malicious."""

from __future__ import annotations

import copy
import gc
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import fedbench, install, result, run_folder
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning_modules import (
    NEED_TRAINER,
    Clipping,
    Epochs,
    Manual,
    Plain,
    Remembering,
    by_executor,
    by_hand,
    local_training,
)
from rank_contexts import ATTACK_SETTINGS, SETTINGS, MakeRankContext, first_round, updates_of
from torch import Tensor, distributed, nn

from fedbench.attack import TrainingOverrides
from fedbench.engine.executors import Auto, LightningTrainer, Sequential
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.local_training import AttackHooks, Batch, LocalTraining
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError

CALLS: list[str] = []  # methods called on any copy of a `every_hook_overridden` module


def every_hook_overridden() -> type[Plain]:
    """A module that overrides every method of Lightning's classes and records the calls."""

    def recorded(name: str) -> Any:
        inherited = getattr(Plain, name)

        def method(self: Plain, *args: Any, **kwargs: Any) -> Any:
            CALLS.append(name)
            return inherited(self, *args, **kwargs)

        return method

    names = {
        name
        for cls in (LightningModule, ModelHooks, DataHooks, CheckpointHooks)
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    }
    names -= {"load_from_checkpoint", "configure_sharded_model"}  # no method; excludes the next
    assert len(names) > 60
    return type("EveryHook", (Plain,), {name: recorded(name) for name in names})


def test_every_hook_fires_in_the_order_of_an_ordinary_trainer(
    make_rank_context: MakeRankContext,
) -> None:
    context = make_rank_context(every_hook_overridden()(), local_epochs=2, clip_grad=1.0)
    CALLS.clear()
    by_executor(LightningTrainer(), context)
    found = [*CALLS]
    CALLS.clear()
    by_hand(context.replica.module, local_training(context), gradient_clip_val=1.0)
    assert found == CALLS
    hooks = {
        *("prepare_data", "setup", "configure_callbacks", "configure_model", "on_fit_start"),
        *("on_train_start", "on_train_epoch_start", "on_before_batch_transfer"),
        *("transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start"),
        *("optimizer_step", "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
        *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"),
        *("configure_gradient_clipping", "clip_gradients", "lr_scheduler_step"),
        *("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
    }
    assert hooks <= {*found}
    assert not [name for name in found if "validation" in name or "checkpoint" in name]


@pytest.mark.parametrize("kind", [Plain, *NEED_TRAINER])
@pytest.mark.parametrize("clip_grad", [None, 0.05])
def test_result_equals_an_ordinary_trainer(
    make_rank_context: MakeRankContext, kind: type[Plain], clip_grad: float | None
) -> None:
    if kind in (Manual, Clipping) and clip_grad is not None:
        pytest.skip("Lightning refuses gradient_clip_val for this module")
    context = make_rank_context(kind(), local_epochs=3, clip_grad=clip_grad, batch_size=20)
    found = by_executor(LightningTrainer(), context)
    training = local_training(context)
    expected = by_hand(context.replica.module, training, gradient_clip_val=clip_grad)
    assert torch.equal(found.params, expected.params)
    assert torch.equal(found.buffers, expected.buffers)
    assert not torch.equal(found.params, context.replica.layout.read_params())


class OneCycle(Plain):
    """Its scheduler changes the momentum, too."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


NETWORKS: dict[str, Callable[[], nn.Module | None]] = {
    "default": lambda: None,
    "plain": Plain,
    "one cycle": OneCycle,
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("attack", ATTACK_SETTINGS)
def test_plain_modules_give_the_bits_of_sequential(
    make_rank_context: MakeRankContext, attack: str, network: str
) -> None:
    settings = {"clip_grad": 0.3, "weight_decay": 0.01, "local_epochs": 2}
    context = make_rank_context(NETWORKS[network](), attack=attack, **settings)
    sequential, trainer = (
        updates_of(executor, context) for executor in (Sequential(), LightningTrainer())
    )
    assert torch.equal(sequential, trainer)
    assert sequential.norm(dim=1).min() > 1e-3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_any_settings_give_the_bits_of_sequential(
    make_rank_context: MakeRankContext, settings: dict[str, Any]
) -> None:
    context = make_rank_context(attack="constrain_and_scale", **settings)
    sequential, trainer = (
        updates_of(executor, context) for executor in (Sequential(), LightningTrainer())
    )
    assert torch.equal(sequential, trainer)


@pytest.mark.parametrize("network", NETWORKS)
def test_mixed_precision_gives_the_bits_of_sequential(
    make_rank_context: MakeRankContext, network: str
) -> None:
    """Also with clipping, which Lightning's own plugin refuses for fused optimizers."""
    context = make_rank_context(NETWORKS[network](), attack="constrain_and_scale", clip_grad=0.3)
    full = updates_of(Sequential(), context)
    context.replica.fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    sequential, trainer = (
        updates_of(executor(precision="bf16-mixed"), context)
        for executor in (Sequential, LightningTrainer)
    )
    assert torch.equal(sequential, trainer)
    assert not torch.equal(sequential, full)


def train(context: RankContext, hooks: AttackHooks | None, **changes: Any) -> FlatModel:
    """Train participant 0 by the Trainer, malicious if there are hooks."""
    round_ = first_round(context)
    out = FlatModel(torch.empty_like(round_.params), torch.empty_like(round_.buffers))
    training = replace(local_training(context), hooks=hooks, **changes)
    LightningTrainer().backend(context.replica, context.config).fit(round_.model, [training], [out])
    context.replica.layout.write(*round_.model)
    return out


def same_loss(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    return loss


def no_projection(params: Sequence[Tensor]) -> None:
    pass


class ManualSgd(Plain):
    """Manual optimization that does what automatic optimization does for `PlainSgd`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(batch))
        optimizer.step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return self.optimizer()


class PlainSgd(Plain):
    def configure_optimizers(self) -> Any:
        return self.optimizer()


@pytest.mark.parametrize("attack", ["constrain_and_scale", "edge_case", "adaptive_baybfed"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_attacks_keep_their_effect_in_manual_optimization(
    make_rank_context: MakeRankContext, attack: str, precision: str
) -> None:
    updates = []
    for kind in (PlainSgd, ManualSgd):
        torch.manual_seed(0)
        context = make_rank_context(kind(), attack=attack)
        context.replica.fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        context.replica.layout.write(*first_round(make_rank_context(_seeded_plain())).model)
        updates.append(updates_of(LightningTrainer(precision=precision), context))
    assert torch.equal(*updates)


def _seeded_plain() -> Plain:
    torch.manual_seed(1)
    return PlainSgd()


@pytest.mark.parametrize("kind", [PlainSgd, ManualSgd, Manual])
def test_objective_and_projection_reach_every_step(
    make_rank_context: MakeRankContext, kind: type[Plain]
) -> None:
    context = make_rank_context(kind(), batch_size=20, local_epochs=1)
    names = context.replica.layout.layers
    shapes = [tuple(param.shape) for param in context.replica.layout.params]
    seen: list[Any] = []

    def objective(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
        assert [tuple(param.shape) for param in params] == shapes
        return 0 * loss + 3 * sum(param.sum() for param in params)

    def project(params: Sequence[Tensor]) -> None:
        assert [tuple(param.shape) for param in params] == shapes
        seen.append(params)
        with torch.no_grad():
            params[-1].fill_(len(seen))

    honest = train(context, None)
    out = train(context, AttackHooks(TrainingOverrides(), objective, project))
    n_batches = -(-len(local_training(context).samples(0)[1]) // 20)
    assert len(seen) == n_batches * (2 if kind is Manual else 1)
    assert len(names) == len(shapes)
    last = [*names.values()][-1]
    assert out.params[last].eq(len(seen)).all()
    assert not torch.equal(honest.params, out.params)


@pytest.mark.parametrize("kind", [PlainSgd, ManualSgd])
def test_objectives_have_full_precision(
    make_rank_context: MakeRankContext, kind: type[Plain]
) -> None:
    """As in the fast loop, also in `manual_backward`, which training_step calls in autocast."""
    dtypes: list[torch.dtype] = []

    def objective(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
        dtypes.append((params[0] @ params[0].T).dtype)
        return loss

    context = make_rank_context(kind())
    context.replica.fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    train(context, AttackHooks(TrainingOverrides(), objective, no_projection))
    assert {*dtypes} == {torch.float32}


@pytest.mark.parametrize("kind", [Plain, Manual])
def test_an_attack_overrides_every_learning_rate(
    make_rank_context: MakeRankContext, kind: type[Plain]
) -> None:
    """Also those of schedulers that the module steps by hand."""
    rates: list[list[float]] = []

    class Recording(kind):  # type: ignore[misc, valid-type]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates[-1].append(optimizer.param_groups[0]["lr"])

    context = make_rank_context(Recording(), batch_size=30)
    overrides = TrainingOverrides(lr=0.02, lr_decay=0.1, lr_decay_at=[0.5])
    for hooks in (None, AttackHooks(overrides, same_loss, no_projection)):
        rates.append([])
        train(context, hooks, epochs=2)
    honest, malicious = rates
    half = len(malicious) // 2
    assert malicious == pytest.approx([0.02] * half + [0.002] * half)
    assert honest[0] != 0.02
    assert len({*honest}) > 1


def test_losses_that_bypass_the_attack_are_a_user_error(
    make_rank_context: MakeRankContext,
) -> None:
    class Bypassing(ManualSgd):
        def training_step(self, batch: Batch, batch_idx: int) -> None:
            self.loss(batch).backward()
            self.optimizers().step()  # type: ignore[union-attr]

    context = make_rank_context(Bypassing())
    train(context, None)
    with pytest.raises(UserError, match=r"must call self\.manual_backward"):
        train(context, AttackHooks(TrainingOverrides(), same_loss, no_projection))


def test_projection_happens_once_for_an_optimizer_that_extends_another(
    make_rank_context: MakeRankContext,
) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Extended(Plain):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    calls: list[int] = []
    hooks = AttackHooks(TrainingOverrides(), same_loss, lambda params: calls.append(1))
    context = make_rank_context(Extended(), batch_size=20, local_epochs=1)
    train(context, hooks)
    assert len(calls) == -(-len(local_training(context).samples(0)[1]) // 20)


@pytest.mark.parametrize("kind", [Remembering, *NEED_TRAINER])
def test_clients_share_no_state(make_rank_context: MakeRankContext, kind: type[Plain]) -> None:
    context = make_rank_context(kind())
    before = copy.deepcopy(vars(context.replica.module))
    alone = by_executor(LightningTrainer(), context, position=2)
    updates = updates_of(LightningTrainer(), context)
    assert torch.equal(updates[2], alone.params - first_round(context).params)
    assert vars(context.replica.module).keys() == before.keys()
    assert getattr(context.replica.module, "n_steps", 0) == 0


def test_trained_clients_are_freed(
    make_rank_context: MakeRankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for the garbage collector: copies of a large model would fill the memory."""
    clients: list[weakref.ref[LightningModule]] = []

    def recording(module: LightningModule) -> LightningModule:
        assert not any(client() for client in clients)
        client = copy.deepcopy(module)
        clients.append(weakref.ref(client))
        return client

    monkeypatch.setattr("fedbench.engine.model_replica._copied", recording)
    context = make_rank_context(Plain(), attack="constrain_and_scale")
    gc.disable()
    try:
        updates_of(LightningTrainer(), context)
    finally:
        gc.enable()
    assert len(clients) > 8


def test_clients_do_not_see_other_ranks(make_rank_context: MakeRankContext, tmp_path: Path) -> None:
    """Each of two ranks would otherwise wait for the other to prepare data."""

    class Preparing(Plain):
        def prepare_data(self) -> None:
            assert not distributed.is_initialized()

        def on_train_start(self) -> None:
            assert (self.global_rank, self.trainer.world_size) == (0, 1)

    context = make_rank_context(Preparing())
    expected = by_executor(LightningTrainer(), context)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    environment = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "3"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            found = by_executor(LightningTrainer(), context)
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()
    assert torch.equal(found.params, expected.params)


def test_trainer_prints_and_writes_nothing(
    make_rank_context: MakeRankContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Talkative(Plain):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(every_n_train_steps=1, save_last=True), LearningRateMonitor()]

        def on_train_start(self) -> None:
            self.logger.experiment.add_scalar("lr", 1)  # type: ignore[union-attr]
            warnings.warn("the user's own warning", stacklevel=1)

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    context = make_rank_context(Talkative())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_executor(LightningTrainer(), context)
    assert [str(warning.message) for warning in caught] == ["the user's own warning"]
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []


class Skipping(PlainSgd):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx % 2 else None


def test_none_skips_a_batch(make_rank_context: MakeRankContext) -> None:
    context = make_rank_context(Skipping(), batch_size=10)
    sequential, trainer = (by_executor(e, context) for e in (Sequential(), LightningTrainer()))
    assert torch.equal(sequential.params, trainer.params)
    expected = by_hand(context.replica.module, local_training(context))
    assert torch.equal(trainer.params, expected.params)
    assert not torch.equal(trainer.params, context.replica.layout.read_params())


@pytest.mark.parametrize("executor", [Sequential(), LightningTrainer()])
def test_a_client_without_any_loss_is_a_user_error(
    make_rank_context: MakeRankContext, executor: Any
) -> None:
    class Forgetful(PlainSgd):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.loss(batch)

    context = make_rank_context(Forgetful())
    with pytest.raises(UserError, match=r"^Forgetful.training_step must return a loss, got None"):
        by_executor(executor, context)


def test_clip_grad_with_manual_optimization_is_a_user_error(
    make_rank_context: MakeRankContext,
) -> None:
    context = make_rank_context(Manual(), clip_grad=0.5)
    with pytest.raises(UserError, match=r"^clip_grad=0.5: must be null, because Manual optimizes"):
        RankGroup(Auto(), context)


class Growing(Plain):
    """Adds a layer when it is set up for training."""

    def setup(self, stage: str) -> None:
        self.extra = nn.Linear(10, 10)


class Thawing(Plain):
    """Unfreezes a layer during training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def on_train_start(self) -> None:
        self.layers[1].requires_grad_(True)


@pytest.mark.parametrize(("kind", "name"), [(Growing, "extra.bias"), (Thawing, "layers.1.bias")])
def test_parameters_that_appear_in_training_are_a_user_error(
    make_rank_context: MakeRankContext, kind: type[Plain], name: str
) -> None:
    with pytest.raises(UserError, match=rf"{kind.__name__}: training changed .* \({name}"):
        by_executor(LightningTrainer(), make_rank_context(kind()))


def test_hooks_may_freeze_layers(make_rank_context: MakeRankContext) -> None:
    class Freezing(Plain):
        def on_fit_start(self) -> None:
            self.layers[1].requires_grad_(False)

    context = make_rank_context(Freezing())
    out = by_executor(LightningTrainer(), context)
    before, layers = context.replica.layout.read_params(), context.replica.layout.layers
    frozen = layers["layers.1.weight"]
    assert torch.equal(out.params[frozen], before[frozen])
    assert not torch.equal(out.params, before)


def test_modules_that_cannot_be_copied_are_a_user_error(
    make_rank_context: MakeRankContext, tmp_path: Path
) -> None:
    context = make_rank_context(Plain())
    with (tmp_path / "open").open("w") as file:
        context.replica.module.file = file
        with pytest.raises(UserError, match=r"^Plain: cannot be copied for each client \(TypeErr"):
            by_executor(LightningTrainer(), context)


@pytest.mark.parametrize("executor", [Sequential(), LightningTrainer()])
def test_layers_of_configure_model_are_trained(
    make_rank_context: MakeRankContext, executor: Any
) -> None:
    class Late(PlainSgd):
        n_calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.head: nn.Module | None = None

        def configure_model(self) -> None:
            Late.n_calls += 1
            if self.head is None:
                self.head = nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            assert self.head is not None
            return self.head(super().forward(x))  # type: ignore[no-any-return]

    context = make_rank_context(Late())
    assert Late.n_calls == 1
    place = context.replica.layout.layers["head.weight"]
    out = by_executor(executor, context)
    assert not torch.equal(out.params[place], context.replica.layout.read_params()[place])


@pytest.mark.parametrize("executor", [Sequential(), LightningTrainer()])
def test_parts_in_eval_mode_stay_in_it(make_rank_context: MakeRankContext, executor: Any) -> None:
    """As in Lightning, which leaves the modes of layers alone."""
    module = PlainSgd()
    module.layers[2].eval()  # batch norm: keeps its running statistics
    context = make_rank_context(module)
    context.replica.module.eval()
    out = by_executor(executor, context)
    assert torch.equal(out.buffers, context.replica.layout.read_buffers())
    context.replica.train_mode()
    expected = by_hand(context.replica.module, local_training(context))
    assert torch.equal(out.params, expected.params)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt)])
def test_an_interrupt_reaches_the_caller(
    make_rank_context: MakeRankContext, number: signal.Signals, raised: type[BaseException]
) -> None:
    class Interrupted(Plain):
        def on_train_start(self) -> None:
            signal.raise_signal(number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(raised):
        by_executor(LightningTrainer(), make_rank_context(Interrupted()))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_sigterm_ends_the_process_as_usual(make_rank_context: MakeRankContext) -> None:
    class Terminated(Plain):
        def on_train_start(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(SystemExit):
            by_executor(LightningTrainer(), make_rank_context(Terminated()))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received[-1] == signal.SIGTERM


def test_failures_name_the_users_method(make_rank_context: MakeRankContext) -> None:
    class Failing(Plain):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.loss((batch[0], batch[1] + 10))

    for executor in (Sequential(), LightningTrainer()):
        context = make_rank_context(Failing())
        line = r"^client 0 in round 0: Failing.training_step: IndexError: Target \d+ is out of boun"
        with pytest.raises(UserError, match=line) as caught:
            updates_of(executor, context)
        assert isinstance(caught.value.__cause__, IndexError)  # for FEDBENCH_TRACEBACK=1


def test_first_line_of_a_run_gives_the_reason(make_rank_context: MakeRankContext) -> None:
    ranks = RankGroup(Auto(), make_rank_context(Epochs()))
    reason = NEED_TRAINER[Epochs]
    assert str(ranks) == f"trainer ({reason}) on 1 process"
    assert str(RankGroup(LightningTrainer(), make_rank_context())) == "trainer on 1 process"
    assert str(RankGroup(Auto(), make_rank_context(Plain()))) == "sequential on 1 process"


def test_every_sample_of_every_epoch_is_used(make_rank_context: MakeRankContext) -> None:
    """Augmented data sets give other samples in every epoch."""
    epochs: list[int] = []
    context = make_rank_context(Plain(), batch_size=20)
    training = local_training(context)
    x, y = training.samples(0)

    def samples(epoch: int) -> Batch:
        epochs.append(epoch)
        return x, y

    changed: LocalTraining = replace(training, samples=samples, epochs=3)
    assert len(y) > 20
    train(context, None, samples=changed.samples, epochs=3)
    assert [epoch for i, epoch in enumerate(epochs) if epoch or not i] == [0, 1, 2]


HOOKED_MODEL = """
from dataclasses import dataclass

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn

from fedbench.models import MODELS, Model


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 10))
        self.seen = torchmetrics.MeanMetric()

    def forward(self, x):
        return self.head(self.layers(x))

    def prepare_data(self):  # Lightning waits for all ranks here
        pass

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1].long())
        self.seen(loss.detach())
        self.log("seen", self.seen, sync_dist=True)
        return loss / self.seen.compute()  # torchmetrics averages over all ranks here

    def on_after_backward(self):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@MODELS.register("hooked")
@dataclass(frozen=True)
class Hooked(Model):
    def build(self, sample_shape, n_classes):
        return Net()
"""


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    plugins = install(
        tmp_path / "site",
        "[fedbench.models]\nhooked = theirs:Hooked\n",
        HOOKED_MODEL,
        {"model/hooked": "name: hooked\n"},
    )
    command = [plugins.searchpath, "model=hooked", "n_clients=5", "rounds=2", "pmr=0.4"]
    results = []
    for devices, plural in ((1, ""), (2, "es")):
        ended = fedbench(
            *command,
            *(f"executor.devices={devices}", f"out=on{devices}"),
            cwd=tmp_path,
            env=plugins.env,
        )
        assert ended.code == 0, ended
        choice = f"trainer (Net overrides on_after_backward) on {devices} process{plural}"
        assert ended.out[0].endswith(choice)
        assert ended.err == []
        results.append(result(run_folder(tmp_path / f"on{devices}")))
    assert results[0] == results[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on1", "on2", "site"]
