"""Float buffers such as batch-norm statistics: hostile ones neither pass nor move the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from shipped import shipped
from torch import Tensor, nn

from fedbench.attack import Attack, AttackView
from fedbench.buffer_aggregation import SPREADS, mean_buffers, robust_buffers
from fedbench.defense import DEFENSES
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.federation import Federation
from fedbench.results.run_dir import Record
from fedbench.update_screening import Screened, screen

Make = Callable[..., Federation]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
    )


@dataclass(frozen=True)
class CleanUpdates(Attack):
    """Sends honest updates with the statistics of a model whose first layer is scaled."""

    factor: float = 1.0

    @property
    def needs_clean_update(self) -> bool:
        return True

    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        with torch.no_grad():
            params[0].mul_(self.factor)

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        assert view.clean_update is not None
        return view.clean_update


def run(federation: Make, defense: str, attack: Attack, **settings: Any) -> list[Record]:
    """Return the records of three rounds in which 2 of 6 clients attack."""
    server = federation(
        DEFENSES.build({"name": defense}), attack, network(), lr=0.1, non_iid=0.0, **settings
    )
    state, records = replace(server.initial(), next_round=0), []
    for _ in range(3):
        state, record = server.round(state)
        records.append(record)
        assert state.params.isfinite().all()
        assert state.buffers.isfinite().all()
    return records


@pytest.mark.parametrize("factor", [1e3, 1e15], ids=["huge", "infinite"])
@pytest.mark.parametrize("defense", shipped(DEFENSES))
def test_exploding_statistics_beside_clean_updates_do_not_pass(
    federation: Make, defense: str, factor: float
) -> None:
    """The first layer grows with every step, and the variances with its square."""
    clean, attacked = (run(federation, defense, CleanUpdates(f)) for f in (1.0, factor))
    assert attacked[-1]["MA"] > clean[-1]["MA"] - 0.1
    for client in attacked[0]["clients"]:
        assert ("refused" in client) == client["malicious"]


@pytest.mark.parametrize("factor", [0.8, 1.1, 3.0])
@pytest.mark.parametrize("defense", [name for name in shipped(DEFENSES) if name != "fedavg"])
def test_shifted_statistics_do_not_move_a_defense(
    federation: Make, defense: str, factor: float
) -> None:
    clean, attacked = (run(federation, defense, CleanUpdates(f)) for f in (1.0, factor))
    assert attacked[-1]["MA"] > clean[-1]["MA"] - 0.1


@pytest.mark.parametrize("defense", shipped(DEFENSES))
def test_benign_statistics_are_never_refused(federation: Make, defense: str) -> None:
    for record in run(federation, defense, CleanUpdates()):
        assert not any("refused" in client for client in record["clients"])


LAYOUT = ParameterLayout(network())
MEANS, VARIANCES = LAYOUT.buffers.values()


def screened(hostile: Callable[[Tensor], object], start: Tensor | None = None) -> Screened:
    """Screen 5 clients whose last one has changed its buffers [32] in place."""
    rng = torch.Generator().manual_seed(0)
    buffers = 1 + 0.1 * torch.randn(5, 32, generator=rng)
    hostile(buffers[4])
    return screen(torch.ones(5, 7), buffers, {}, LAYOUT, torch.ones(32) if start is None else start)


HOSTILE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "nan": (lambda b: b[:1].fill_(torch.nan), "not finite"),
    "infinity": (lambda b: b[-1:].fill_(-torch.inf), "not finite"),
    "negative variance": (lambda b: b[-1:].fill_(-1e-9), "2.running_var has a negative variance"),
    "huge variance": (lambda b: b[-1:].fill_(3e38), "2.running_var has 3e+38, usual are 1."),
    "huge mean": (lambda b: b[:1].fill_(-1e6), "2.running_mean has 1e+06, usual are 1."),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malformed_buffers_refuse_the_client(kind: str) -> None:
    hostile, reason = HOSTILE[kind]
    found = screened(hostile)
    assert [*found.refused] == [4]
    assert found.refused[4].startswith(reason)
    assert found.passed == [0, 1, 2, 3]
    assert not found.updates[4].any()
    assert not found.buffers[4].any()


@pytest.mark.parametrize(
    "usual",
    [
        lambda b: b[MEANS].fill_(-500.0),
        lambda b: b[VARIANCES].fill_(0.0),  # a unit that no sample reaches
        lambda b: b.mul_(20),
    ],
)
def test_unusual_buffers_are_left_to_the_defense(usual: Callable[[Tensor], object]) -> None:
    assert screened(usual).refused == {}


def test_a_hostile_majority_cannot_have_honest_buffers_refused() -> None:
    buffers = torch.zeros(5, 32)
    buffers[4] = 30.0
    start = torch.zeros(32)
    assert screen(torch.ones(5, 7), buffers, {}, LAYOUT, start).refused == {}


def test_a_model_without_buffers_is_screened_as_before() -> None:
    layout = ParameterLayout(nn.Linear(6, 1))
    found = screen(torch.ones(3, 7), torch.zeros(3, 0), {1: "size"}, layout, torch.zeros(0))
    assert found.refused == {1: "size"}
    assert robust_buffers(torch.zeros(3, 0), torch.ones(3, dtype=torch.bool)).shape == (0,)


def test_buffers_by_hand() -> None:
    """The last three clients are accepted, then the first two."""
    buffers = torch.tensor([[1.0], [2], [4], [9], [9]])
    accepted = torch.tensor([False, False, True, True, True])
    # Median 4, distances 3, 2, 0, 5, 5: their median is 3; the median of the accepted is 9.
    assert robust_buffers(buffers, accepted).item() == 4 + min(SPREADS * 3, 9 - 4)
    assert robust_buffers(buffers, accepted.logical_not()).item() == 1.5  # of two: their mean
    assert robust_buffers(buffers[:1], accepted[2:3]).item() == 1.0
    assert mean_buffers(buffers, torch.tensor([0.5, 0.5, 0, 0, 0])).item() == 1.5


@pytest.mark.parametrize("n", [5, 6, 9, 10])
@pytest.mark.parametrize("value", [-1e30, 0.0, 1.05, 1e3, 1e30])
def test_a_minority_cannot_move_buffers_beyond_honest_values(n: int, value: float) -> None:
    """Whoever the defense accepts, be it the attackers alone."""
    rng = torch.Generator().manual_seed(n)
    n_hostile = (n - 1) // 2
    buffers = torch.randn(n, 50, generator=rng)
    buffers[:n_hostile] = value
    honest = buffers[n_hostile:]
    reach = SPREADS * (honest.amax(dim=0) - honest.amin(dim=0))
    for accepted in (torch.arange(n) < n_hostile, torch.arange(n) == 0, torch.arange(n) >= 0):
        found = robust_buffers(buffers, accepted)
        assert (found <= honest.amax(dim=0) + reach).all()
        assert (found >= honest.amin(dim=0) - reach).all()


def test_equal_buffers_keep_their_bits() -> None:
    """Constants of a model, such as positions, must not drift by rounding."""
    row = torch.randn(64, generator=torch.Generator().manual_seed(0))
    buffers = row.expand(7, -1).clone()
    accepted = torch.tensor([True, False, True, True, False, True, True])
    assert torch.equal(robust_buffers(buffers, accepted), row)
    assert robust_buffers(buffers.double(), accepted).dtype == torch.float64
