"""constrain_and_scale: a loss that stays near the global model, an update that replaces it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView
from fedbench.defense import DEFENSES, ServerView
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]
ConstrainAndScale: Any = ATTACKS.get("constrain_and_scale")
floats = st.floats(-100, 100, width=32)


def view_of(
    global_params: Tensor,
    n_clients: int = 10,
    n_malicious: int = 2,
    server_lr: float = 1.0,
    clean: Tensor | None = None,
) -> AttackView:
    rng = torch.Generator()
    return AttackView(0, global_params, {}, n_clients, n_malicious, server_lr, rng, clean)


def l2(alpha: float) -> Any:
    return ConstrainAndScale(alpha=alpha, constraint="l2", gamma=1.0)


def test_by_hand() -> None:
    # w is split into two tensors: |w - G| = |(3, 4)| = 5; 0.75 * 8 + 0.25 * 5 = 7.25
    params = [torch.tensor([[4.0]]), torch.tensor([6.0])]
    view = view_of(torch.tensor([1.0, 2.0]))
    assert l2(0.75).objective(torch.tensor(8.0), params, view).item() == 7.25
    # gamma = 10 / (0.5 * 2) = 10
    sent = ConstrainAndScale(gamma="auto").craft(
        torch.tensor([1.0, -2.0]), view_of(torch.zeros(2), server_lr=0.5)
    )
    assert sent.tolist() == [10, -20]


def test_by_hand_cosine() -> None:
    # G = (4, 0) and w = (4, 3) with norm 5: cos = 4 * 4 / (5 * 4) = 0.8 for every gamma.
    # L_ano = 1000 * 0.2; 0.75 * 8 + 0.25 * 200 = 56.
    params = [torch.tensor([4.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)]
    view = view_of(torch.tensor([4.0, 0.0], dtype=torch.float64))
    for gamma in (1, 2, "auto"):
        attack = ConstrainAndScale(alpha=0.75, constraint="cosine", gamma=gamma)
        assert attack.objective(torch.tensor(8.0), params, view).item() == pytest.approx(56)


def test_by_hand_bounded() -> None:
    # auto would be 10, giving (30, 40) with norm 50; an honest update of norm 20 bounds it to 4.
    update = torch.tensor([3.0, 4.0])
    bounded = ConstrainAndScale(gamma="bounded")
    for length, expected in ((20.0, [12, 16]), (100.0, [30, 40]), (2.5, [1.5, 2])):
        clean = torch.tensor([0.0, -length])
        sent = bounded.craft(update, view_of(torch.zeros(2), server_lr=0.5, clean=clean))
        assert sent.tolist() == pytest.approx(expected)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(3), st.integers(2, 9)), elements=floats),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_objective_and_its_gradient(rows: np.ndarray, alpha: float, dtype: torch.dtype) -> None:
    """For the loss c.w, the gradient is alpha c + (1 - alpha) (w - G) / |w - G|."""
    local, anchor, slope = rows.tolist()
    distance = math.dist(local, anchor)
    assume(distance > 1e-3)
    whole = torch.tensor(local, dtype=dtype)
    params = [nn.Parameter(whole[:1].clone()), nn.Parameter(whole[1:].view(1, -1).clone())]
    loss = torch.cat([p.reshape(-1) for p in params]) @ torch.tensor(slope, dtype=dtype)
    view = view_of(torch.tensor(anchor, dtype=dtype))
    objective = l2(alpha).objective(loss, params, view)
    objective.backward()

    task = math.fsum(c * w for c, w in zip(slope, local, strict=True))
    scale = sum(abs(c * w) for c, w in zip(slope, local, strict=True)) + distance
    assert objective.item() == pytest.approx(
        alpha * task + (1 - alpha) * distance, abs=1e-5 * scale
    )
    gradient = [g for p in params if p.grad is not None for g in p.grad.reshape(-1).tolist()]
    expected = [
        alpha * c + (1 - alpha) * (w - g) / distance
        for c, w, g in zip(slope, local, anchor, strict=True)
    ]
    assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(3), st.integers(2, 9)), elements=floats),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_cosine_objective_and_its_gradient(
    rows: np.ndarray, alpha: float, dtype: torch.dtype
) -> None:
    """For the loss c.w and unit vectors w', G', the gradient is

    alpha c - (1 - alpha) 1000 (G' - cos w') / |w|.
    """
    local, anchor, slope = rows
    local_length, length = float(np.linalg.norm(local)), float(np.linalg.norm(anchor))
    assume(local_length > 1 and length > 1)
    params = [nn.Parameter(torch.tensor(part, dtype=dtype)) for part in (local[:1], local[1:])]
    loss = torch.cat([p.reshape(-1) for p in params]) @ torch.tensor(slope, dtype=dtype)
    attack = ConstrainAndScale(alpha=alpha, constraint="cosine")
    objective = attack.objective(loss, params, view_of(torch.tensor(anchor, dtype=dtype)))
    objective.backward()

    exact = 1e-9 if dtype == torch.float64 else 1e-3
    cosine = float(local @ anchor) / (local_length * length)
    size = 1000 + float(np.abs(slope * local).sum())
    # G + (w - G) cancels in float32, with an error relative to the larger of both
    worse = 1 + float(np.abs(rows[:2]).max()) / local_length
    expected = alpha * float(slope @ local) + (1 - alpha) * 1000 * (1 - cosine)
    assert objective.item() == pytest.approx(expected, abs=exact * size * worse)
    gradient = np.concatenate([p.grad.numpy().reshape(-1) for p in params if p.grad is not None])
    pull = -1000 * (anchor / length - cosine * local / local_length) / local_length
    np.testing.assert_allclose(
        gradient,
        alpha * slope + (1 - alpha) * pull,
        rtol=0,
        atol=exact * worse * (100 + 1000 / local_length),
    )


def test_alpha_1_is_the_plain_loss() -> None:
    loss = torch.tensor(2.5, requires_grad=True)
    params = [nn.Parameter(torch.tensor([7.0]))]
    for constraint in ("l2", "cosine"):
        attack = ConstrainAndScale(alpha=1, constraint=constraint)
        assert attack.objective(loss, params, view_of(torch.zeros(1))) is loss


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("constraint", ["l2", "cosine"])
def test_at_the_global_model_the_gradient_is_that_of_the_loss(
    alpha: float, constraint: str
) -> None:
    """|w - G| has no gradient at G, where a client starts; it must be 0, not NaN."""
    for gamma in (7.0, "auto", "bounded"):
        param = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        loss = param @ torch.tensor([3.0, 5.0], dtype=torch.float64)
        attack = ConstrainAndScale(alpha=alpha, constraint=constraint, gamma=gamma)
        view = view_of(param.detach().clone(), clean=torch.ones(2, dtype=torch.float64))
        attack.objective(loss, [param], view).backward()
        assert param.grad is not None
        assert param.grad.tolist() == pytest.approx([alpha * 3, alpha * 5], abs=1e-9)


def trained(alpha: float) -> tuple[float, float]:
    """Train from G; return the task loss |w - t|^2 and the distance |w - G|."""
    anchor, wanted = torch.zeros(4), torch.full((4,), 2.0)
    param = nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([param], lr=0.05)
    for _ in range(500):
        optimizer.zero_grad()
        loss = (param - wanted).square().sum()
        l2(alpha).objective(loss, [param], view_of(anchor)).backward()
        optimizer.step()
    return (param - wanted).square().sum().item(), param.detach().norm().item()


def test_a_lower_alpha_stays_nearer_and_learns_less() -> None:
    """The optimum, 2 alpha (|t| - d) = 1 - alpha, is d = |t| - (1 - alpha) / (2 alpha); |t| = 4."""
    outcomes = [trained(alpha) for alpha in (1.0, 0.7, 0.3)]
    for alpha, (loss, distance) in zip((1.0, 0.7, 0.3), outcomes, strict=True):
        short = (1 - alpha) / (2 * alpha)
        assert distance == pytest.approx(4 - short, abs=0.01)
        assert loss == pytest.approx(short**2, abs=0.01)


def test_alpha_0_pulls_back_to_the_global_model() -> None:
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    loss = param.sum()
    l2(0).objective(loss, [param], view_of(torch.zeros(2))).backward()
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([0.6, 0.8])  # a step along -grad goes to G


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=floats),
    st.integers(0, 30),
    st.floats(0.01, 10),
    st.one_of(st.just("auto"), st.floats(0.01, 1000), st.integers(1, 100)),
)
def test_craft_scales_each_row(
    rows: np.ndarray, n_honest: int, server_lr: float, gamma: float | str
) -> None:
    m = len(rows)
    view = view_of(torch.zeros(rows.shape[1]), n_honest + m, m, server_lr)
    factor = (n_honest + m) / (server_lr * m) if isinstance(gamma, str) else gamma
    updates = torch.tensor(rows)
    sent = ConstrainAndScale(gamma=gamma).craft(updates, view)
    assert sent.shape == rows.shape
    assert torch.equal(updates, torch.tensor(rows))
    np.testing.assert_allclose(
        sent.numpy(), rows.astype(np.float64) * factor, rtol=1e-6, atol=1e-30
    )


def averaged(anchor: Tensor, rows: Tensor, n_clients: int, server_lr: float) -> Tensor:
    """Return the global model after FedAvg of the rows and zeros from honest clients."""
    updates = torch.cat([rows, rows.new_zeros(n_clients - len(rows), rows.shape[1])])
    view = ServerView(0, torch.arange(n_clients), anchor, anchor, {}, torch.Generator())
    outcome, _ = DEFENSES.build({"name": "fedavg"}).aggregate(updates, None, view)
    return anchor + server_lr * outcome.update


def test_auto_replaces_the_global_model_exactly() -> None:
    """N, M and server_lr are powers of two and the weights integers, so nothing is rounded."""
    anchor = torch.tensor([5.0, -3.0, 0.0, 64.0])
    models = torch.tensor([[1.0, 7.0, -2.0, 100.0], [9.0, -9.0, 4.0, 0.0]])
    auto = ConstrainAndScale(gamma="auto")
    for n_clients, server_lr in ((2, 1.0), (8, 1.0), (8, 0.5), (16, 4.0), (32, 0.125)):
        for kept in (models[:1], models):
            view = view_of(anchor, n_clients, len(kept), server_lr)
            rows = torch.stack([auto.craft(model - anchor, view) for model in kept])
            after = averaged(anchor, rows, n_clients, server_lr)
            assert torch.equal(after, kept.mean(dim=0))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(2, 6), st.integers(1, 5)), elements=floats),
    st.integers(0, 30),
    st.floats(0.01, 10),
)
def test_auto_replaces_the_global_model_with_the_mean_malicious_model(
    rows: np.ndarray, n_honest: int, server_lr: float
) -> None:
    anchor, models = torch.tensor(rows[0]), torch.tensor(rows[1:])
    view = view_of(anchor, n_honest + len(models), len(models), server_lr)
    auto = ConstrainAndScale(gamma="auto")
    sent = torch.stack([auto.craft(model - anchor, view) for model in models])
    after = averaged(anchor, sent, view.n_clients, server_lr)
    expected = rows[1:].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(after.numpy(), expected, rtol=0, atol=1e-6 * np.abs(rows).max())


def test_auto_replaces_the_global_model_in_a_round(federation: Make) -> None:
    """Honest clients train with lr 0 and send zeros; malicious clients set their own lr."""
    seen: list[Tensor] = []

    class Watched(ConstrainAndScale):  # type: ignore[misc]
        def craft(self, update: Tensor, view: AttackView) -> Tensor:
            seen.append(update.clone())
            return super().craft(update, view)

    attack = Watched(alpha=0.7, constraint="l2", gamma="auto", lr=0.05)
    made = federation(attack=attack, lr=0.0, server_lr=0.3)
    begin = replace(made.initial(), next_round=0)
    end, record = made.round(begin)
    assert [c["norm"] == 0 for c in record["clients"]] == [
        not c["malicious"] for c in record["clients"]
    ]
    malicious = begin.params + torch.stack(seen).mean(dim=0)
    assert len(seen) == 2
    assert (malicious - begin.params).norm() > 0.1
    torch.testing.assert_close(end.params, malicious, rtol=0, atol=1e-6)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 9)), elements=floats),
    st.integers(-30, 30),
    st.integers(-30, 30),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 10)),
)
@example(np.array([[0, 0], [3, 4]], np.float32), 0, 0, (5, 1, 1.0))  # the malicious update is 0
@example(np.array([[3, 4], [0, 0]], np.float32), 0, 0, (5, 1, 1.0))  # the honest update is 0
@example(np.array([[3, 4], [6, 8]], np.float32), 30, 0, (5, 1, 1.0))
@example(np.array([[3, 4], [6, 8]], np.float32), -30, 0, (5, 1, 1.0))
def test_bounded(
    rows: np.ndarray, update_power: int, clean_power: int, federation: tuple[int, int, float]
) -> None:
    """Norm min(auto |u|, |clean|), same direction, for norms from 1e-30 to 1e30."""
    update = torch.tensor(rows[0]) * 10.0**update_power
    clean = torch.tensor(rows[1]) * 10.0**clean_power
    # float32 cannot represent a smaller factor in full precision
    lengths = [float(np.linalg.norm(v.numpy().astype(np.float64))) for v in (update, clean)]
    assume(lengths[0] == 0 or lengths[1] == 0 or lengths[1] / lengths[0] > 1e-37)
    assume(all(abs(v) > 1e-36 for v in update.tolist() if v))
    n_honest, m, server_lr = federation
    auto = (n_honest + m) / (server_lr * m)
    view = view_of(torch.zeros_like(update), n_honest + m, m, server_lr, clean)
    sent = ConstrainAndScale(gamma="bounded").craft(update, view)
    assert sent.isfinite().all()
    assert sent.dtype == torch.float32
    factor = 0.0 if lengths[0] == 0 else min(auto, lengths[1] / lengths[0])
    np.testing.assert_allclose(
        sent.numpy(), update.numpy().astype(np.float64) * factor, rtol=1e-5, atol=1e-37
    )
    length = np.linalg.norm(sent.numpy().astype(np.float64))
    assert length <= lengths[1] * (1 + 1e-5) + 1e-37
    assert length == pytest.approx(min(auto * lengths[0], lengths[1]), rel=1e-5, abs=1e-37)


def malicious_updates(made: Federation) -> Tensor:
    """Updates [M, P] of the malicious clients in round 0."""
    round_ = made._select(replace(made.initial(), next_round=0))
    updates, _ = made.ranks.train(round_)
    return updates[[i for i, p in enumerate(round_.participants) if p.malicious]]


def distances(anchor: Tensor, updates: Tensor, constraint: str) -> list[float]:
    """What the constraint limits, for each client: the update's norm or the model's angle."""
    if constraint == "l2":
        return updates.double().norm(dim=1).tolist()
    models, anchor = (anchor + updates).double(), anchor.double()
    cosines = models @ anchor / (models.norm(dim=1) * anchor.norm())
    return cosines.clamp(-1, 1).arccos().tolist()


@pytest.mark.parametrize("constraint", ["l2", "cosine"])
def test_the_penalty_reaches_the_weights(federation: Make, constraint: str) -> None:
    """A smaller alpha ends nearer to the global model, and not only because of smaller steps.

    alpha alone would shorten the steps of the task loss like a learning rate of alpha * lr. The
    penalty makes the distance shorter than that.
    """

    def trained(alpha: float, lr: float) -> tuple[Tensor, list[float]]:
        attack = ConstrainAndScale(alpha=alpha, constraint=constraint, gamma=1.0, epochs=4, lr=lr)
        made = federation(attack=attack)
        updates = malicious_updates(made)
        return updates, distances(made.initial().params, updates, constraint)

    alphas = (1.0, 0.7, 0.4, 0.1)
    outcomes = [trained(alpha, lr=0.01) for alpha in alphas]
    for (_, further), (_, nearer) in pairwise(outcomes):
        assert all(b < 0.9 * a for a, b in zip(further, nearer, strict=True))
    for alpha, (updates, constrained) in list(zip(alphas, outcomes, strict=True))[1:]:
        free, unconstrained = trained(1.0, lr=0.01 * alpha)
        assert not torch.allclose(updates, free, atol=1e-4)
        assert all(b < 0.95 * a for a, b in zip(unconstrained, constrained, strict=True))


def stateful() -> nn.Module:
    """A network with dropout and batch norm statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 10)
    )


