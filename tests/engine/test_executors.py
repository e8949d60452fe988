"""engine.executors: every backend gives the updates of `local_training.train`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.config import RunConfig
from fedbench.data import Dataset
from fedbench.engine import local_training
from fedbench.engine.captured_step import (
    CAPTURE_AFTER,
    CapturedStep,
    GradientFunction,
    can_capture,
    loss_function,
)
from fedbench.engine.executors import EXECUTORS, Auto, Executor, Sequential, Vectorized
from fedbench.engine.local_training import Classifier
from fedbench.engine.ranks import RankGroup
from fedbench.engine.selection import Round
from fedbench.engine.sequential import SequentialBackend
from fedbench.engine.simulation import Simulation
from fedbench.errors import UserError

PUNCTUAL = {  # attacks that use every means a malicious client has in its training
    "constrain_and_scale": {"alpha": 0.5, "epochs": 3, "gamma": "bounded"},
    "edge_case": {"backdoors": ["patch"], "lr": 0.02, "lr_decay": 0.1, "lr_decay_at": [0.5]},
    "adaptive_baybfed": {"epochs": 2},
    "gaussian": {},
    "none": {},
}


@pytest.fixture
def simulation(sample: Dataset, fabric: Fabric) -> Callable[..., Simulation]:
    """Makes one of eight clients, three of them malicious, and a small network."""

    def make(network: nn.Module | None = None, attack: str = "none", **settings: Any) -> Simulation:
        usual = {"n_clients": 8, "pmr": 0.4, "batch_size": 16, "model": {"name": "small"}}
        torch.manual_seed(0)
        network = network or nn.Sequential(
            nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10)
        )
        built = ATTACKS.build({"name": attack, **PUNCTUAL[attack]})
        made = Simulation(RunConfig(**usual | settings), sample, network, built, fabric)
        layout = made.replica.layout
        context = made.backdoor_context(layout.read_params(), layout.read_buffers())
        planted = built.backdoor_settings([{"name": "patch"}])
        made.set_backdoors([BACKDOORS.build({"name": "patch"}).prepare(context) for _ in planted])
        return made

    return make


def first_round(simulation: Simulation) -> Round:
    layout = simulation.replica.layout
    participants = simulation.selection.select(0)
    return Round(0, participants, layout.read_params(), layout.read_buffers())


def groups_of(executor: Executor, simulation: Simulation) -> list[list[int]]:
    participants = simulation.selection.select(0)
    costs = [simulation.data.cost(0, p) for p in participants]
    malicious = [p.malicious for p in participants]
    return executor.backend(simulation.replica, simulation.config).groups(costs, malicious)


def updates(executor: Executor, simulation: Simulation) -> Tensor:
    """[N, P] of a round under attack."""
    round_ = first_round(simulation)
    sent, _ = RankGroup(executor, simulation).train(round_)
    simulation.replica.layout.write(round_.params, round_.buffers)
    return sent


SETTINGS: list[dict[str, Any]] = [
    {},
    {"partition": "dirichlet", "dirichlet_alpha": 0.3},  # clients of very unequal sizes
    {"clip_grad": 0.3, "weight_decay": 0.01},
    {"momentum": 0.0, "local_epochs": 3, "batch_size": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attack", PUNCTUAL)
def test_vectorized_is_sequential_but_for_rounding(
    simulation: Callable[..., Simulation], attack: str, settings: dict[str, Any]
) -> None:
    """In double precision, where rounding cannot turn a ReLU on that is off: to 1e-9."""
    made = simulation(attack=attack, **settings)
    made.replica.module.double()
    decode = made.dataset.decode
    made.replica.decode = lambda x: decode(x).double()
    made.data.dataset = replace(made.dataset)
    object.__setattr__(made.data.dataset, "decode", made.replica.decode)
    one_by_one, stacked = (updates(e, made) for e in (Sequential(), Vectorized(stack=3)))
    assert one_by_one.dtype == torch.float64
    assert one_by_one.norm(dim=1).min() > 1e-3
    torch.testing.assert_close(stacked, one_by_one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_vectorized_stays_within_1e_5_in_single_precision(
    simulation: Callable[..., Simulation], settings: dict[str, Any]
) -> None:
    made = simulation(attack="constrain_and_scale", **settings)
    one_by_one, stacked = (updates(e, made) for e in (Sequential(), Vectorized()))
    assert not torch.equal(stacked, one_by_one)
    errors = (stacked - one_by_one).norm(dim=1) / one_by_one.norm(dim=1)
    assert errors.max() < 1e-5


def test_how_many_are_stacked_does_not_matter(simulation: Callable[..., Simulation]) -> None:
    made = simulation(attack="constrain_and_scale")
    alone, all_at_once = (updates(Vectorized(stack=k), made) for k in (1, 30))
    torch.testing.assert_close(alone, all_at_once, rtol=1e-4, atol=1e-6)


def test_a_stack_takes_clients_of_like_work_together(
    simulation: Callable[..., Simulation],
) -> None:
    made = simulation(attack="constrain_and_scale", partition="dirichlet", dirichlet_alpha=0.3)
    participants = made.selection.select(0)
    groups = groups_of(Vectorized(stack=2), made)
    assert [len(group) for group in groups] == [1, 2, 2, 1, 2]
    assert [{participants[i].malicious for i in group} for group in groups] == (
        [{False}] * 3 + [{True}] * 2
    )
    costs = [[made.data.cost(0, participants[i]) for i in group] for group in groups]
    for kind in (costs[:3], costs[3:]):
        flat = [cost for group in kind for cost in group]
        assert flat == sorted(flat, reverse=True)


def test_cost_counts_what_a_client_trains(simulation: Callable[..., Simulation]) -> None:
    made = simulation(attack="constrain_and_scale", local_epochs=2)  # 3 epochs, and a clean update
    honest, malicious = (
        next(p for p in made.selection.select(0) if p.malicious is kind) for kind in (False, True)
    )
    assert made.data.cost(0, honest) == 2 * len(made.data.shards[honest.client])
    assert made.data.cost(0, malicious) == (3 + 2) * len(made.data.shards[malicious.client])
    assert simulation(attack="gaussian").data.cost(0, malicious) == 0


def test_rounds_of_different_numbers_of_clients_are_stacked_as_one_by_one(
    simulation: Callable[..., Simulation], fabric: Fabric
) -> None:
    """By one trainer for all rounds: benign ones, with data of their own, and attacked ones."""
    benign = {"pretrain_non_iid": 0.0, "partition": "dirichlet", "dirichlet_alpha": 0.3}
    made = simulation(attack="constrain_and_scale", n_clients=[5, 8], pool=10, **benign)
    one_by_one, stacked = (RankGroup(e, made) for e in (Sequential(), Vectorized(stack=6)))
    sizes = set()
    for index in range(-3, 3):
        layout = made.replica.layout
        params, buffers = layout.read_params(), layout.read_buffers()
        round_ = Round(index, made.selection.select(index), params, buffers)
        (expected, _), (found, _) = (ranks.train(round_) for ranks in (one_by_one, stacked))
        layout.write(params, buffers)
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-5
        sizes.add(len(expected))
    assert sizes == {5, 7, 8}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attack", PUNCTUAL)
def test_recorded_steps_give_the_bits_of_the_usual_ones(
    simulation: Callable[..., Simulation],
    attack: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = simulation(attack=attack, **settings)
    repeated = count_calls(monkeypatch, CapturedStep, "__call__")
    recorded = updates(Sequential(), made)
    n_repeated = len(repeated)
    assert n_repeated > 10
    assert torch.equal(updates(Sequential(capture=False), made), recorded)
    assert len(repeated) == n_repeated


@pytest.mark.parametrize("attack", PUNCTUAL)
def test_when_a_stack_is_recorded_changes_no_bit(
    simulation: Callable[..., Simulation], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on what a process has trained before, which results must not."""
    unequal = {"partition": "dirichlet", "dirichlet_alpha": 0.3, "local_epochs": 6}
    made = simulation(attack=attack, **unequal)
    repeated = count_calls(monkeypatch, CapturedStep, "__call__")
    recorded = updates(Vectorized(stack=3), made)
    n_repeated = len(repeated)
    assert n_repeated > 10
    monkeypatch.setattr("fedbench.engine.captured_step.CAPTURE_AFTER", 10**6)
    assert torch.equal(updates(Vectorized(stack=3), made), recorded)
    assert len(repeated) == n_repeated


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """A list that grows by one with every call of the method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(None)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


class Rare(nn.Module):
    """An operation that cannot write into given memory, and one of two results."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.celu(x) + x.std(dim=1, keepdim=True) + x.max(dim=1, keepdim=True)[0]


