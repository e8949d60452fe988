"""Channels: every portion is trained once, on some rank, and rank 0 gets every row."""

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
from fedbench.engine.executors import Sequential
from fedbench.engine.launch import launch
from fedbench.engine.population import Order, Rows
from fedbench.engine.ranks import RankGroup
from fedbench.engine.transport import Board, Channel, Line, deal
from fedbench.plan import Plan
from fedbench.run import population_of


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 6))
def test_all_is_dealt_in_about_equal_parts(costs: list[int], n_hands: int) -> None:
    """The costliest first, each to whoever has least: within 4/3 of the best (Graham 1969)."""
    hands = deal(range(len(costs)), costs, n_hands)
    assert len(hands) == n_hands
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    loads = [sum(costs[i] for i in hand) for hand in hands]
    least = max([sum(costs) / n_hands, *costs])  # no way to deal has a smaller largest part
    pair = sorted(costs, reverse=True)[n_hands - 1 : n_hands + 1]
    least = max(least, sum(pair) if len(pair) == 2 else 0)
    assert max(loads) <= least * 4 / 3 + 1e-9
    for hand in hands:
        assert [costs[i] for i in hand] == sorted((costs[i] for i in hand), reverse=True)


def test_a_deal_by_hand() -> None:
    # 9 | 7, then 5 to the 7 (12), 4 to the 9 (13), 3 to the 12 (15), 1 to the 13 (14)
    assert deal("abcdef", [4, 9, 1, 5, 7, 3], 2) == [["b", "a", "c"], ["e", "d", "f"]]


PORTIONS = [[4, 0], [3], [1, 5], [2]]
COSTS = [1, 4, 2, 3]
LIKE = Rows(torch.zeros(3), torch.zeros(2))

Taken = list[list[int]]  # places of portions, by rank
Array = NDArray[np.float32]


def channel_of(kind: str, fabric: Fabric) -> Channel:
    return Board(fabric, LIKE, 6) if kind == "board" else Line(fabric, LIKE)


def three_rounds(
    fabric: Fabric, kind: str, waits: list[float], n_ranks: int
) -> list[tuple[Taken, Array]]:
    """Who took what, and what rank 0 has got; the rank and the round are in the numbers sent."""
    channel, rank = channel_of(kind, fabric), fabric.global_rank
    rounds = []
    for index in range(3):
        out = [Rows(torch.full((3,), -1.0), torch.full((2,), -1.0)) for _ in range(6)]
        distributed.barrier()
        own = []
        for place in channel.deal(PORTIONS, COSTS, n_ranks):
            own.append(place)
            time.sleep(waits[rank])
            for client in PORTIONS[place]:
                rows = out[client] if rank == 0 else channel.place(client)
                rows.params.copy_(100 * index + 10 * client + torch.arange(3))
                rows.buffers.fill_(rank)
        distributed.barrier()
        channel.collect(out)
        taken: Taken = [[] for _ in range(fabric.world_size)]
        distributed.all_gather_object(taken, own)
        rounds.append((taken, torch.stack([torch.cat(rows) for rows in out]).numpy()))
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "n_ranks"), [(2, 2), (3, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["board", "line"])
def test_rank_0_gets_every_row(kind: str, devices: int, n_ranks: int) -> None:
    waits = [0.05, 0.01, 0.03][:devices]
    for index, (taken, rows) in enumerate(
        launch(Sequential(), devices, three_rounds, kind, waits, n_ranks)
    ):
        assert Counter(place for own in taken for place in own) == Counter(range(4))
        assert not any(taken[n_ranks:])
        sent = 100 * index + 10 * np.arange(6)[:, None] + np.arange(3)
        assert rows[:, :3].tolist() == sent.tolist()
        by = {i: rank for rank, own in enumerate(taken) for place in own for i in PORTIONS[place]}
        assert rows[:, 3:].tolist() == [[by[i]] * 2 for i in range(6)]


@pytest.mark.slow
def test_on_a_board_whoever_is_free_takes_the_costliest_portion_that_is_left() -> None:
    """Portions by cost: 1, 3, 2, 0; rank 1 is still at its first when the others are done."""
    for taken, _ in launch(Sequential(), 2, three_rounds, "board", [0.0, 1.0], 2):
        assert len(taken[1]) <= 1
        assert taken[0] == [place for place in (1, 3, 2, 0) if place not in taken[1]]


@pytest.mark.slow
def test_on_a_line_portions_are_dealt_beforehand() -> None:
    """4 -> rank 0, 3 -> rank 1, 2 -> rank 1 (3 < 4), 1 -> rank 0 (4 < 5)."""
    for taken, _ in launch(Sequential(), 2, three_rounds, "line", [0.0, 0.3], 2):
        assert taken == [[1, 0], [3, 2]]


def trained(fabric: Fabric, room: int) -> tuple[str, Array, Array, list[float | None]] | None:
    """What a workforce makes of an order if so many ranks may work, and by which channel."""
    config = RunConfig(
        defense={"name": "fedavg"},
        dataset={"name": "fmnist_sample"},
        model={"name": "resnet18_light", "widths": [4]},
        attack={"name": "none"},
        executor={"name": "auto"},
        tracker={"name": "none"},
        n_clients=[3, 5],
        pool=40,
        local_epochs=1,
    )
    plan = Plan.of(config)
    population = population_of(plan, plan.source.load(), fabric)
    layout = population.layout
    workforce = RankGroup(plan.executor, fabric, population)
    if fabric.global_rank > 0:
        workforce.serve()
        return None
    workforce.room = lambda: room
    start = layout.read_params(), layout.read_buffers()
    sent, channels = [], []
    for index in range(3):  # of 4, 5 and 3 clients
        sent.append(workforce.train(Order(index, population.select(index), *start)))
        channels.append(workforce._channel)
    assert [len(updates) for updates, _ in sent] == [4, 5, 3]
    assert channels == channels[:1] * 3, "one for all rounds: a board's memory is never given back"
    updates, buffers = map(torch.cat, zip(*sent, strict=True))
    measured = workforce.evaluate(start[0] + updates.mean(dim=0), buffers.mean(dim=0))
    workforce.dismiss()
    return type(channels[0]).__name__, updates.numpy(), buffers.numpy(), measured


@pytest.mark.slow
def test_neither_the_channel_nor_who_works_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs, and systems other than Linux, have a line; so has a single process."""
    both, one = (launch(Sequential(), 2, trained, room) for room in (2, 1))
    monkeypatch.setattr(Board, "suits", staticmethod(lambda fabric: False))
    line = launch(Sequential(), 2, trained, 2)
    monkeypatch.undo()
    alone = launch(Sequential(), 1, trained, 1)
    assert [name for name, *_ in (both, one, line, alone)] == ["Board", "Board", "Line", "Line"]
    for _, updates, buffers, measured in (one, line, alone):
        assert np.isfinite(updates).all()
        assert updates.any(axis=1).all()
        assert np.array_equal(updates, both[1])
        assert np.array_equal(buffers, both[2])
        assert measured == both[3]
    assert 0 < alone[3][0] < 1
