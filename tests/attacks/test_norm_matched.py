"""norm_matched: a backdoor with the norm of an honest update and its cosine with G."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, ServerView
from fedbench.federation import Federation
from fedbench.results.run_dir import Record
from fedbench.testing import AttackContract

Make = Callable[..., Federation]
NormMatched: Any = ATTACKS.get("norm_matched")
Wide = np.longdouble
dtypes = st.sampled_from([torch.float32, torch.float64])
vectors = hnp.arrays(  # u, u_clean and G
    np.float64,
    st.tuples(st.just(3), st.integers(2, 9)),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)


class TestNormMatched(AttackContract):
    plugins = (
        "norm_matched",
        {"name": "norm_matched", "epochs": 3, "lr": 0.02, "lr_decay": 0.5, "lr_decay_at": [0.5]},
    )
    invalid: ClassVar = {"epochs": (0, -1), "lr": (0.0, -0.1)}


def crafted(update: Tensor, clean: Tensor, global_params: Tensor) -> Tensor:
    view = AttackView(0, global_params, {}, 10, 2, 1.0, torch.Generator(), clean)
    sent: Tensor = NormMatched().craft(update, view)
    assert (sent.shape, sent.dtype) == (update.shape, update.dtype)
    return sent


def norm(u: np.ndarray) -> Any:
    return np.sqrt((u.astype(Wide) ** 2).sum())


def cosine(u: np.ndarray, v: np.ndarray) -> float:
    return float(u.astype(Wide) @ v.astype(Wide) / (norm(u) * norm(v)))


def in_numpy(u: Tensor) -> np.ndarray:
    return u.double().numpy()


def by_definition(update: np.ndarray, clean: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    """|u_clean| (c g + sqrt(1 - c^2) v / |v|), with more digits than float64 has."""
    g = anchor.astype(Wide) / norm(anchor)
    v = update - (update @ g) * g
    c = clean @ g / norm(clean)
    sine = np.sqrt(max(1 - c**2, Wide(0)))
    return np.asarray(norm(clean) * (c * g + sine * v / norm(v)))


def test_by_hand() -> None:
    # g = (0, 0, 1). u_clean = (3, 0, -4) has norm 5 and cosine -4/5; u = (0, -6, 2) has the part
    # v = (0, -6, 0) across G. So the client sends 5 (-4/5 (0, 0, 1) + 3/5 (0, -1, 0)).
    anchor, clean = torch.tensor([0.0, 0.0, 2.0]), torch.tensor([3.0, 0.0, -4.0])
    assert crafted(torch.tensor([0.0, -6.0, 2.0]), clean, anchor).tolist() == [0, -3, -4]


def test_by_hand_without_a_direction() -> None:
    update, clean = torch.tensor([0.0, -6.0, 8.0]), torch.tensor([3.0, 0.0, -4.0])
    zero, anchor = torch.zeros(3), torch.tensor([0.0, 0.0, 2.0])
    # G is 0: only the norm is matched, 5 / 10 u
    assert crafted(update, clean, zero).tolist() == [0, -3, 4]
    # u has no part across G, or is 0: the client sends u_clean
    assert torch.equal(crafted(-3 * anchor, clean, anchor), clean)
    assert torch.equal(crafted(zero, clean, anchor), clean)
    assert torch.equal(crafted(zero, clean, zero), clean)
    # u_clean is 0, and so is what the client sends
    assert torch.equal(crafted(update, zero, anchor), zero)
    # u_clean has no part across G: there is no room for a backdoor
    assert torch.equal(crafted(update, -anchor, anchor), -anchor)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(vectors, dtypes)
def test_against_the_definition(rows: np.ndarray, dtype: torch.dtype) -> None:
    update, clean, anchor = rows
    assume(norm(update) > 1e-3 and norm(clean) > 1e-3 and norm(anchor) > 1e-3)
    assume(abs(cosine(update, anchor)) < 1 - 1e-6)
    sent = crafted(*(torch.tensor(row, dtype=dtype) for row in rows))
    exact = 1e-8 if dtype == torch.float64 else 1e-6
    expected = by_definition(update, clean, anchor)
    np.testing.assert_allclose(in_numpy(sent), expected, rtol=0, atol=exact * float(norm(clean)))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(vectors, st.tuples(*[st.integers(-25, 25)] * 3), dtypes)
@example(np.array([[0.0, 0], [3, 4], [1, 1]]), (0, 0, 0), torch.float32)
@example(np.array([[3.0, 4], [0, 0], [1, 1]]), (0, 0, 0), torch.float32)
@example(np.array([[3.0, 4], [1, 1], [0, 0]]), (0, 0, 0), torch.float32)
@example(np.zeros((3, 4)), (0, 0, 0), torch.float32)
@example(np.array([[0.3, 0.7], [1, 2], [0.3, 0.7]]), (3, 0, -25), torch.float32)  # v is rounding
def test_norm_and_cosine_are_those_of_the_clean_update(
    rows: np.ndarray, powers: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """For norms from 1e-25 to 1e27, and where a vector is 0 or parallel to another."""
    update, clean, anchor = (
        torch.tensor(row * 10.0**power, dtype=dtype)
        for row, power in zip(rows, powers, strict=True)
    )
    sent = crafted(update, clean, anchor)
    assert sent.isfinite().all()
    sent_norm, clean_norm = float(norm(in_numpy(sent))), float(norm(in_numpy(clean)))
    assert sent_norm == pytest.approx(clean_norm, rel=1e-6, abs=1e-37)
    if clean_norm > 1e-30 and anchor.any():
        matched = cosine(in_numpy(clean), in_numpy(anchor))
        assert cosine(in_numpy(sent), in_numpy(anchor)) == pytest.approx(matched, abs=1e-6)


def test_long_float32_vectors_are_summed_in_float64() -> None:
    """The common part of all coordinates would add up to a large error in float32."""
    rng = torch.Generator().manual_seed(0)
    rows = [scale * (1 + torch.randn(500_000, generator=rng)) for scale in (1.0, 1e-3, 10.0)]
    _, clean, anchor = map(in_numpy, rows)
    sent = in_numpy(crafted(*rows))
    assert float(norm(sent)) == pytest.approx(float(norm(clean)), rel=1e-8)
    assert cosine(sent, anchor) == pytest.approx(cosine(clean, anchor), abs=1e-8)


def updates_of(made: Federation) -> Tensor:
    return made.ranks.train(made._select(replace(made.initial(), next_round=0)))[0]


def test_in_a_round_each_client_matches_its_own_honest_update(federation: Make) -> None:
    made = federation(attack=NormMatched(epochs=3, lr=0.2))
    honest = updates_of(federation(attack=ATTACKS.build({"name": "none"})))
    sent, anchor = updates_of(made), in_numpy(made.initial().params)
    rows = [i for i in range(6) if not torch.equal(sent[i], honest[i])]
    assert len(rows) == 2
    for row in rows:
        mine, own = in_numpy(sent[row]), in_numpy(honest[row])
        assert float(norm(mine)) == pytest.approx(float(norm(own)), rel=1e-6)
        assert cosine(mine, anchor) == pytest.approx(cosine(own, anchor), abs=1e-6)
        assert cosine(mine, own) < 0.95


def test_norm_ratio_is_about_1(federation: Make) -> None:
    def ratio(attack: Attack) -> float:
        made = federation(attack=attack)
        _, record = made.round(replace(made.initial(), next_round=0))
        found: float = record["norm_ratio"]
        return found

    assert ratio(NormMatched()) == pytest.approx(1, abs=0.2)
    assert ratio(ATTACKS.build({"name": "constrain_and_scale"})) > 1.5


def test_works_in_miniature(after_rounds: Callable[..., Record]) -> None:
    benign = after_rounds(ATTACKS.build({"name": "none"}), pmr=0.5)["BA"]
    assert after_rounds(NormMatched(), pmr=0.5)["BA"] > benign + 0.3


def kept_by_baybfed(attack: Attack, seed: int) -> tuple[float, float]:
    """Share of the 6 malicious and of the 24 honest clients that BayBFed keeps in 3 rounds.

    All clean updates have norm 10 and cosine -.1 with G, both within a few percent; poisoned ones
    are twice as long, and have another cosine and another common direction.
    """
    p, n, m = 2000, 30, 6
    rng = torch.Generator().manual_seed(seed)
    initial, global_params = 0.05 * torch.randn(2, p, generator=rng) + 0.01
    g = global_params / global_params.norm()
    defense = DEFENSES.build({"name": "baybfed"})
    state, kept = defense.init(), []

    def drawn(n_rows: int, length: float, cosine: float) -> Tensor:
        side = torch.randn(1, p, generator=rng) + torch.randn(n_rows, p, generator=rng)
        side -= (side @ g)[:, None] * g
        cosines = cosine + 0.02 * torch.randn(n_rows, 1, generator=rng)
        lengths = length * (1 + 0.03 * torch.randn(n_rows, 1, generator=rng))
        unit = side / side.norm(dim=1, keepdim=True)
        rows: Tensor = lengths * (cosines * g + (1 - cosines**2).sqrt() * unit)
        return rows

    for index in range(3):
        clean, poisoned = drawn(n, 10, -0.1), drawn(m, 20, -0.3)
        view = AttackView(index, global_params, {}, n, m, 1.0, torch.Generator())
        views = [replace(view, clean_update=own) for own in clean[:m]]
        sent = [attack.craft(u, own) for u, own in zip(poisoned, views, strict=True)]
        updates = torch.cat([torch.stack(sent), clean[m:]])
        server = ServerView(index, torch.arange(n), global_params, initial, {}, rng)
        outcome, state = defense.aggregate(updates, state, server)
        kept.append(outcome.weights > 0)
    shares = torch.stack(kept).double()
    return float(shares[:, :m].mean()), float(shares[:, m:].mean())


@pytest.mark.parametrize("seed", range(3))
def test_baybfed_keeps_it_but_not_constrain_and_scale(seed: int) -> None:
    for gamma in (1.0, "auto"):
        scaled = ATTACKS.build({"name": "constrain_and_scale", "gamma": gamma})
        malicious, honest = kept_by_baybfed(scaled, seed)
        assert malicious == 0
        assert honest > 0.95
    malicious, honest = kept_by_baybfed(NormMatched(), seed)
    assert malicious > 0.5
    assert malicious == pytest.approx(honest, abs=0.2)


def test_the_training_settings_apply(federation: Make) -> None:
    default = updates_of(federation(attack=NormMatched()))
    assert torch.equal(updates_of(federation(attack=NormMatched(epochs=1, lr=0.05))), default)
    assert not torch.equal(updates_of(federation(attack=NormMatched(epochs=2))), default)
    assert not torch.equal(updates_of(federation(attack=NormMatched(lr=0.1))), default)


def test_it_is_adaptive_to_baybfed_alone() -> None:
    assert NormMatched().adaptive_to == ("baybfed",)
