"""engine.assignment and engine.transport: each client is trained once; rank 0 gets every row."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from numpy.typing import NDArray

from fedbench.config import RunConfig
from fedbench.engine import reply_limit
from fedbench.engine.client_selection import Round
from fedbench.engine.executors import Sequential
from fedbench.engine.flat_parameters import FlatModel
from fedbench.engine.launch import launch
from fedbench.engine.rank_assignment import balance
from fedbench.engine.ranks import RankGroup
from fedbench.engine.reply_limit import LEAST
from fedbench.engine.transport import links_in, send_to_rank_0
from fedbench.errors import UserError
from fedbench.plan import Plan
from fedbench.single_run import build_rank_context


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


Array = NDArray[np.float32]


def exchange(fabric: Fabric, clients_by_rank: list[list[int]]) -> Array:
    """Return rank 0's rows of six clients; values encode the client and its rank."""
    rank = fabric.global_rank
    own = range(6) if rank == 0 else clients_by_rank[rank]
    results = {i: FlatModel(torch.full((3,), -1.0), torch.full((2,), -1.0)) for i in own}
    for client in clients_by_rank[rank]:
        results[client].params.copy_(10 * client + torch.arange(3))
        results[client].buffers.fill_(rank)
    send_to_rank_0(results, clients_by_rank, rank, links_in(fabric))
    return torch.stack([torch.cat(results[i]) for i in own]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "clients_by_rank", [[[4, 0], [3, 1, 5, 2]], [[], [5, 4, 3, 2, 1, 0]], [[2], [4, 5], [0, 1, 3]]]
)
def test_rank_0_gets_every_row(clients_by_rank: list[list[int]]) -> None:
    rows = launch(Sequential(), len(clients_by_rank), exchange, clients_by_rank)
    assert rows[:, :3].tolist() == (10 * np.arange(6)[:, None] + np.arange(3)).tolist()
    by = {i: rank for rank, clients in enumerate(clients_by_rank) for i in clients}
    assert rows[:, 3:].tolist() == [[by[i]] * 2 for i in range(6)]


CONFIG = RunConfig(
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


def trained(fabric: Fabric, n_available: int) -> tuple[Array, Array, list[float | None]] | None:
    """Train and evaluate with `n_available` working ranks."""
    plan = Plan.of(CONFIG)
    rank_context = build_rank_context(plan, plan.source.load(), fabric)
    layout = rank_context.replica.layout
    ranks = RankGroup(plan.executor, rank_context)
    if fabric.global_rank > 0:
        ranks.serve()
        return None
    ranks.available = lambda: n_available
    start = layout.read_params(), layout.read_buffers()
    sent = [
        ranks.train(Round(index, rank_context.selection.select(index), *start))
        for index in range(3)
    ]
    assert [len(updates) for updates, _ in sent] == [4, 5, 3]
    updates, buffers = map(torch.cat, zip(*sent, strict=True))
    measured = ranks.evaluate(start[0] + updates.mean(dim=0), buffers.mean(dim=0))
    ranks.stop()
    return updates.numpy(), buffers.numpy(), measured


def evaluated(
    fabric: Fabric, seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> list[float | None] | None:
    """Evaluate after a wait of rank 0; rank 1 needs a while for its share."""
    if fabric.global_rank == 1:
        share = RankGroup._evaluate_share

        def slow(*arguments: Any) -> Any:
            time.sleep(seconds[1])
            return share(*arguments)

        slow.__name__ = share.__name__
        monkeypatch.setattr(RankGroup, "_evaluate_share", slow)
    else:
        time.sleep(seconds[0])
    plan = Plan.of(CONFIG)
    rank_context = build_rank_context(plan, plan.source.load(), fabric)
    ranks = RankGroup(plan.executor, rank_context)
    if fabric.global_rank > 0:
        ranks.serve()
        return None
    layout = rank_context.replica.layout
    return ranks.evaluate(layout.read_params(), layout.read_buffers())


@pytest.mark.slow
def test_rank_0_waits_for_a_reply_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEAST, "1")
    monkeypatch.setattr(reply_limit, "FACTOR", 2)
    line = (
        r"^worker process 2 of 2 has not answered for \d+ s; the same command resumes the run, and "
        "FEDBENCH_RANK_TIMEOUT=SECONDS lets it wait longer$"
    )
    start = time.monotonic()
    with pytest.raises(UserError, match=line):
        launch(Sequential(), 2, evaluated, (0, 60), monkeypatch)
    assert time.monotonic() - start < 50


@pytest.mark.slow
def test_other_ranks_wait_for_rank_0_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the pretraining of another run."""
    monkeypatch.setenv(LEAST, "1")
    assert launch(Sequential(), 2, evaluated, (2.5, 0), monkeypatch)


@pytest.mark.slow
def test_number_of_ranks_changes_no_bit() -> None:
    """Not even if one of two ranks must wait for a core that another run of the sweep uses."""
    cases = [(2, 2), (2, 1), (1, 1)]
    both, waiting, alone = (
        launch(Sequential(), devices, trained, n_available) for devices, n_available in cases
    )
    for updates, buffers, measured in (waiting, alone):
        assert np.isfinite(updates).all()
        assert updates.any(axis=1).all()
        assert np.array_equal(updates, both[0])
        assert np.array_equal(buffers, both[1])
        assert measured == both[2]
    assert 0 < alone[2][0] < 1
