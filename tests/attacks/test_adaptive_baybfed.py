"""adaptive_baybfed: a backdoor whose base measure is pulled toward that of a clean model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, ServerView
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]
Adaptive: Any = ATTACKS.get("adaptive_baybfed")
BayBFed: Any = DEFENSES.get("baybfed")
floats = st.floats(-100, 100, width=32)


def view_of(global_params: Tensor, clean: Tensor, server_lr: float = 1.0) -> AttackView:
    """A view with 2 malicious of 10 clients."""
    return AttackView(0, global_params, {}, 10, 2, server_lr, torch.Generator(), clean)


def distance(model: Tensor, anchor: Tensor, clean: Tensor, gamma: float = 1.0) -> float:
    """L_BM alone: with alpha 0 the task loss has no weight."""
    attack = Adaptive(alpha=0, gamma=gamma)
    objective: Tensor = attack.objective(torch.tensor(1e6), [model], view_of(anchor, clean))
    return objective.item()


def test_by_hand() -> None:
    # P = 4, w - G = (1, 2, 3, 6) has mean 3 and the clean update (4, 0, -4, 4) mean 1:
    # L_BM = 5 * 4 * (3 - 1)^2 = 80; with gamma 2 it is 20 * (3 - 0.5)^2 = 125;
    # 0.75 * 8 + 0.25 * 80 = 26.
    anchor = torch.tensor([1.0, 1.0, 0.0, -1.0])
    params = [torch.tensor([[2.0, 3.0]]), torch.tensor([3.0, 5.0])]
    view = view_of(anchor, torch.tensor([4.0, 0.0, -4.0, 4.0]))
    loss = torch.tensor(8.0)
    assert Adaptive(alpha=0, gamma=1).objective(loss, params, view).item() == 80
    assert Adaptive(alpha=0, gamma=2).objective(loss, params, view).item() == 125
    assert Adaptive(alpha=0.75, gamma=1).objective(loss, params, view).item() == 26
    # auto: 10 / (1 * 2) = 5, so 20 * (3 - 0.2)^2 = 156.8
    auto = Adaptive(alpha=0, gamma="auto").objective(loss, params, view).item()
    assert auto == pytest.approx(156.8)
    # bounded: |w - G| = sqrt(50), |clean| = sqrt(48), so 20 * (3 - sqrt(50 / 48))^2
    bounded = Adaptive(alpha=0, gamma="bounded").objective(loss, params, view).item()
    assert bounded == pytest.approx(20 * (3 - math.sqrt(50 / 48)) ** 2)
    # the client sends gamma (w - G)
    update = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert Adaptive(gamma=2).craft(update, view).tolist() == [2, 4, 6, 12]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(4), st.integers(2, 9)), elements=floats),
    st.floats(0, 1),
    st.floats(0.1, 20),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_objective_and_its_gradient(
    rows: np.ndarray, alpha: float, gamma: float, dtype: torch.dtype
) -> None:
    """For the loss c.w: gradient alpha c + (1 - alpha) 10 (mean(w - G) - mean(u) / gamma)."""
    local, anchor, slope, clean = rows
    p = len(local)
    gap = math.fsum(local - anchor) / p - math.fsum(clean) / p / gamma
    params = [
        nn.Parameter(torch.tensor(local[:1], dtype=dtype)),
        nn.Parameter(torch.tensor(local[1:], dtype=dtype).view(1, -1)),
    ]
    loss = torch.cat([param.reshape(-1) for param in params]) @ torch.tensor(slope, dtype=dtype)
    view = view_of(torch.tensor(anchor, dtype=dtype), torch.tensor(clean, dtype=dtype))
    objective = Adaptive(alpha=alpha, gamma=gamma).objective(loss, params, view)
    objective.backward()

    exact = 1e-12 if dtype == torch.float64 else 1e-5
    reach = 200 + 100 / gamma  # largest possible gap
    size = float(np.abs(slope * local).sum()) + 5 * p * reach**2
    expected = alpha * math.fsum(slope * local) + (1 - alpha) * 5 * p * gap**2
    assert objective.item() == pytest.approx(expected, abs=exact * size)
    gradient = np.concatenate([q.grad.numpy().reshape(-1) for q in params if q.grad is not None])
    np.testing.assert_allclose(
        gradient, alpha * slope + (1 - alpha) * 10 * gap, rtol=0, atol=exact * (200 + 10 * reach)
    )


@pytest.mark.parametrize("p", [2, 100, 10_000])
@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_the_gradient_norm_does_not_depend_on_model_size_and_scale(p: int, gamma: float) -> None:
    """It is 10 times the distance left along the only direction that changes the base measure."""
    rng = torch.Generator().manual_seed(p)
    anchor, clean = torch.randn(2, p, generator=rng, dtype=torch.float64)
    param = nn.Parameter(anchor + 3)
    view = view_of(anchor, clean)
    Adaptive(alpha=0, gamma=gamma).objective(param.sum() * 0, [param], view).backward()
    assert param.grad is not None
    distance_left = math.sqrt(p) * abs(3 - float(clean.mean()) / gamma)
    assert param.grad.norm().item() == pytest.approx(10 * distance_left)


def test_alpha_1_is_the_plain_loss() -> None:
    loss = torch.tensor(2.5, requires_grad=True)
    params = [nn.Parameter(torch.tensor([7.0]))]
    assert Adaptive(alpha=1).objective(loss, params, view_of(torch.zeros(1), torch.ones(1))) is loss


def test_only_the_mean_counts() -> None:
    """Changes that keep the mean cost nothing, which leaves room for a backdoor."""
    anchor, clean = torch.zeros(4, dtype=torch.float64), torch.full((4,), 2.0).double()
    for model in ([2.0, 2.0, 2.0, 2.0], [100.0, -96.0, 3.0, 1.0]):
        assert distance(torch.tensor(model).double(), anchor, clean) == 0
    assert distance(torch.tensor([2.0, 2.0, 2.0, 3.0]).double(), anchor, clean) == 1.25


def base_measures(updates: Tensor, anchor: Tensor, c: float) -> list[float]:
    """H of each row after a round of BayBFed in which all clients start with the same c."""
    defense = BayBFed()
    state = defense.init()
    state["posterior"] |= {i: (c, float(anchor.double().mean())) for i in range(len(updates))}
    ids = torch.arange(len(updates))
    view = ServerView(0, ids, anchor, anchor, {}, torch.Generator())
    outcome, _ = defense.aggregate(updates, state, view)
    measures: list[float] = outcome.details["base_measure"].tolist()
    return measures


@pytest.mark.parametrize("gamma", [1.0, 3.0, "auto", "bounded"])
@pytest.mark.parametrize("c", [1.0, 5.0, 8.0])
def test_the_distance_is_that_of_baybfeds_base_measures(c: float, gamma: float | str) -> None:
    """L_BM = 5 P (c |H_sent - H_clean| / gamma)^2; the attacker does not know the server's c."""
    rng = torch.Generator().manual_seed(1)
    anchor, clean, *updates = torch.randn(6, 30, generator=rng, dtype=torch.float64)
    attack = Adaptive(alpha=0, gamma=gamma)
    view = view_of(anchor, clean)
    sent = [attack.craft(update, view) for update in updates]
    clean_measure, *measures = base_measures(torch.stack([clean, *sent]), anchor, c)
    for update, row, measure in zip(updates, sent, measures, strict=True):
        loss = attack.objective(torch.tensor(0.0), [anchor + update], view).item()
        scale = float(row[0] / update[0])
        gap = math.sqrt(loss / 5 / 30) * scale / c
        assert gap == pytest.approx(abs(measure - clean_measure), rel=1e-6)


