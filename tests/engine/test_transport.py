"""engine.assignment and engine.transport: each group is trained once; rank 0 gets every row."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from numpy.typing import NDArray
from torch import distributed

from fedbench.config import RunConfig
from fedbench.engine.assignment import Assignment, StaticAssignment, WorkQueue, balance
from fedbench.engine.executors import Sequential
from fedbench.engine.launch import launch
from fedbench.engine.parameters import FlatModel
from fedbench.engine.ranks import RankGroup
from fedbench.engine.selection import Round
from fedbench.engine.transport import ProcessGroupTransport, SharedMemoryTransport, Transport
from fedbench.plan import Plan
from fedbench.run import build_simulation


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 6))
def test_costs_are_balanced(costs: list[int], n_ranks: int) -> None:
    """Costliest first, each to the least loaded: within 4/3 of the optimum (Graham 1969)."""
    parts = balance(costs, n_ranks)
    assert len(parts) == n_ranks
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    bound = max([sum(costs) / n_ranks, *costs])  # no split has a smaller maximum
    pair = sorted(costs, reverse=True)[n_ranks - 1 : n_ranks + 1]
    bound = max(bound, sum(pair) if len(pair) == 2 else 0)
    assert max(loads) <= bound * 4 / 3 + 1e-9
    for part in parts:
        assert [costs[i] for i in part] == sorted((costs[i] for i in part), reverse=True)


def test_balance_by_hand() -> None:
    # 9 | 7, then 5 to the 7 (12), 4 to the 9 (13), 3 to the 12 (15), 1 to the 13 (14)
    assert balance([4, 9, 1, 5, 7, 3], 2) == [[1, 0, 2], [4, 3, 5]]


GROUPS = [[4, 0], [3], [1, 5], [2]]
COSTS = [1, 4, 2, 3]
LIKE = FlatModel(torch.zeros(3), torch.zeros(2))

Taken = list[list[int]]  # positions of groups, by rank
Array = NDArray[np.float32]


def parts_of(kind: str, fabric: Fabric) -> tuple[Assignment, Transport]:
    if kind == "shared memory":
        return WorkQueue(fabric), SharedMemoryTransport(fabric, LIKE, 6)
    return StaticAssignment(fabric), ProcessGroupTransport(fabric, LIKE)


def three_rounds(
    fabric: Fabric, kind: str, waits: list[float], n_ranks: int
) -> list[tuple[Taken, Array]]:
    """Who trained what, and what rank 0 received: values encode the rank and the round."""
    (assignment, transport), rank = parts_of(kind, fabric), fabric.global_rank
    rounds = []
    for index in range(3):
        out = [FlatModel(torch.full((3,), -1.0), torch.full((2,), -1.0)) for _ in range(6)]
        distributed.barrier()
        own, trained = [], set()
        for position in assignment.groups(COSTS, n_ranks):
            own.append(position)
            time.sleep(waits[rank])
            for client in GROUPS[position]:
                row = out[client] if rank == 0 else transport.slot(client)
                row.params.copy_(100 * index + 10 * client + torch.arange(3))
                row.buffers.fill_(rank)
                trained.add(client)
        distributed.barrier()
        if rank == 0:
            assignment.end_round()
        transport.collect(out if rank == 0 else [], trained, 6)
        taken: Taken = [[] for _ in range(fabric.world_size)]
        distributed.all_gather_object(taken, own)
        rounds.append((taken, torch.stack([torch.cat(row) for row in out]).numpy()))
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "n_ranks"), [(2, 2), (3, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["shared memory", "process group"])
def test_rank_0_gets_every_row(kind: str, devices: int, n_ranks: int) -> None:
    waits = [0.05, 0.01, 0.03][:devices]
    for index, (taken, rows) in enumerate(
        launch(Sequential(), devices, three_rounds, kind, waits, n_ranks)
    ):
        assert Counter(position for own in taken for position in own) == Counter(range(4))
        assert not any(taken[n_ranks:])
        sent = 100 * index + 10 * np.arange(6)[:, None] + np.arange(3)
        assert rows[:, :3].tolist() == sent.tolist()
        by = {i: rank for rank, own in enumerate(taken) for place in own for i in GROUPS[place]}
        assert rows[:, 3:].tolist() == [[by[i]] * 2 for i in range(6)]


@pytest.mark.slow
def test_idle_ranks_take_the_costliest_group_left() -> None:
    """Groups by cost: 1, 3, 2, 0; rank 1 still trains its first when the others are done."""
    for taken, _ in launch(Sequential(), 2, three_rounds, "shared memory", [0.0, 1.0], 2):
        assert len(taken[1]) <= 1
        assert taken[0] == [place for place in (1, 3, 2, 0) if place not in taken[1]]


@pytest.mark.slow
def test_without_shared_memory_groups_are_assigned_beforehand() -> None:
    """4 -> rank 0, 3 -> rank 1, 2 -> rank 1 (3 < 4), 1 -> rank 0 (4 < 5)."""
    for taken, _ in launch(Sequential(), 2, three_rounds, "process group", [0.0, 0.3], 2):
        assert taken == [[1, 0], [3, 2]]


def trained(
    fabric: Fabric, n_available: int, shared_memory: bool
) -> tuple[str, Array, Array, list[float | None]] | None:
    """Results of a rank group of which `n_available` ranks may work, and its transport."""
    config = RunConfig(
        defense={"name": "fedavg"},
        dataset={"name": "fmnist_sample"},
        model={"name": "resnet18_light", "widths": [4]},
        attack={"name": "none"},
        executor={"name": "auto", "shared_memory": shared_memory},
        tracker={"name": "none"},
        n_clients=[3, 5],
        pool=40,
        local_epochs=1,
    )
    plan = Plan.of(config)
    simulation = build_simulation(plan, plan.source.load(), fabric)
    layout = simulation.replica.layout
    ranks = RankGroup(plan.executor, simulation)
    if fabric.global_rank > 0:
        ranks.serve()
        return None
    ranks.available = lambda: n_available
    start = layout.read_params(), layout.read_buffers()
    sent = [
        ranks.train(Round(index, simulation.selection.select(index), *start)) for index in range(3)
    ]
    assert [len(updates) for updates, _ in sent] == [4, 5, 3]
    updates, buffers = map(torch.cat, zip(*sent, strict=True))
    measured = ranks.evaluate(start[0] + updates.mean(dim=0), buffers.mean(dim=0))
    ranks.stop()
    return type(ranks.transport).__name__, updates.numpy(), buffers.numpy(), measured


@pytest.mark.slow
def test_neither_the_transport_nor_the_ranks_change_a_bit() -> None:
    """GPUs, and systems other than Linux, use the process group; so does a single process."""
    cases = [(2, 2, True), (2, 1, True), (2, 2, False), (1, 1, True)]
    both, one, group, alone = (
        launch(Sequential(), devices, trained, n_available, shared_memory)
        for devices, n_available, shared_memory in cases
    )
    shared, grouped = "SharedMemoryTransport", "ProcessGroupTransport"
    assert [name for name, *_ in (both, one, group, alone)] == [shared, shared, grouped, grouped]
    for _, updates, buffers, measured in (one, group, alone):
        assert np.isfinite(updates).all()
        assert updates.any(axis=1).all()
        assert np.array_equal(updates, both[1])
        assert np.array_equal(buffers, both[2])
        assert measured == both[3]
    assert 0 < alone[3][0] < 1