ACTIVATIONS = [
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Identity(),
    Rare(),
]


@pytest.mark.parametrize("objective", [None, lambda loss, w: loss**2 + 0.1 * w[0].norm()])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_recording_repeats_what_autograd_does(activation: nn.Module, objective: Any) -> None:
    """To the bit, batch after batch, on parameters that change, and without calling the loss."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), activation, nn.Linear(8, 3))
    params = [*network.parameters()]
    loss, calls = loss_function(Classifier(network, 0.1), lambda x: x.float() / 255), []

    def counted(*given: Any) -> Tensor:
        calls.append(1)
        return loss(*given)

    gradients = GradientFunction(counted, params)
    for i in range(CAPTURE_AFTER + 5):
        x, y = torch.randint(256, (5, 3, 4), dtype=torch.uint8), torch.randint(3, (5,))
        value = loss(params, x, y)
        total = value if objective is None else objective(value, params)
        expected = torch.autograd.grad(total, params)
        assert all(map(torch.equal, gradients(x, y, objective), expected))
        assert len(calls) == (1 + (objective is not None)) * min(i + 1, CAPTURE_AFTER) + (
            i + 1 >= CAPTURE_AFTER
        )
        with torch.no_grad():
            for param, gradient in zip(params, expected, strict=True):
                param -= 0.01 * gradient
    calls.clear()
    gradients(x[:3], y[:3])  # another shape
    assert len(calls) == 1


def test_a_recording_serves_honest_and_malicious_clients_in_turn() -> None:
    params = [torch.tensor([1.0, 2.0])]
    gradients = GradientFunction(lambda w, x, y: (w[0] * x).sum() * y, params)
    x, y = torch.tensor([3.0, 4.0]), torch.tensor(2.0)
    for _ in range(CAPTURE_AFTER):
        gradients(x, y)
    for _ in range(2):
        assert gradients(x, y)[0].tolist() == [6, 8]
        assert gradients(x, y, lambda loss, w: 5 * loss + w[0][0])[0].tolist() == [31, 40]
        assert gradients(x, y, lambda loss, w: w[0].sum())[0].tolist() == [1, 1]  # loss unused


class Switched(nn.Module):
    """Not the same operations every time."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Watched(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 2