def deep() -> nn.Module:
    """A network with a hidden layer, because last-layer gradients sum to zero over the classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def test_training_pulls_the_base_measure_toward_the_clean_one(federation: Make) -> None:
    """A smaller alpha brings both the means and BayBFed's base measures closer."""
    own = {"gamma": 1.0, "epochs": 10, "lr": 0.02}

    def round_of(attack: Attack) -> tuple[Tensor, Tensor, list[int]]:
        made = federation(attack=attack, network=deep(), momentum=0.0)
        start = replace(made.initial(), next_round=0)
        round_ = made._select(start)
        malicious = [
            i
            for i, p in enumerate(round_.participants)
            if p.client in made.rank_context.selection.malicious
        ]
        return start.params, made.ranks.train(round_)[0], malicious

    anchor, honest, rows = round_of(ATTACKS.build({"name": "none"}))
    clean = honest[rows].double()
    gaps, measures = [], []
    for alpha in (1.0, 0.5, 0.1):
        _, updates, _ = round_of(Adaptive(alpha=alpha, **own))
        gaps.append((updates[rows].double() - clean).mean(dim=1).abs())
        both = torch.cat([updates[rows].double(), clean])
        sent, target = torch.tensor(base_measures(both, anchor.double(), 5.0)).view(2, -1)
        measures.append((sent - target).abs())
    for far, nearer, nearest in (gaps, measures):
        assert (nearer < 0.5 * far).all(), far
        assert (nearest < 0.5 * nearer).all(), nearer


def test_the_clean_update_is_what_the_client_would_send_honestly(federation: Make) -> None:
    """Each client's clean update equals its honest update to the bit."""
    seen: list[Tensor] = []

    class Watched(Adaptive):  # type: ignore[misc]
        def craft(self, update: Tensor, view: AttackView) -> Tensor:
            assert view.clean_update is not None
            seen.append(view.clean_update)
            return super().craft(update, view)

    def sent(attack: Attack) -> Tensor:
        made = federation(attack=attack, network=deep())
        return made.ranks.train(made._select(replace(made.initial(), next_round=0)))[0]

    honest = sent(ATTACKS.build({"name": "none"}))
    attacked = sent(Watched(alpha=0.5, gamma=2.0, epochs=2, lr=0.2))
    rows = [i for i in range(6) if not torch.equal(honest[i], attacked[i])]
    assert len(rows) == len(seen) == 2
    assert all(torch.equal(honest[row], clean) for row, clean in zip(rows, seen, strict=True))


@pytest.mark.parametrize("gamma", ["auto", "bounded"])
def test_works_in_miniature(after_rounds: Callable[..., Record], gamma: str) -> None:
    benign = after_rounds(ATTACKS.build({"name": "none"}))["BA"]
    assert after_rounds(Adaptive(alpha=0.5, gamma=gamma))["BA"] > benign + 0.5
    # With alpha 0 the model learns nothing from the data, not even the backdoor.
    assert after_rounds(Adaptive(alpha=0.0, gamma=gamma))["BA"] < benign + 0.2


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be between 0 and 1, got {alpha}"):
        Adaptive(alpha=alpha)
    with pytest.raises(UserError, match=f"got {alpha}"):
        ATTACKS.build({"name": "adaptive_baybfed", "alpha": alpha})
