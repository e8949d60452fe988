"""engine.executors: every backend gives the updates of `local_training.train`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from rank_contexts import ATTACK_SETTINGS, SETTINGS, DataDependent, MakeRankContext, updates_of
from torch import Tensor, nn

from fedbench.engine.client_selection import Round
from fedbench.engine.executors import (
    EXECUTORS,
    Auto,
    Executor,
    LightningTrainer,
    Sequential,
    Vectorized,
)
from fedbench.engine.rank_context import RankContext
from fedbench.engine.ranks import RankGroup
from fedbench.errors import UserError


def groups_of(executor: Executor, rank_context: RankContext) -> list[list[int]]:
    participants = rank_context.selection.select(0)
    costs = [rank_context.data.cost(0, p) for p in participants]
    malicious = [p.malicious for p in participants]
    return executor.backend(rank_context.replica, rank_context.config).groups(costs, malicious)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attack", ATTACK_SETTINGS)
def test_vectorized_equals_sequential_in_double_precision(
    make_rank_context: MakeRankContext, attack: str, settings: dict[str, Any]
) -> None:
    """To 1e-9: rounding is too small to switch a ReLU on or off."""
    rank_context = make_rank_context(attack=attack, **settings)
    rank_context.replica.module.double()
    decode = rank_context.dataset.decode
    rank_context.replica.decode = lambda x: decode(x).double()
    rank_context.data.dataset = replace(rank_context.dataset)
    object.__setattr__(rank_context.data.dataset, "decode", rank_context.replica.decode)
    sequential, stacked = (
        updates_of(executor, rank_context) for executor in (Sequential(), Vectorized(stack=3))
    )
    assert sequential.dtype == torch.float64
    assert sequential.norm(dim=1).min() > 1e-3
    torch.testing.assert_close(stacked, sequential, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_vectorized_stays_within_1e_5_in_single_precision(
    make_rank_context: MakeRankContext, settings: dict[str, Any]
) -> None:
    rank_context = make_rank_context(attack="constrain_and_scale", **settings)
    sequential, stacked = (
        updates_of(executor, rank_context) for executor in (Sequential(), Vectorized())
    )
    assert not torch.equal(stacked, sequential)
    errors = (stacked - sequential).norm(dim=1) / sequential.norm(dim=1)
    assert errors.max() < 1e-5


def test_stack_size_does_not_change_results(make_rank_context: MakeRankContext) -> None:
    rank_context = make_rank_context(attack="constrain_and_scale")
    alone, all_at_once = (updates_of(Vectorized(stack=k), rank_context) for k in (1, 30))
    torch.testing.assert_close(alone, all_at_once, rtol=1e-4, atol=1e-6)


PLAIN = [Sequential(), Sequential(capture=False), Vectorized(), LightningTrainer()]


@pytest.mark.parametrize("executor", PLAIN, ids=repr)
@pytest.mark.parametrize("attack", ["constrain_and_scale", "none"])
def test_lr_decay_lowers_the_learning_rate_of_all_clients(
    make_rank_context: MakeRankContext, attack: str, executor: Executor
) -> None:
    """After one benign round, half the learning rate is left. These attackers have no own one."""
    settings = {"attack": attack, "pretrain_rounds": 1}
    halved = updates_of(executor, make_rank_context(lr=0.1, lr_decay=0.5, **settings))
    assert torch.equal(halved, updates_of(executor, make_rank_context(lr=0.05, **settings)))
    assert not torch.equal(halved, updates_of(executor, make_rank_context(lr=0.1, **settings)))


@pytest.mark.parametrize("executor", PLAIN, ids=repr)
def test_lr_decay_does_not_depend_on_the_rounds_that_a_process_has_trained(
    make_rank_context: MakeRankContext, executor: Executor
) -> None:
    """The attack changes its learning rate within a round, too."""
    settings = {"attack": "edge_case", "lr_decay": 0.5, "pretrain_rounds": 0}
    resumed, going_on = make_rank_context(**settings), make_rank_context(**settings)
    updates_of(executor, going_on, 0)
    assert torch.equal(updates_of(executor, resumed, 1), updates_of(executor, going_on, 1))


def test_stacks_hold_clients_of_similar_cost(make_rank_context: MakeRankContext) -> None:
    unequal = {"partition": "dirichlet", "dirichlet_alpha": 0.3}
    rank_context = make_rank_context(attack="constrain_and_scale", **unequal)
    participants = rank_context.selection.select(0)
    groups = groups_of(Vectorized(stack=2), rank_context)
    assert [len(group) for group in groups] == [1, 2, 2, 1, 2]
    assert [{participants[i].malicious for i in group} for group in groups] == (
        [{False}] * 3 + [{True}] * 2
    )
    costs = [[rank_context.data.cost(0, participants[i]) for i in group] for group in groups]
    for kind in (costs[:3], costs[3:]):
        flat = [cost for group in kind for cost in group]
        assert flat == sorted(flat, reverse=True)


def test_cost_is_the_number_of_samples_a_client_processes(
    make_rank_context: MakeRankContext,
) -> None:
    # The attack trains for 3 epochs, and for 2 to obtain its clean update.
    rank_context = make_rank_context(attack="constrain_and_scale", local_epochs=2)
    honest, malicious = (
        next(p for p in rank_context.selection.select(0) if p.malicious is kind)
        for kind in (False, True)
    )
    data = rank_context.data
    assert data.cost(0, honest) == 2 * len(data.shards[honest.client])
    assert data.cost(0, malicious) == (3 + 2) * len(data.shards[malicious.client])
    assert make_rank_context(attack="gaussian").data.cost(0, malicious) == 0


def test_one_backend_stacks_rounds_of_different_sizes(make_rank_context: MakeRankContext) -> None:
    """Benign rounds with their own partition, then attacked ones."""
    benign = {"pretrain_non_iid": 0.0, "partition": "dirichlet", "dirichlet_alpha": 0.3}
    rank_context = make_rank_context(
        attack="constrain_and_scale", n_clients=[5, 8], pool=10, **benign
    )
    sequential, stacked = (
        RankGroup(executor, rank_context) for executor in (Sequential(), Vectorized(stack=6))
    )
    sizes = set()
    for index in range(-3, 3):
        layout = rank_context.replica.layout
        params, buffers = layout.read_params(), layout.read_buffers()
        round_ = Round(index, rank_context.selection.select(index), params, buffers)
        (expected, _), (found, _) = (ranks.train(round_) for ranks in (sequential, stacked))
        layout.write(params, buffers)
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-5
        sizes.add(len(expected))
    assert sizes == {5, 7, 8}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Dropout(0.2), "dropout"),
        (nn.BatchNorm1d(10), "statistics"),
        (DataDependent(), "cannot be stacked"),
    ],
)
def test_networks_that_cannot_be_stacked_are_a_user_error(
    make_rank_context: MakeRankContext, layer: nn.Module, reason: str
) -> None:
    rank_context = make_rank_context(nn.Sequential(nn.Flatten(), nn.Linear(784, 10), layer))
    with pytest.raises(UserError, match=reason) as caught:
        updates_of(Vectorized(), rank_context)
    assert "use " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modules_with_their_own_training_cannot_be_stacked(
    make_rank_context: MakeRankContext,
) -> None:
    class OwnTraining(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(784, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1].long())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(UserError, match="cannot train model small, it defines its own training"):
        groups_of(Vectorized(), make_rank_context(OwnTraining()))


def test_auto_chooses_the_faster_backend(make_rank_context: MakeRankContext) -> None:
    def network(*hidden: int) -> nn.Module:
        widths = [784, *hidden, 10]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(nn.Flatten(), *layers)

    def chosen(network: nn.Module, **settings: Any) -> str:
        rank_context = make_rank_context(network, **settings)
        return Auto().backend(rank_context.replica, rank_context.config).name

    assert chosen(network(16)) == "vectorized"
    assert chosen(network(16), batch_size=32) == "sequential"
    assert chosen(network(256, 128)) == "sequential"
    assert chosen(nn.Sequential(network(16), nn.Dropout(0.1))) == "sequential"


def test_auto_passes_its_settings_on(make_rank_context: MakeRankContext) -> None:
    assert [len(group) for group in groups_of(Auto(stack=4), make_rank_context())] == [4, 4]


@pytest.mark.parametrize("name", EXECUTORS.names())
def test_every_executor_trains_in_mixed_precision(
    make_rank_context: MakeRankContext, name: str
) -> None:
    executor = EXECUTORS.build({"name": name, "precision": "bf16-mixed"})
    rank_context = make_rank_context()
    rank_context.replica.fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    mixed, full = updates_of(executor, rank_context), updates_of(Sequential(), rank_context)
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, full)
    errors = (mixed - full).norm(dim=1) / full.norm(dim=1)
    assert errors.median() < 0.05  # bfloat16 has 3 digits, and some clients are more sensitive
