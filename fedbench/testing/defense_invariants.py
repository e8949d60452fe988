"""Checks of what must not change a defense's result: agreement, client order, precision."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fedbench.defense import Aggregate, Defense
from fedbench.testing.compare import is_close
from fedbench.testing.contract import check
from fedbench.testing.defense_results import DTYPES, run_rounds, supports
from fedbench.testing.rounds import LARGE, ROUNDS, honest, nearly_equal, view_of

Columns = dict[str, tuple[Tensor | None, Tensor | None]]  # name -> found, expected


@check("same_seed", cases=product((1, 2, 3, 10), DTYPES), optional=True)
def unanimity(defense: Defense, n: int, dtype: torch.dtype) -> None:
    """If all clients send the same update, the defense returns it."""
    if not supports(defense, n):
        return
    rows = [honest(1, seed=seed)[0].to(dtype) for seed in range(3)]
    outcomes = run_rounds(defense, [row.expand(n, -1).clone() for row in rows])
    for index, (outcome, row) in enumerate(zip(outcomes, rows, strict=True)):
        close = is_close(outcome.update, row, rtol=4 * torch.finfo(dtype).eps)
        away = float((outcome.update - row).abs().max())
        assert close, f"all clients sent one update, the result is {away:.2g} off in round {index}"


@dataclasses.dataclass(frozen=True)
class TwoOrders:
    """A round with its clients in two orders: position i of `shuffled` is `places[i]`."""

    index: int
    plain: Aggregate
    shuffled: Aggregate
    places: Tensor  # [N]

    def verify(self, columns: Columns, hint: str) -> None:
        for name, (found, expected) in columns.items():
            if expected is not None and name != "update":
                expected = expected[self.places]
            assert is_close(found, expected), (
                f"{name} of round {self.index} depends on the order of the clients; {hint}"
            )

    def verdict(self) -> Columns:
        names = ("update", "weights", "accepted")
        return {name: (getattr(self.shuffled, name), getattr(self.plain, name)) for name in names}

    @property
    def best_scores_tie(self) -> bool:
        if self.plain.scores is None:
            return False
        best, second = self.plain.scores.sort().values[:2].tolist()
        return bool(second - best <= 1e-9 * second)


def in_two_orders(defense: Defense, n: int, seed: int) -> Iterator[TwoOrders]:
    """Aggregate three rounds, which reveal memory that is kept by position."""
    if not supports(defense, n):
        return
    shuffle = random.Random(seed)
    state, state_shuffled = defense.init(), defense.init()
    for index, ids in enumerate(ROUNDS):
        updates = honest(n, seed=100 * seed + index).float()
        updates[: n // 3] *= 5  # gives defenses someone to reject
        places = torch.tensor(shuffle.sample(range(n), n))
        ids_shuffled = torch.tensor(ids[:n])[places].tolist()
        view, view_shuffled = (view_of(updates, i, index) for i in (ids[:n], ids_shuffled))
        plain, state = defense.aggregate(updates, state, view)
        shuffled, state_shuffled = defense.aggregate(updates[places], state_shuffled, view_shuffled)
        yield TwoOrders(index, plain, shuffled, places)


@check("memory", cases=product((3, 10), range(5)), optional=True)
def client_order(defense: Defense, n: int, seed: int) -> None:
    """The order of the clients does not matter, except among equal scores."""
    for orders in in_two_orders(defense, n, seed):
        plain, shuffled = orders.plain, orders.shuffled
        assert list(shuffled.details) == list(plain.details), "names in details differ"
        columns: Columns = {"scores": (shuffled.scores, plain.scores)}
        columns |= {name: (shuffled.details[name], plain.details[name]) for name in plain.details}
        columns |= {} if orders.best_scores_tie else orders.verdict()
        orders.verify(columns, "key memory by view.client_ids, not by row")


@check("client_order", cases=product((3, 10), range(5)), optional=True)
def tied_clients(defense: Defense, n: int, seed: int) -> None:
    """The order of the clients does not matter among equal scores, either."""
    for orders in in_two_orders(defense, n, seed):
        orders.verify(orders.verdict(), "treat clients with equal scores equally")


def in_two_precisions(defense: Defense) -> Iterator[tuple[Aggregate, Aggregate]]:
    """Aggregate two rounds of nearly equal rows, in float32 and the same numbers in float64."""
    state_single, state_double = defense.init(), defense.init()
    for index in range(2):
        updates = nearly_equal(30, LARGE, seed=10 * index).float()
        view, same = (view_of(updates, index=index, layout=LARGE) for _ in range(2))
        same = dataclasses.replace(
            same,
            global_params=view.global_params.double(),
            initial_params=view.initial_params.double(),
        )
        single, state_single = defense.aggregate(updates, state_single, view)
        double, state_double = defense.aggregate(updates.double(), state_double, same)
        yield single, double


@check("memory", optional=True)
def precision(defense: Defense) -> None:
    """Nearly equal float32 updates are judged as the same numbers in float64 are."""
    hint = "differ between float32 and float64; use fedbench.ops, or compute in float64"
    for single, double in in_two_precisions(defense):
        assert is_close(single.weights, double.weights, rtol=1e-3), f"weights {hint}"
        assert is_close(single.scores, double.scores, rtol=1e-3), f"scores {hint}"
        if single.accepted is not None and double.accepted is not None:
            assert torch.equal(single.accepted, double.accepted), f"accepted clients {hint}"


@check("precision", optional=True)
def update_precision(defense: Defense) -> None:
    """Nearly equal float32 updates give the update of the same numbers in float64."""
    for single, double in in_two_precisions(defense):
        close = is_close(single.update, double.update, rtol=1e-6)
        assert close, "the update differs between float32 and float64 by more than 1e-6"