@pytest.mark.parametrize(
    ("module", "can"),
    [
        (Classifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU()), 0.1), True),
        (Classifier(nn.Linear(4, 2), 0.1), True),
        (Classifier(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), 0.1), False),
        (Classifier(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), 0.1), False),
        (Classifier(nn.Sequential(nn.Linear(4, 2), Switched()), 0.1), False),
        (Watched(nn.Linear(4, 2), 0.1), False),
    ],
)
def test_only_what_is_the_same_every_time_is_recorded(module: Classifier, can: bool) -> None:
    assert can_capture(module) is can


def test_a_network_of_the_users_own_is_not_recorded(simulation: Callable[..., Simulation]) -> None:
    made = simulation(nn.Sequential(nn.Flatten(), nn.Linear(784, 10), Switched()))
    assert SequentialBackend(made.replica, capture=True).captured is None
    assert updates(Sequential(), made).isfinite().all()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Dropout(0.2), "dropout"),
        (nn.BatchNorm1d(10), "statistics"),
        (Switched(), "cannot be stacked"),
    ],
)
def test_networks_that_cannot_be_stacked_are_told(
    simulation: Callable[..., Simulation], layer: nn.Module, reason: str
) -> None:
    made = simulation(nn.Sequential(nn.Flatten(), nn.Linear(784, 10), layer))
    with pytest.raises(UserError, match=reason) as caught:
        updates(Vectorized(), made)
    assert "use " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_with_a_training_of_its_own_cannot_be_stacked(
    simulation: Callable[..., Simulation],
) -> None:
    class Own(local_training.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(784, 10)

    with pytest.raises(UserError, match="cannot train model small, it defines its own training"):
        groups_of(Vectorized(), simulation(Own()))


def test_auto_takes_what_is_faster(simulation: Callable[..., Simulation]) -> None:
    def network(*hidden: int) -> nn.Module:
        widths = [784, *hidden, 10]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(nn.Flatten(), *layers)

    def chosen(network: nn.Module, **settings: Any) -> str:
        made = simulation(network, **settings)
        return Auto().backend(made.replica, made.config).name

    assert chosen(network(16)) == "vectorized"
    assert chosen(network(16), batch_size=32) == "sequential"
    assert chosen(network(256, 128)) == "sequential"
    assert chosen(nn.Sequential(network(16), nn.Dropout(0.1))) == "sequential"


def test_settings_of_auto_reach_what_it_chooses(simulation: Callable[..., Simulation]) -> None:
    made = simulation()
    assert [len(group) for group in groups_of(Auto(stack=4), made)] == [4, 4]


@pytest.mark.parametrize("name", EXECUTORS.names())
def test_every_executor_trains_in_mixed_precision(
    simulation: Callable[..., Simulation], name: str
) -> None:
    executor = EXECUTORS.build({"name": name, "precision": "bf16-mixed"})
    made = simulation()
    made.replica.fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    mixed, full = updates(executor, made), updates(Sequential(), made)
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, full)
    errors = (mixed - full).norm(dim=1) / full.norm(dim=1)
    assert errors.median() < 0.05  # bfloat16 has 3 digits, and some clients are more sensitive
