"""What the tests of untargeted attacks share: a view, exact means, a round and what is sent."""

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
spreads = hnp.arrays(  # honest rows, up to where they lie
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(1, 5)),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)
centres = st.sampled_from([0.0, 1.0, -30.0, 1e4])


def view_of(
    n_clients: int, n_malicious: int, benign: Tensor | None = None, seed: int = 0
) -> AttackView:
    rng = torch.Generator().manual_seed(seed)
    return AttackView(0, torch.zeros(1), {}, n_clients, n_malicious, 1.0, rng, benign=benign)


def sent_by(attack: Omniscient, known: Tensor, n_others: int) -> Tensor:
    """The row [P] that all malicious clients send, for what they know of honest updates [k, P].

    Those are of the k honest clients, beside malicious ones whose own rows are useless; without
    omniscience they are the rows of the k malicious clients themselves.
    """
    n, p = len(known) + n_others, known.shape[1]
    if attack.omniscient:
        useless = torch.full((n_others, p), torch.nan, dtype=known.dtype)
        sent = attack.collude(useless, view_of(n, n_others, known))
    else:
        sent = attack.collude(known, view_of(n, len(known)))
    assert len(sent) == (n_others if attack.omniscient else len(known))
    first = sent[0]
    assert all(torch.equal(row, first) for row in sent)
    assert (first.shape, first.dtype) == ((p,), known.dtype)
    return first


def nearly_equal(n: int, p: int, seed: int) -> Tensor:
    """Float32 rows that differ by 1e-4 of their size."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(p, generator=rng) * (1 + 1e-4 * torch.randn(n, p, generator=rng))


def columns_of(rows: Tensor) -> list[tuple[float, list[float]]]:
    """Of each coordinate the mean, rounded but once or twice, and the values."""
    columns = rows.double().T.tolist()
    return [(math.fsum(column) / len(column), column) for column in columns]


@dataclass(frozen=True)
class Spy(Defense):
    """Averages, and remembers the rows in its state."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean_of(updates, torch.ones(len(updates), dtype=torch.bool)), updates.clone()


@dataclass(frozen=True)
class Exchange:
    """What the clients of one round sent."""

    honest: Tensor  # [N - M, P]
    sent: Tensor  # [M, P] by the malicious ones
    own: Tensor  # [M, P] by the same clients, were they honest


def exchange(make: Make, attack: Attack, index: int = 0, **settings: Any) -> Exchange:
    """A round under the attack, from the initial model.

    Whatever the attack, honest clients send the same bits as without one, and there is no BA.
    """
    rows, record = _round(make(Spy(), attack, **settings), index)
    usual, _ = _round(make(Spy(), ATTACKS.build({"name": "none"}), **settings), index)
    malicious = torch.tensor([client["malicious"] for client in record["clients"]])
    assert malicious.any()
    assert torch.equal(rows[~malicious], usual[~malicious])
    assert not any("refused" in client for client in record["clients"])
    assert record["attacked"] is True
    assert record["BA"] is None
    assert record["BA_by_backdoor"] == {}
    return Exchange(rows[~malicious], rows[malicious], usual[malicious])


def _round(made: Federation, index: int) -> tuple[Tensor, Record]:
    end, record = made.round(replace(made.initial(), next_round=index))
    return end.defense_state, record


def assert_refused(name: str, setting: str, value: Any) -> None:
    """With the value: by the class, and in one line where it comes from a file or a command."""
    with pytest.raises(ValueError, match=rf"^{setting} must be .*, got ") as refused:
        ATTACKS.get(name)(**{setting: value})
    assert str(refused.value).endswith(f", got {value}")
    with pytest.raises(UserError, match=rf"^attack {name}: {setting} must be ") as told:
        ATTACKS.build({"name": name, setting: value})
    assert str(told.value).endswith(f", got {value}")
    assert "\n" not in str(told.value)
