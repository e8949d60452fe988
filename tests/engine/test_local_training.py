"""engine.local_training: the steps of a hand-written loop, for any LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView, BackdoorAttack, TrainingOverrides
from fedbench.engine import local_training
from fedbench.engine.local_training import AttackHooks, Batch, Classifier, LocalTraining
from fedbench.errors import UserError
from fedbench.federation import Federation

Make = Callable[..., Federation]


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(50, 6, generator=rng), torch.randint(0, 3, (50,), generator=rng)


def linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(6, 3)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def fixed_samples(x: Tensor, y: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the same samples in every epoch."""
    return lambda epoch: (x, y)


def train(
    module: LightningModule,
    samples: Callable[[int], Batch],
    fabric: Fabric,
    *,
    clip_grad: float | None = None,
    **settings: Any,
) -> None:
    local_training.train(module, LocalTraining(samples, **settings), fabric, clip_grad)


def test_training_is_sgd_with_momentum_on_shuffled_batches(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    x, y = data
    module = Classifier(linear(), lr=0.1, momentum=0.9, weight_decay=0.01)
    train(module, fixed_samples(x, y), fabric, epochs=2, batch_size=16, rng=rng())

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


def test_samples_may_differ_between_epochs(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    epochs = []

    def samples(epoch: int) -> tuple[Tensor, Tensor]:
        epochs.append(epoch)
        return data[0] + epoch, data[1]

    changing, fixed = Classifier(linear(), lr=0.1), Classifier(linear(), lr=0.1)
    train(changing, samples, fabric, epochs=3, batch_size=50, rng=rng())
    assert epochs == [0, 1, 2]
    train(fixed, fixed_samples(*data), fabric, epochs=3, batch_size=50, rng=rng())
    assert not torch.equal(changing.network.weight, fixed.network.weight)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_clip_grad_bounds_the_norm_of_all_gradients_together(
    data: tuple[Tensor, Tensor], fabric: Fabric, clip: float
) -> None:
    clipped, free = Classifier(linear(), lr=1.0), Classifier(linear(), lr=1.0)
    train(clipped, fixed_samples(*data), fabric, epochs=1, batch_size=50, rng=rng(), clip_grad=clip)
    train(free, fixed_samples(*data), fabric, epochs=1, batch_size=50, rng=rng())
    start = nn.utils.parameters_to_vector(linear().parameters()).detach()
    # One step at lr 1 moves by the gradient, clipped or not.
    moved, gradient = (
        nn.utils.parameters_to_vector(m.parameters()).detach() - start for m in (clipped, free)
    )
    assert gradient.norm() > 0.05
    expected = gradient * min(1.0, clip / float(gradient.norm()))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_clients_do_not_share_momentum(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    module, start = Classifier(linear(), lr=0.1, momentum=0.9), linear().state_dict()
    results = []
    for _ in range(2):
        module.network.load_state_dict(start)
        train(module, fixed_samples(*data), fabric, epochs=1, batch_size=16, rng=rng())
        results.append(module.network.weight.detach().clone())
    assert torch.equal(*results)


def test_attack_overrides_lr_and_objective(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    unchanged = Classifier(linear(), lr=0.1)
    no_loss = replace(hooks(TrainingOverrides()), objective=lambda loss, params: 0 * loss)
    train(
        unchanged, fixed_samples(*data), fabric, epochs=1, batch_size=16, rng=rng(), hooks=no_loss
    )
    assert torch.equal(unchanged.network.weight, linear().weight)
    small, large = (Classifier(linear(), lr=0.1) for _ in range(2))
    slow = hooks(TrainingOverrides(lr=0.01))
    train(small, fixed_samples(*data), fabric, epochs=1, batch_size=50, rng=rng(), hooks=slow)
    train(large, fixed_samples(*data), fabric, epochs=1, batch_size=50, rng=rng())
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
def test_single_left_over_sample_joins_the_batch_before(
    fabric: Fabric, n: int, batch_size: int, sizes: list[int]
) -> None:
    seen = []

    class RecordingClassifier(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            seen.append(len(batch[1]))
            return super().training_step(batch, batch_idx)

    x, y = torch.zeros(n, 6), torch.zeros(n, dtype=torch.long)
    module, data = RecordingClassifier(linear(), 0.1), fixed_samples(x, y)
    train(module, data, fabric, epochs=1, batch_size=batch_size, rng=rng())
    assert seen == sizes


class UserModule(LightningModule):
    """Brings its own loss (in a dict), optimizer and scheduler."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": nn.functional.cross_entropy(self(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        self.used = optimizer
        return {
            "plain": optimizer,
            "list": [optimizer],
            "dict": {"optimizer": optimizer, "lr_scheduler": halving},
            "pair": ([optimizer], [halving]),
            "per step": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": halving, "interval": "step"},
            },
            "two": [optimizer, torch.optim.Adam(self.parameters())],
            "none": None,
        }[self.form]


@pytest.mark.parametrize(
    ("form", "final_lr"),
    [("plain", 0.1), ("list", 0.1), ("dict", 0.025), ("pair", 0.025), ("per step", 0.1 / 2**8)],
)
def test_any_lightning_module_trains(
    data: tuple[Tensor, Tensor], fabric: Fabric, form: str, final_lr: float
) -> None:
    module = UserModule(form)
    before = nn.functional.cross_entropy(module(data[0]), data[1])
    train(module, fixed_samples(*data), fabric, epochs=2, batch_size=16, rng=rng())  # 8 steps
    assert nn.functional.cross_entropy(module(data[0]), data[1]) < before
    assert module.used.param_groups[0]["lr"] == pytest.approx(final_lr)


@pytest.mark.parametrize("form", ["two", "none"])
def test_modules_without_exactly_one_optimizer_are_a_user_error(
    data: tuple[Tensor, Tensor], fabric: Fabric, form: str
) -> None:
    with pytest.raises(UserError, match="must return one optimizer"):
        train(UserModule(form), fixed_samples(*data), fabric, epochs=1, batch_size=16, rng=rng())


def test_training_step_without_a_loss_is_a_user_error(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    class NoLoss(UserModule):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            return None

    with pytest.raises(UserError, match="must return a loss"):
        train(NoLoss("plain"), fixed_samples(*data), fabric, epochs=1, batch_size=16, rng=rng())


@pytest.mark.filterwarnings("error")
def test_logging_has_no_effect(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    class Part(LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            self.log("size", float(len(x)))
            return x

    class Logging(UserModule):
        def __init__(self, logs: bool) -> None:
            super().__init__()
            self.part, self.logs = Part(), logs

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if self.logs:
                self.log("loss", output["loss"], prog_bar=True, sync_dist=True)
                self.log_dict({"a": output["loss"], "b": self.part(batch[0]).mean()})
            return output

    results = []
    for logs in (True, False):
        module = Logging(logs)
        train(module, fixed_samples(*data), fabric, epochs=2, batch_size=16, rng=rng())
        results.append(module.layer.weight)
        assert "log" not in vars(module)
    assert torch.equal(*results)


def test_training_step_may_leave_out_the_index(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    class NoIndex(UserModule):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
            return super().training_step(batch, 0)

    modules = [NoIndex(), UserModule()]
    for module in modules:
        train(module, fixed_samples(*data), fabric, epochs=2, batch_size=16, rng=rng())
    assert torch.equal(modules[0].layer.weight, modules[1].layer.weight)


def hooks(
    training: TrainingOverrides, project: Callable[[Sequence[Tensor]], None] = lambda params: None
) -> AttackHooks:
    """Return hooks that keep the module's loss."""
    return AttackHooks(training, objective=lambda loss, params: loss, project=project)


class RecordingModule(UserModule):
    """Uses SGD with two parameter groups; records their learning rates at every step."""

    def __init__(self, scheduler: str | None = None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.lrs: list[tuple[float, ...]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.lrs.append(tuple(group["lr"] for group in self.used.param_groups))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.4}]
        self.used: Any = torch.optim.SGD(groups, lr=0.2)
        if self.scheduler is None:
            return self.used
        if self.scheduler == "step":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(self.used, step_size=1, gamma=0.5)
        else:
            scheduler = torch.optim.lr_scheduler.LambdaLR(self.used, lambda t: 1 / (1 + t))
        interval = "step" if self.scheduler == "lambda per step" else "epoch"
        return {
            "optimizer": self.used,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval},
        }


def recorded_lrs(
    data: tuple[Tensor, Tensor],
    fabric: Fabric,
    overrides: TrainingOverrides | None,
    epochs: int,
    scheduler: str | None = None,
) -> list[tuple[float, ...]]:
    """Return (lr of the weight, lr of the bias) at every step; an epoch has two steps."""
    module = RecordingModule(scheduler)
    malicious = None if overrides is None else hooks(overrides)
    train(
        module,
        fixed_samples(*data),
        fabric,
        epochs=epochs,
        batch_size=25,
        rng=rng(),
        hooks=malicious,
    )
    assert len(module.lrs) == 2 * epochs
    if scheduler != "lambda per step":
        assert module.lrs[::2] == module.lrs[1::2], "must be constant within an epoch"
    return module.lrs


class TestTrainingOverrides:
    """Learning rate, epochs and projection of malicious clients."""

    def test_by_hand(self, data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
        # 15 epochs; lr 0.05 drops to a tenth at epochs 0.2 * 15 = 3 and 0.8 * 15 = 12:
        # 3 epochs at 0.05, 9 at 0.005, 3 at 0.0005. Both parameter groups use it.
        overrides = TrainingOverrides(lr=0.05, lr_decay=0.1, lr_decay_at=[0.2, 0.8])
        used = recorded_lrs(data, fabric, overrides, epochs=15)[::2]
        expected = [0.05] * 3 + [0.005] * 9 + [0.0005] * 3
        assert [lr for lr, _ in used] == pytest.approx(expected, rel=1e-12)
        assert all(weight == bias for weight, bias in used)

    def test_decay_without_lr_starts_from_the_honest_lrs(
        self, data: tuple[Tensor, Tensor], fabric: Fabric
    ) -> None:
        overrides = TrainingOverrides(lr_decay=0.5, lr_decay_at=[0.5])
        used = recorded_lrs(data, fabric, overrides, epochs=4)[::2]
        assert used == [(0.2, 0.4), (0.2, 0.4), (0.1, 0.2), (0.1, 0.2)]

    @pytest.mark.parametrize(
        "overrides",
        [
            None,
            TrainingOverrides(),
            TrainingOverrides(epochs=3),  # the caller applies it
            TrainingOverrides(lr_decay=0.1),  # without epochs to decay at
            TrainingOverrides(lr_decay=1.0, lr_decay_at=[0.0]),
        ],
    )
    @pytest.mark.parametrize(
        ("scheduler", "factors"),
        [
            (None, [1, 1, 1, 1, 1, 1]),
            ("step", [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
            ("lambda", [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3]),
            ("lambda per step", [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        ],
    )
    def test_modules_scheduler_applies_unless_lr_is_overridden(
        self,
        data: tuple[Tensor, Tensor],
        fabric: Fabric,
        overrides: TrainingOverrides | None,
        scheduler: str | None,
        factors: list[float],
    ) -> None:
        used = recorded_lrs(data, fabric, overrides, epochs=3, scheduler=scheduler)
        for lrs, factor in zip(used, factors, strict=True):
            assert lrs == pytest.approx((0.2 * factor, 0.4 * factor))

    @pytest.mark.parametrize("scheduler", ["step", "lambda", "lambda per step"])
    def test_overridden_lr_replaces_the_modules_scheduler(
        self, data: tuple[Tensor, Tensor], fabric: Fabric, scheduler: str
    ) -> None:
        fixed = recorded_lrs(data, fabric, TrainingOverrides(lr=0.03), 3, scheduler)
        assert fixed == [(0.03, 0.03)] * 6
        decaying = TrainingOverrides(lr_decay=0.5, lr_decay_at=[0.5])
        used = recorded_lrs(data, fabric, decaying, 4, scheduler)
        assert used == [(0.2, 0.4)] * 4 + [(0.1, 0.2)] * 4

    @settings(derandomize=True, deadline=None, max_examples=300)
    @given(
        epochs=st.integers(1, 40),
        tenths=st.lists(st.integers(0, 10), max_size=4),
        decay=st.sampled_from([0.5, 0.1, 2.0]),
        lr=st.sampled_from([None, 0.25]),
    )
    def test_lr_in_an_epoch(
        self, epochs: int, tenths: list[int], decay: float, lr: float | None
    ) -> None:
        """Decays once per entry of lr_decay_at that has passed, by exact fractions."""
        overrides = TrainingOverrides(lr=lr, lr_decay=decay, lr_decay_at=[k / 10 for k in tenths])
        for epoch in range(epochs):
            n = sum(Fraction(epoch, epochs) >= Fraction(k, 10) for k in tenths)
            expected = (0.125 if lr is None else lr) * decay**n
            assert overrides.lr_in(epoch, epochs, default=0.125) == pytest.approx(
                expected, rel=1e-12
            )

    def test_steps_use_the_overridden_lr(self, data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
        """Compare to a loop by hand: 3 epochs of one batch at 0.5, 0.5 and 0.05."""
        x, y = data
        module = Classifier(linear(), lr=0.1)
        malicious = hooks(TrainingOverrides(lr=0.5, lr_decay=0.1, lr_decay_at=[0.6]))
        train(
            module, fixed_samples(x, y), fabric, epochs=3, batch_size=50, rng=rng(), hooks=malicious
        )
        weight, bias = (p.detach().clone().requires_grad_() for p in linear().parameters())
        for lr in (0.5, 0.5, 0.05):
            loss = nn.functional.cross_entropy(x @ weight.T + bias, y)
            for p, g in zip((weight, bias), torch.autograd.grad(loss, [weight, bias]), strict=True):
                p.data.sub_(lr * g)
        torch.testing.assert_close(module.network.weight, weight)
        torch.testing.assert_close(module.network.bias, bias)

    def test_projection_follows_every_step(
        self, data: tuple[Tensor, Tensor], fabric: Fabric
    ) -> None:
        """Compare to a loop by hand, with momentum and gradients at the projected weights.

        The projection moves weights halfway to 1, so that the result reveals a missing or extra
        call.
        """
        x, y = data
        module = Classifier(linear(), lr=0.1, momentum=0.9)
        calls = []

        def project(params: Sequence[Tensor]) -> None:
            calls.append(module.network.weight.detach().clone())
            module.network.weight.data.add_(1).mul_(0.5)

        malicious = hooks(TrainingOverrides(), project)
        train(
            module, fixed_samples(x, y), fabric, epochs=2, batch_size=16, rng=rng(), hooks=malicious
        )

        weight, bias = (p.detach().clone().requires_grad_() for p in linear().parameters())
        momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
        draw = rng()
        seen = []
        for _ in range(2):
            order = torch.randperm(50, generator=draw)
            for batch in (order[0:16], order[16:32], order[32:48], order[48:50]):
                loss = nn.functional.cross_entropy(x[batch] @ weight.T + bias, y[batch])
                gradients = torch.autograd.grad(loss, [weight, bias])
                for p, m, g in zip((weight, bias), momenta, gradients, strict=True):
                    m.mul_(0.9).add_(g)
                    p.data.sub_(0.1 * m)
                seen.append(weight.detach().clone())
                weight.data.add_(1).mul_(0.5)
        assert len(calls) == 8
        torch.testing.assert_close(calls, seen)
        torch.testing.assert_close(module.network.weight, weight)
        torch.testing.assert_close(module.network.bias, bias)


@dataclass(frozen=True)
class StepCounter(BackdoorAttack):
    """Poisons nothing; `project` counts steps in thousands in the last parameter."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Any) -> tuple[Tensor, Tensor]:
        return x, y

    def project(self, params: Any, view: AttackView) -> None:
        with torch.no_grad():
            before = params[-1][-1].round(decimals=-3)
            params[-1][-1] = before + 1000


class TestAttacksInAFederation:
    """The rank_context applies an attack's overrides to malicious clients only."""

    @staticmethod
    def updates(server: Federation) -> tuple[Tensor, Tensor]:
        """Return the updates of honest and of malicious clients in round 0."""
        round_ = server._select(replace(server.initial(), next_round=0))
        updates, _ = server.ranks.train(round_)
        malicious = torch.tensor([p.malicious for p in round_.participants])
        return updates[~malicious], updates[malicious]

    @pytest.mark.parametrize(("epochs", "n_epochs"), [(None, 2), (1, 1), (3, 3)])
    def test_epochs(self, federation: Make, epochs: int | None, n_epochs: int) -> None:
        """Only malicious clients count their steps."""
        server = federation(attack=StepCounter(epochs=epochs), local_epochs=2, batch_size=20)
        honest, malicious = self.updates(server)
        steps = (malicious[:, -1] / 1000).round().tolist()
        shards = [
            server.rank_context.data.shards[client]
            for client in sorted(server.rank_context.selection.malicious)
        ]
        assert steps == [n_epochs * -(-len(shard) // 20) for shard in shards]
        assert honest.abs().max() < 100

    def test_lr(self, federation: Make) -> None:
        """With one step and nothing poisoned, an update is proportional to the lr."""

        @dataclass(frozen=True)
        class LargerLr(Attack):
            lr: float = 0.1

            @property
            def training(self) -> TrainingOverrides:
                return TrainingOverrides(lr=self.lr)

        settings = {"batch_size": 600, "lr": 0.1}
        honest, malicious = self.updates(federation(attack=LargerLr(), **settings))
        honest_again, larger = self.updates(federation(attack=LargerLr(lr=0.4), **settings))
        assert torch.equal(honest, honest_again)
        torch.testing.assert_close(larger, 4 * malicious, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(
        "name", ["constrain_and_scale", "edge_case", "dba", "multi_backdoor", "adaptive_baybfed"]
    )
    def test_every_targeted_attack_applies_its_training_settings(
        self, federation: Make, name: str
    ) -> None:
        """epochs and lr change the updates; a decay after the last epoch does not."""
        patches = [{"name": "patch", "corner": "top_left"}]
        fixed: dict[str, Any] = {"name": name, "gamma": 1.0, "epochs": None, "backdoors": patches}
        fixed |= {"n_backdoors": 1} if name == "multi_backdoor" else {}
        fixed |= {"eps": None} if name == "edge_case" else {}
        fixed |= {"alpha": 1.0} if name == "adaptive_baybfed" else {}

        def malicious_updates(**training: Any) -> Tensor:
            server = federation(attack=ATTACKS.build(fixed | training), lr=0.05)
            return self.updates(server)[1]

        default = malicious_updates()
        assert torch.equal(malicious_updates(epochs=1, lr=0.05), default)
        assert torch.equal(malicious_updates(lr_decay=0.1, lr_decay_at=[1.0]), default)
        assert not torch.equal(malicious_updates(epochs=2), default)
        assert not torch.equal(malicious_updates(lr=0.01), default)
        assert not torch.equal(malicious_updates(lr_decay=0.1, lr_decay_at=[0.0]), default)
        torch.testing.assert_close(
            malicious_updates(lr_decay=0.2, lr_decay_at=[0.0]), malicious_updates(lr=0.01)
        )
