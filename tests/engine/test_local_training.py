"""Local training: the same steps as a loop written by hand, with any LightningModule."""

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


def always(x: Tensor, y: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The same samples in each epoch."""
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
    train(module, always(x, y), fabric, epochs=2, batch_size=16, rng=rng())

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


def test_every_epoch_has_samples_of_its_own(data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
    asked = []

    def samples(epoch: int) -> tuple[Tensor, Tensor]:
        asked.append(epoch)
        return data[0] + epoch, data[1]

    moved, still = Classifier(linear(), lr=0.1), Classifier(linear(), lr=0.1)
    train(moved, samples, fabric, epochs=3, batch_size=50, rng=rng())
    assert asked == [0, 1, 2]
    train(still, always(*data), fabric, epochs=3, batch_size=50, rng=rng())
    assert not torch.equal(moved.network.weight, still.network.weight)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_gradients_of_all_parameters_together_are_clipped(
    data: tuple[Tensor, Tensor], fabric: Fabric, clip: float
) -> None:
    module, free = Classifier(linear(), lr=1.0), Classifier(linear(), lr=1.0)
    train(module, always(*data), fabric, epochs=1, batch_size=50, rng=rng(), clip_grad=clip)
    train(free, always(*data), fabric, epochs=1, batch_size=50, rng=rng())
    start = nn.utils.parameters_to_vector(linear().parameters()).detach()
    # One step at lr 1 moves by the gradient: as it is, or shortened to the length asked for.
    moved, gradient = (
        nn.utils.parameters_to_vector(m.parameters()).detach() - start for m in (module, free)
    )
    assert gradient.norm() > 0.05
    expected = gradient * min(1.0, clip / float(gradient.norm()))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_momentum_of_one_client_does_not_reach_the_next(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    module, start = Classifier(linear(), lr=0.1, momentum=0.9), linear().state_dict()
    results = []
    for _ in range(2):
        module.network.load_state_dict(start)
        train(module, always(*data), fabric, epochs=1, batch_size=16, rng=rng())
        results.append(module.network.weight.detach().clone())
    assert torch.equal(*results)


def test_an_attacker_can_bring_its_own_lr_and_objective(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    still = Classifier(linear(), lr=0.1)
    nothing = replace(hooks(TrainingOverrides()), objective=lambda loss, params: 0 * loss)
    train(still, always(*data), fabric, epochs=1, batch_size=16, rng=rng(), hooks=nothing)
    assert torch.equal(still.network.weight, linear().weight)
    small, large = (Classifier(linear(), lr=0.1) for _ in range(2))
    slow = hooks(TrainingOverrides(lr=0.01))
    train(small, always(*data), fabric, epochs=1, batch_size=50, rng=rng(), hooks=slow)
    train(large, always(*data), fabric, epochs=1, batch_size=50, rng=rng())
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
    module, data = Recorder(linear(), 0.1), always(x, y)
    train(module, data, fabric, epochs=1, batch_size=batch_size, rng=rng())
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
    train(module, always(*data), fabric, epochs=2, batch_size=16, rng=rng())  # 8 steps
    assert nn.functional.cross_entropy(module(data[0]), data[1]) < before
    assert module.used.param_groups[0]["lr"] == pytest.approx(final_lr)


@pytest.mark.parametrize("form", ["two", "none"])
def test_a_module_without_exactly_one_optimizer_is_refused(
    data: tuple[Tensor, Tensor], fabric: Fabric, form: str
) -> None:
    with pytest.raises(UserError, match="must return one optimizer"):
        train(Brought(form), always(*data), fabric, epochs=1, batch_size=16, rng=rng())


def test_a_training_step_without_a_loss_is_refused(
    data: tuple[Tensor, Tensor], fabric: Fabric
) -> None:
    class Silent(Brought):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            return None

    with pytest.raises(UserError, match="must return a loss"):
        train(Silent("plain"), always(*data), fabric, epochs=1, batch_size=16, rng=rng())


def hooks(
    training: TrainingOverrides, project: Callable[[Sequence[Tensor]], None] = lambda params: None
) -> AttackHooks:
    """Of an attacker whose loss is the module's."""
    return AttackHooks(training, objective=lambda loss, params: loss, project=project)


class Watched(Brought):
    """SGD in two groups, and the learning rates of each step."""

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


def lrs_by_epoch(
    data: tuple[Tensor, Tensor],
    fabric: Fabric,
    own: TrainingOverrides | None,
    epochs: int,
    scheduler: str | None = None,
) -> list[tuple[float, ...]]:
    """(of the weight, of the bias) in each of an epoch's two steps."""
    module = Watched(scheduler)
    malicious = None if own is None else hooks(own)
    train(module, always(*data), fabric, epochs=epochs, batch_size=25, rng=rng(), hooks=malicious)
    assert len(module.lrs) == 2 * epochs
    if scheduler != "lambda per step":
        assert module.lrs[::2] == module.lrs[1::2], "the same in all of an epoch"
    return module.lrs


class TestOwnTraining:
    """A malicious client's learning rate, epochs and constraint."""

    def test_by_hand(self, data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
        # 15 epochs at 0.05, a tenth of it from epoch 0.2 * 15 = 3 and again from 0.8 * 15 = 12:
        # 3 epochs at 0.05, 9 at 0.005, 3 at 0.0005, in both groups whatever theirs were.
        own = TrainingOverrides(lr=0.05, lr_decay=0.1, lr_decay_at=[0.2, 0.8])
        used = lrs_by_epoch(data, fabric, own, epochs=15)[::2]
        expected = [0.05] * 3 + [0.005] * 9 + [0.0005] * 3
        assert [lr for lr, _ in used] == pytest.approx(expected, rel=1e-12)
        assert all(weight == bias for weight, bias in used)

    def test_decay_without_an_lr_starts_from_the_honest_ones(
        self, data: tuple[Tensor, Tensor], fabric: Fabric
    ) -> None:
        own = TrainingOverrides(lr_decay=0.5, lr_decay_at=[0.5])
        used = lrs_by_epoch(data, fabric, own, epochs=4)[::2]
        assert used == [(0.2, 0.4), (0.2, 0.4), (0.1, 0.2), (0.1, 0.2)]

    @pytest.mark.parametrize(
        "own",
        [
            None,
            TrainingOverrides(),
            TrainingOverrides(epochs=3),  # how many there are is not the loop's to decide
            TrainingOverrides(lr_decay=0.1),  # at no epoch
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
    def test_a_schedule_of_the_module_holds_for_whoever_has_no_lr_of_its_own(
        self,
        data: tuple[Tensor, Tensor],
        fabric: Fabric,
        own: TrainingOverrides | None,
        scheduler: str | None,
        factors: list[float],
    ) -> None:
        used = lrs_by_epoch(data, fabric, own, epochs=3, scheduler=scheduler)
        for lrs, factor in zip(used, factors, strict=True):
            assert lrs == pytest.approx((0.2 * factor, 0.4 * factor))

    @pytest.mark.parametrize("scheduler", ["step", "lambda", "lambda per step"])
    def test_a_schedule_of_the_module_does_not_undo_an_attackers_lr(
        self, data: tuple[Tensor, Tensor], fabric: Fabric, scheduler: str
    ) -> None:
        constant = lrs_by_epoch(data, fabric, TrainingOverrides(lr=0.03), 3, scheduler)
        assert constant == [(0.03, 0.03)] * 6
        falling = TrainingOverrides(lr_decay=0.5, lr_decay_at=[0.5])
        used = lrs_by_epoch(data, fabric, falling, 4, scheduler)
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
        """Decayed once for each share of the epochs that are over, in fractions."""
        own = TrainingOverrides(lr=lr, lr_decay=decay, lr_decay_at=[k / 10 for k in tenths])
        for epoch in range(epochs):
            n = sum(Fraction(epoch, epochs) >= Fraction(k, 10) for k in tenths)
            expected = (0.125 if lr is None else lr) * decay**n
            assert own.lr_in(epoch, epochs, default=0.125) == pytest.approx(expected, rel=1e-12)

    def test_the_lr_counts_in_the_steps(self, data: tuple[Tensor, Tensor], fabric: Fabric) -> None:
        """Against the loop by hand: 3 epochs of one batch at 0.5, 0.5 and 0.05."""
        x, y = data
        module = Classifier(linear(), lr=0.1)
        own = hooks(TrainingOverrides(lr=0.5, lr_decay=0.1, lr_decay_at=[0.6]))
        train(module, always(x, y), fabric, epochs=3, batch_size=50, rng=rng(), hooks=own)
        weight, bias = (p.detach().clone().requires_grad_() for p in linear().parameters())
        for lr in (0.5, 0.5, 0.05):
            loss = nn.functional.cross_entropy(x @ weight.T + bias, y)
            for p, g in zip((weight, bias), torch.autograd.grad(loss, [weight, bias]), strict=True):
                p.data.sub_(lr * g)
        torch.testing.assert_close(module.network.weight, weight)
        torch.testing.assert_close(module.network.bias, bias)

    def test_the_constraint_holds_after_every_step(
        self, data: tuple[Tensor, Tensor], fabric: Fabric
    ) -> None:
        """Against the loop by hand, with momentum: gradients are those of projected weights.

        The projection pulls halfway back to 1, so that one more or less is seen in the result.
        """
        x, y = data
        module = Classifier(linear(), lr=0.1, momentum=0.9)
        calls = []

        def project(params: Sequence[Tensor]) -> None:
            calls.append(module.network.weight.detach().clone())
            module.network.weight.data.add_(1).mul_(0.5)

        own = hooks(TrainingOverrides(), project)
        train(module, always(x, y), fabric, epochs=2, batch_size=16, rng=rng(), hooks=own)

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
class Diary(BackdoorAttack):
    """Poisons nothing; its `project` counts steps in the last parameter, far from all others."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Any) -> tuple[Tensor, Tensor]:
        return x, y

    def project(self, params: Any, view: AttackView) -> None:
        with torch.no_grad():
            before = params[-1][-1].round(decimals=-3)
            params[-1][-1] = before + 1000


class TestInAPopulation:
    """What an attack asks of its clients' training, as the simulation gives it to them."""

    @staticmethod
    def updates(made: Federation) -> tuple[Tensor, Tensor]:
        """(of honest, of malicious clients) in round 0."""
        round_ = made._select(replace(made.initial(), next_round=0))
        updates, _ = made.ranks.train(round_)
        malicious = torch.tensor([p.malicious for p in round_.participants])
        return updates[~malicious], updates[malicious]

    @pytest.mark.parametrize(("epochs", "n_epochs"), [(None, 2), (1, 1), (3, 3)])
    def test_epochs_of_its_own(self, federation: Make, epochs: int | None, n_epochs: int) -> None:
        """A malicious client's steps are counted, an honest one's would not be."""
        made = federation(attack=Diary(epochs=epochs), local_epochs=2, batch_size=20)
        honest, malicious = self.updates(made)
        steps = (malicious[:, -1] / 1000).round().tolist()
        shards = [
            made.simulation.data.shards[client]
            for client in sorted(made.simulation.selection.malicious)
        ]
        assert steps == [n_epochs * -(-len(shard) // 20) for shard in shards]
        assert honest.abs().max() < 100

    def test_an_lr_of_its_own(self, federation: Make) -> None:
        """One full batch, one step, nothing poisoned: an update as long as the lr has it."""

        @dataclass(frozen=True)
        class Faster(Attack):
            lr: float = 0.1

            @property
            def training(self) -> TrainingOverrides:
                return TrainingOverrides(lr=self.lr)

        settings = {"batch_size": 600, "lr": 0.1}
        usual, malicious = self.updates(federation(attack=Faster(), **settings))
        honest, faster = self.updates(federation(attack=Faster(lr=0.4), **settings))
        assert torch.equal(usual, honest)
        torch.testing.assert_close(faster, 4 * malicious, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(
        "name", ["constrain_and_scale", "edge_case", "dba", "multi_backdoor", "adaptive_baybfed"]
    )
    def test_every_targeted_attack_trains_as_it_is_set(self, federation: Make, name: str) -> None:
        """Own epochs and lr change what its clients send, a decay at the end of all does not."""
        patches = [{"name": "patch", "corner": "top_left"}]
        fixed: dict[str, Any] = {"name": name, "gamma": 1.0, "epochs": None, "backdoors": patches}
        fixed |= {"n_backdoors": 1} if name == "multi_backdoor" else {}
        fixed |= {"eps": None} if name == "edge_case" else {}
        fixed |= {"alpha": 1.0} if name == "adaptive_baybfed" else {}

        def sent(**training: Any) -> Tensor:
            made = federation(attack=ATTACKS.build(fixed | training), lr=0.05)
            return self.updates(made)[1]

        usual = sent()
        assert torch.equal(sent(epochs=1, lr=0.05), usual)
        assert torch.equal(sent(lr_decay=0.1, lr_decay_at=[1.0]), usual)
        assert not torch.equal(sent(epochs=2), usual)
        assert not torch.equal(sent(lr=0.01), usual)
        assert not torch.equal(sent(lr_decay=0.1, lr_decay_at=[0.0]), usual)
        torch.testing.assert_close(sent(lr_decay=0.2, lr_decay_at=[0.0]), sent(lr=0.01))
