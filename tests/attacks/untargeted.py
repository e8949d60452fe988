"""Helpers for tests of untargeted attacks: views, exact means, the updates sent in a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView, Omniscient
from fedbench.defense import Aggregate, Defense, ServerView, mean_of
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]
NOT_ABOVE_0 = [0.0, -0.5, -5.0, float("nan"), float("inf"), float("-inf")]

dtypes = st.sampled_from([torch.float32, torch.float64])
spreads = hnp.arrays(  # honest rows around 0; tests add a center
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(1, 5)),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)
centers = st.sampled_from([0.0, 1.0, -30.0, 1e4])


def view_of(
    n_clients: int, n_malicious: int, benign: Tensor | None = None, seed: int = 0
) -> AttackView:
    rng = torch.Generator().manual_seed(seed)
    return AttackView(0, torch.zeros(1), {}, n_clients, n_malicious, 1.0, rng, benign=benign)


def sent_by(attack: Omniscient, honest: Tensor, n_others: int) -> Tensor:
    """Return the row [P] that all malicious clients send, given k honest updates [k, P].

    If the attack is omniscient, these come from k honest clients, and the `n_others` malicious ones
    have NaN updates. Otherwise they are the updates of k malicious clients.
    """
    n, p = len(honest) + n_others, honest.shape[1]
    if attack.omniscient:
        useless = torch.full((n_others, p), torch.nan, dtype=honest.dtype)
        sent = attack.collude(useless, view_of(n, n_others, honest))
    else:
        sent = attack.collude(honest, view_of(n, len(honest)))
    assert len(sent) == (n_others if attack.omniscient else len(honest))
    first = sent[0]
    assert all(torch.equal(row, first) for row in sent)
    assert (first.shape, first.dtype) == ((p,), honest.dtype)
    return first


def nearly_equal(n: int, p: int, seed: int) -> Tensor:
    """Float32 rows that differ by 1e-4 relative to their size."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(p, generator=rng) * (1 + 1e-4 * torch.randn(n, p, generator=rng))


def columns_of(rows: Tensor) -> list[tuple[float, list[float]]]:
    """For each coordinate, its correctly summed mean and its values."""
    columns = rows.double().T.tolist()
    return [(math.fsum(column) / len(column), column) for column in columns]


@dataclass(frozen=True)
class Spy(Defense):
    """Average the updates and keep them as the state."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), updates.clone()


@dataclass(frozen=True)
class SentUpdates:
    """The updates of one round."""

    honest: Tensor  # [N - M, P] from honest clients
    sent: Tensor  # [M, P] from malicious clients
    clean: Tensor  # [M, P] from the same malicious clients in a round without an attack


def sent_updates(make: Make, attack: Attack, index: int = 0, **settings: Any) -> SentUpdates:
    """Run one round under the attack, from the initial model.

    Check that honest clients send the same bits as without an attack and that BA is not measured.
    """
    rows, record = _round(make(Spy(), attack, **settings), index)
    benign, _ = _round(make(Spy(), ATTACKS.build({"name": "none"}), **settings), index)
    malicious = torch.tensor([client["malicious"] for client in record["clients"]])
    assert malicious.any()
    assert torch.equal(rows[~malicious], benign[~malicious])
    assert not any("refused" in client for client in record["clients"])
    assert record["attacked"] is True
    assert record["BA"] is None
    assert record["BA_by_backdoor"] == {}
    return SentUpdates(rows[~malicious], rows[malicious], benign[malicious])


def _round(made: Federation, index: int) -> tuple[Tensor, Record]:
    end, record = made.round(replace(made.initial(), next_round=index))
    return end.defense_state, record


def assert_refused(name: str, setting: str, value: Any) -> None:
    """The class raises ValueError and the registry a one-line UserError; both name the value."""
    with pytest.raises(ValueError, match=rf"^{setting} must be .*, got ") as refused:
        ATTACKS.get(name)(**{setting: value})
    assert str(refused.value).endswith(f", got {value}")
    with pytest.raises(UserError, match=rf"^attack {name}: {setting} must be ") as shown:
        ATTACKS.build({"name": name, setting: value})
    assert str(shown.value).endswith(f", got {value}")
    assert "\n" not in str(shown.value)
