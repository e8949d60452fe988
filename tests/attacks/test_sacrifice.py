"""sacrifice: clients that send a multiple of G raise BayBFed's threshold for the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from untargeted import Spy

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, ServerView
from fedbench.federation import Federation
from fedbench.results.run_dir import Record
from fedbench.testing import AttackContract

Make = Callable[..., Federation]
Sacrifice: Any = ATTACKS.get("sacrifice")
floats = st.floats(-100, 100, width=32, allow_subnormal=False)
AS_IN_THE_PAPER: dict[str, Any] = {"norm_range": None, "score_cap": None}
N_MALICIOUS = 6


class TestSacrifice(AttackContract):
    plugins = (
        "sacrifice",
        {"name": "sacrifice", "n_sacrificed": 2, "length": 900, "gamma": "bounded"},
        {"name": "sacrifice", "n_sacrificed": 50, "constraint": "cosine", "alpha": 0.5},
    )
    invalid: ClassVar = {
        "n_sacrificed": (0, -1),
        "length": (0.0, -10.0, math.nan, math.inf),
        "alpha": (-0.1, 1.1),
        "gamma": (0.0, "bound"),
    }


def sent(updates: Tensor, global_params: Tensor, **chosen: Any) -> Tensor:
    m = len(updates)
    view = AttackView(0, global_params, {}, m + 20, m, 1.0, torch.Generator())
    rows: Tensor = Sacrifice(**chosen).collude(updates, view)
    assert (rows.shape, rows.dtype) == (updates.shape, updates.dtype)
    return rows


def test_by_hand() -> None:
    # The norms are 10, 2 and 5, and their median is 5. G / |G| = (0.6, 0.8), so a sacrificed client
    # with length 4 sends 4 * 5 * (0.6, 0.8) = (12, 16).
    updates = torch.tensor([[6.0, -8.0], [0.0, 2.0], [3.0, 4.0]])
    anchor = torch.tensor([3.0, 4.0])
    one = sent(updates, anchor, length=4)
    assert one.tolist() == [pytest.approx([12, 16]), [0, 2], [3, 4]]
    two = sent(updates, anchor, length=4, n_sacrificed=2)
    assert two.tolist() == [pytest.approx([12, 16])] * 2 + [[3, 4]]
    # one of them is always left
    assert torch.equal(sent(updates, anchor, length=4, n_sacrificed=9), two)
    # with the median of two norms, (10 + 2) / 2, length 1 gives 6 (0.6, 0.8)
    pair = sent(updates[:2], anchor, length=1)
    assert pair.tolist() == [pytest.approx([3.6, 4.8]), [0, 2]]


def test_nobody_is_sacrificed_without_accomplices_or_a_direction() -> None:
    updates = torch.tensor([[6.0, -8.0], [0.0, 2.0]])
    assert torch.equal(sent(updates[:1], torch.ones(2), n_sacrificed=3), updates[:1])
    assert torch.equal(sent(updates, torch.zeros(2)), updates)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.integers(2, 9), st.integers(1, 6)), elements=floats),
    st.integers(1, 9),
    st.floats(0.01, 1e4),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_against_the_definition(
    rows: np.ndarray, n_sacrificed: int, length: float, dtype: torch.dtype
) -> None:
    anchor, *own = rows.tolist()
    norms = sorted(math.hypot(*row) for row in own)
    middle = (norms[(len(own) - 1) // 2] + norms[len(own) // 2]) / 2
    size = math.hypot(*anchor)
    expected = [
        [length * middle * g / size for g in anchor]
        if i < min(n_sacrificed, len(own) - 1) and size > 0
        else row
        for i, row in enumerate(own)
    ]
    updates = torch.tensor(own, dtype=dtype)
    found = sent(
        updates, torch.tensor(anchor, dtype=dtype), n_sacrificed=n_sacrificed, length=length
    )
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(found.numpy(), expected, rtol=exact, atol=1e-30)


def updates_of(made: Federation) -> Tensor:
    """Updates [N, P] that reach the server in round 0."""
    end, _ = made.round(replace(made.initial(), next_round=0))
    updates: Tensor = end.defense_state
    return updates


@pytest.mark.parametrize("n_sacrificed", [1, 2])
def test_the_others_send_what_constrain_and_scale_does(federation: Make, n_sacrificed: int) -> None:
    own = {"alpha": 0.6, "constraint": "cosine", "gamma": "bounded", "epochs": 2, "lr": 0.02}
    scaled = ATTACKS.build({"name": "constrain_and_scale", **own})
    plain = updates_of(federation(Spy(), scaled, pmr=0.5))
    attack = Sacrifice(n_sacrificed=n_sacrificed, length=7.0, **own)
    made = federation(Spy(), attack, pmr=0.5)
    rows = updates_of(made)
    malicious = [p.malicious for p in made.rank_context.selection.select(0)]
    given_up = [i for i, bad in enumerate(malicious) if bad][:n_sacrificed]
    changed = [i for i in range(6) if not torch.equal(rows[i], plain[i])]
    assert changed == given_up
    anchor = made.initial().params.double()
    middle = plain[malicious].double().norm(dim=1).quantile(0.5)
    for i in given_up:
        row = rows[i].double()
        assert row.norm().item() == pytest.approx(7 * middle.item(), rel=1e-6)
        assert torch.cosine_similarity(row, anchor, dim=0).item() == pytest.approx(1, abs=1e-9)


def test_works_in_miniature(after_rounds: Callable[..., Record]) -> None:
    """Without a defense, the multiple of G hardly matters."""
    benign = after_rounds(ATTACKS.build({"name": "none"}), pmr=0.5)["BA"]
    assert after_rounds(Sacrifice(), pmr=0.5)["BA"] > benign + 0.3


def baybfed_keeps(
    attack: Attack, size: float, n_rounds: int = 3, **options: Any
) -> list[tuple[int, int]]:
    """How many of the 6 malicious and 24 honest clients BayBFed keeps in each attacked round.

    Two rounds without an attack come first. Malicious updates are `size` times as long as honest
    ones.
    """
    n, p = 30, 3000
    rng = torch.Generator().manual_seed(0)
    global_params, initial = 0.05 * torch.randn(2, p, generator=rng) + 0.01
    aim, other_aim = torch.randn(2, p, generator=rng)
    defense = DEFENSES.build({"name": "baybfed", **options})
    state, kept = defense.init(), []
    for index in range(2 + n_rounds):
        updates = 0.01 * (0.5 * aim + torch.randn(n, p, generator=rng))
        if index >= 2:
            poisoned = 0.01 * (other_aim + 0.2 * torch.randn(N_MALICIOUS, p, generator=rng))
            view = AttackView(index, global_params, {}, n, N_MALICIOUS, 1.0, torch.Generator())
            colluded = attack.collude(size * poisoned, view)
            updates[:N_MALICIOUS] = torch.stack([*colluded])
        server = ServerView(index, torch.arange(n), global_params, initial, {}, rng)
        outcome, state = defense.aggregate(updates, state, server)
        accepted = outcome.weights > 0
        kept.append((int(accepted[:N_MALICIOUS].sum()), int(accepted[N_MALICIOUS:].sum())))
    return kept[2:]


ALL_REJECTED, ACCOMPLICES_PASS = [(0, 24)] * 3, [(5, 24)] * 3


@pytest.mark.parametrize("length", [10.0, 100.0])
def test_by_baybfeds_mean_the_accomplices_pass(length: float) -> None:
    """A sacrificed client raises the mean above their scores; without one, all are rejected."""
    plain = ATTACKS.build({"name": "constrain_and_scale"})
    for size in (5.0, 15.0):
        assert baybfed_keeps(plain, size, **AS_IN_THE_PAPER) == ALL_REJECTED
        found = baybfed_keeps(Sacrifice(length=length), size, **AS_IN_THE_PAPER)
        assert found == ACCOMPLICES_PASS, size


@pytest.mark.parametrize("length", [10.0, 900.0])
def test_with_baybfeds_limits_long_accomplices_are_rejected(length: float) -> None:
    assert baybfed_keeps(Sacrifice(length=length), 15.0) == ALL_REJECTED


def test_with_baybfeds_limits_short_accomplices_still_pass() -> None:
    """Their scores are below the raised mean: the limit that docs/baybfed.md leaves open."""
    assert baybfed_keeps(ATTACKS.build({"name": "constrain_and_scale"}), 5.0) == ALL_REJECTED
    assert baybfed_keeps(Sacrifice(), 5.0) == ACCOMPLICES_PASS


def test_it_is_adaptive_to_baybfed_alone() -> None:
    assert Sacrifice().adaptive_to == ("baybfed",)
