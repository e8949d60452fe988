"""Rounds of updates to try a defense on: ordinary, unusual, and huge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedbench.defense import ServerView
from fedbench.engine.flat_parameters import ParameterLayout

SMALL = ParameterLayout(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))  # P = 53
LARGE = ParameterLayout(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)))  # P = 1354
ROUNDS = (  # client ids of three rounds: clients join, leave and change position
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (12, 3, 5, 1, 20, 7, 0, 8, 9, 2),
    (5, 20, 30, 0, 2, 11, 12, 7, 8, 3),
)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def honest(n: int, layout: ParameterLayout = SMALL, seed: int = 0) -> Tensor:
    """Draw updates like those of training, [N, P] float64: a common and an individual part."""
    p = layout.n_params
    return 0.1 * (noise(p, seed=seed) + 0.5 * noise(n, p, seed=seed + 1000))


def view_of(
    updates: Tensor,
    ids: Sequence[int] | None = None,
    index: int = 0,
    layout: ParameterLayout = SMALL,
    seed: int = 0,
) -> ServerView:
    return ServerView(
        index=index,
        client_ids=torch.tensor(range(len(updates)) if ids is None else ids),
        global_params=noise(layout.n_params, seed=77).to(updates.dtype),
        initial_params=noise(layout.n_params, seed=78).to(updates.dtype),
        layers=layout.layers,
        rng=torch.Generator().manual_seed(seed + index),
    )


def with_row(row: int, factor: float) -> Callable[[int], Tensor]:
    def rows(n: int) -> Tensor:
        updates = honest(n)
        updates[row % n] = factor * updates[row % n].sign()
        return updates

    return rows


def scaled(n: int) -> Tensor:
    """One client scales its update by a huge factor, as model replacement may."""
    updates = honest(n)
    updates[0] *= 1e30
    return updates


def duplicates(n: int) -> Tensor:
    updates = honest(n)
    updates[: n // 2 + 1] = updates[0]
    return updates


def nearly_equal(n: int, layout: ParameterLayout = SMALL, seed: int = 0) -> Tensor:
    """Rows that differ by 1e-4 of their size: in float32, only in the last ten bits."""
    common = noise(layout.n_params, seed=seed + 3)
    return common * (1 + 1e-4 * noise(n, layout.n_params, seed=seed + 4))


def one_coordinate(n: int) -> Tensor:
    """Only one coordinate is not zero, and equal for all clients but the first."""
    updates = torch.zeros(n, SMALL.n_params, dtype=torch.float64)
    updates[1:, -1] = 1
    return updates


def undoing_the_model(n: int) -> Tensor:
    """Updates after which more than half of the local models are zero."""
    updates = honest(n)
    updates[: n // 2 + 1] = -noise(SMALL.n_params, seed=77)
    return updates


def opposed(n: int) -> Tensor:
    """Rows that sum to zero, so that their mean has no direction."""
    row = noise(SMALL.n_params, seed=5)
    return torch.stack([row * (-1) ** i for i in range(n)]) * (n - n % 2) / n


Rows = dict[str, Callable[[int], Tensor]]  # name -> updates [N, P] of N clients
UNUSUAL: Rows = {
    "identical": lambda n: honest(1).expand(n, -1).clone(),
    "zero": lambda n: torch.zeros(n, SMALL.n_params, dtype=torch.float64),
    "one_zero_row": with_row(0, 0.0),
    "tiny": lambda n: honest(n) * 1e-30,
    "tiniest_row": with_row(2, 1.4e-45),
    "duplicates": duplicates,
    "nearly_equal": nearly_equal,
    "opposed": opposed,
    "one_coordinate": one_coordinate,
    "undoing_the_model": undoing_the_model,
}
HUGE: Rows = {
    "huge_row": with_row(1, 1e30),
    "largest_row": with_row(-1, 3e38),
    "scaled_row": scaled,
    "mostly_huge": lambda n: torch.cat([honest(n)[: n // 3], honest(n)[n // 3 :] * 1e30]),
}
UPDATES: Rows = {"honest": honest, **UNUSUAL, **HUGE}


def example_round(
    rows: str = "honest", n: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ServerView]:
    """Return the updates [N, P] and the view of a round that the checks try a defense on.

    `rows` is a name in a failed check's message, such as `huge_row`.
    """
    updates = UPDATES[rows](n).to(dtype)
    return updates, view_of(updates)