def test_the_clean_update_is_what_the_client_would_send_honestly(federation: Make) -> None:
    """It equals the honest update to the bit and does not influence the malicious training."""
    seen: list[tuple[Tensor, Tensor | None]] = []

    class Watched(ConstrainAndScale):  # type: ignore[misc]
        def craft(self, update: Tensor, view: AttackView) -> Tensor:
            seen.append((update.clone(), view.clean_update))
            return super().craft(update, view)

    def sent(attack: Attack) -> tuple[Tensor, Tensor]:
        made = federation(attack=attack, network=stateful(), local_epochs=2, lr=0.05)
        return made.ranks.train(made._select(replace(made.initial(), next_round=0)))

    own = {"alpha": 0.9, "constraint": "l2", "epochs": 3, "lr": 0.1}
    honest, _ = sent(ATTACKS.build({"name": "none"}))
    bounded, statistics = sent(Watched(gamma="bounded", **own))
    trained = [update for update, _ in seen]
    assert len(seen) == 2
    rows = [i for i in range(6) if not torch.equal(honest[i], bounded[i])]
    for row, (update, clean) in zip(rows, seen, strict=True):
        assert clean is not None
        assert torch.equal(clean, honest[row])
        assert bounded[row].double().norm() <= clean.double().norm() * (1 + 1e-6)
        longer = update.double().norm() * 3 > clean.double().norm()  # auto is 6 / (1 * 2)
        expected = clean.double().norm() if longer else update.double().norm() * 3
        assert bounded[row].double().norm().item() == pytest.approx(expected.item(), rel=1e-5)
    seen.clear()
    plain, plain_statistics = sent(Watched(gamma=1.0, **own))
    assert [clean for _, clean in seen] == [None, None]
    assert torch.equal(plain[rows], torch.stack(trained))
    assert torch.equal(plain_statistics, statistics)


@pytest.mark.parametrize(("alpha", "grows"), [(1.0, False), (0.1, True)])
def test_bounded_shrinks_long_updates_and_lets_short_ones_grow(
    federation: Make, alpha: float, grows: bool
) -> None:
    own = {"alpha": alpha, "constraint": "l2", "epochs": 3}

    def sent(gamma: float | str) -> Tensor:
        return malicious_updates(federation(attack=ConstrainAndScale(gamma=gamma, **own), lr=0.01))

    honest = federation(attack=ATTACKS.build({"name": "none"}), lr=0.01)
    round_ = honest._select(replace(honest.initial(), next_round=0))
    rows = [
        i
        for i, p in enumerate(round_.participants)
        if p.client in honest.rank_context.selection.malicious
    ]
    clean = honest.ranks.train(round_)[0][rows].double().norm(dim=1)
    before, after = (sent(gamma).double().norm(dim=1) for gamma in (1.0, "bounded"))
    assert (before < clean).tolist() == [grows, grows]
    torch.testing.assert_close(after, torch.minimum(3 * before, clean), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "chosen",
    [
        {"alpha": 0.7, "constraint": "l2", "gamma": "auto"},
        {"alpha": 0.9, "constraint": "l2", "gamma": "bounded"},
        # few samples give long updates, which 1000 * (1 - cos) penalizes heavily
        {"alpha": 0.995, "constraint": "cosine", "gamma": "auto"},
    ],
)
def test_works_in_miniature(after_rounds: Callable[..., Record], chosen: dict[str, Any]) -> None:
    benign = after_rounds(ATTACKS.build({"name": "none"}))["BA"]
    assert after_rounds(ConstrainAndScale(**chosen))["BA"] > benign + 0.5


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be between 0 and 1, got {alpha}"):
        ConstrainAndScale(alpha=alpha)


def test_an_unknown_constraint_is_refused() -> None:
    with pytest.raises(ValueError, match="constraint must be l2 or cosine, got l1"):
        ConstrainAndScale(constraint="l1")
