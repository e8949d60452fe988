"""edge_case: mislabeled rare inputs, and a model kept in a ball around G."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedbench.attack import ATTACKS, Attack, AttackView, Poisoning
from fedbench.backdoor import BACKDOORS, Backdoor, BackdoorContext, BackdoorSamples
from fedbench.data import Spec
from fedbench.errors import UserError
from fedbench.federation import Federation
from fedbench.results.run_dir import Record

Make = Callable[..., Federation]
EdgeCase: Any = ATTACKS.get("edge_case")
floats = st.floats(-100, 100, width=32)


def view_of(global_params: Tensor, clean: Tensor | None = None) -> AttackView:
    return AttackView(0, global_params, {}, 10, 2, 1.0, torch.Generator(), clean)


def projected(attack: Attack, model: Tensor, anchor: Tensor, clean: Tensor | None = None) -> Tensor:
    """Return the model, split into two parameters, after the projection."""
    half = len(model) // 2
    params = [nn.Parameter(model[:half].clone()), nn.Parameter(model[half:].clone()[None])]
    attack.project(params, view_of(anchor, clean))
    return torch.cat([param.detach().reshape(-1) for param in params])


def test_by_hand() -> None:
    # w - G = (3, 4) has norm 5; projected onto a ball of radius 2.5, w = G + (1.5, 2).
    anchor, model = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 2.0])
    assert projected(EdgeCase(eps=2.5), model, anchor).tolist() == [2.5, 0]
    # auto: the honest update (0.6, -0.8) has norm 1, so w = G + (0.6, 0.8).
    clean = torch.tensor([0.6, -0.8])
    near = projected(EdgeCase(eps="auto"), model, anchor, clean)
    assert near.tolist() == pytest.approx([1.6, -1.2])
    # Inside the ball, and without a ball, w stays.
    for eps in (5, 6.5, None):
        assert projected(EdgeCase(eps=eps), model, anchor).tolist() == [4, 2]
    # gamma scales the projected update: 3 * (1.5, 2).
    assert EdgeCase(eps=2.5, gamma=3).craft(torch.tensor([1.5, 2.0]), view_of(anchor)).tolist() == [
        4.5,
        6,
    ]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    hnp.arrays(np.float64, st.tuples(st.just(3), st.integers(2, 9)), elements=floats),
    st.one_of(st.just("auto"), st.floats(0.01, 300)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_projection(rows: np.ndarray, eps: float | str, dtype: torch.dtype) -> None:
    """G + (w - G) min(1, eps / |w - G|): inside the ball, same direction, idempotent."""
    anchor, model, clean = rows
    length = float(np.linalg.norm(model - anchor))
    radius = float(np.linalg.norm(clean)) if eps == "auto" else float(eps)
    assume(abs(length - radius) > 1e-3)
    expected = anchor + (model - anchor) * min(1.0, radius / max(length, 1e-300))
    tensors = [torch.tensor(row, dtype=dtype) for row in (model, anchor, clean)]
    once = projected(EdgeCase(eps=eps), *tensors)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(once.numpy(), expected, rtol=0, atol=exact * 200)
    if length < radius:
        assert torch.equal(once, tensors[0]), "a model inside the ball must not change"
    twice = projected(EdgeCase(eps=eps), once, *tensors[1:])
    torch.testing.assert_close(twice, once, rtol=0, atol=exact * 200)


def test_the_projection_is_in_place() -> None:
    """The parameters stay the same objects and keep their gradients."""
    params = [nn.Parameter(torch.full((2,), 5.0)), nn.Parameter(torch.full((2,), 5.0))]
    for param in params:
        param.grad = torch.ones(2)
    before = [(param, param.data_ptr()) for param in params]
    EdgeCase(eps=1).project(params, view_of(torch.zeros(4)))
    assert all(p is q and p.data_ptr() == at for p, (q, at) in zip(params, before, strict=True))
    assert [param.grad.tolist() for param in params if param.grad is not None] == [[1, 1], [1, 1]]
    assert torch.cat(params).norm().item() == pytest.approx(1)


def order_of(made: Federation) -> Any:
    return made._select(replace(made.initial(), next_round=0))


def malicious_updates(made: Federation) -> Tensor:
    """Updates [M, P] of the malicious clients in round 0."""
    round_ = order_of(made)
    updates, _ = made.ranks.train(round_)
    return updates[[i for i, p in enumerate(round_.participants) if p.malicious]]


def edge_case(**chosen: Any) -> Attack:
    fixed = {"gamma": 1.0, "epochs": 3, "backdoors": [{"name": "tail", "rate": 0.5}]}
    attack: Attack = EdgeCase(**fixed | chosen)
    return attack


@pytest.mark.parametrize("eps", [0.1, 0.5, 1])
def test_a_trained_model_is_on_the_border_of_the_ball(federation: Make, eps: float) -> None:
    """Without the ball, the update would be longer."""
    lengths = malicious_updates(federation(attack=edge_case(eps=eps))).double().norm(dim=1)
    free = malicious_updates(federation(attack=edge_case(eps=None))).double().norm(dim=1)
    assert (lengths <= eps * (1 + 1e-5)).all()
    assert (lengths > eps * 0.999).all()
    assert (free > 1.5 * lengths).all()


def test_auto_eps_is_the_norm_of_the_honest_update(federation: Make) -> None:
    made = federation(attack=ATTACKS.build({"name": "none"}))
    malicious = [
        i
        for i, p in enumerate(order_of(made).participants)
        if p.client in made.rank_context.selection.malicious
    ]
    honest = made.ranks.train(order_of(made))[0][malicious].double().norm(dim=1)
    lengths = malicious_updates(federation(attack=edge_case(eps="auto"))).double().norm(dim=1)
    free = malicious_updates(federation(attack=edge_case(eps=None))).double().norm(dim=1)
    assert (lengths <= honest * (1 + 1e-5)).all()
    assert (lengths > honest * 0.999).all()
    assert (free > 1.5 * honest).all()
    short = malicious_updates(federation(attack=edge_case(eps="auto", lr=1e-4)))
    assert (short.double().norm(dim=1) < 0.5 * honest).all(), (
        "a short update must not be stretched to the border"
    )


def test_a_large_ball_changes_nothing(federation: Make) -> None:
    free = malicious_updates(federation(attack=edge_case(eps=None)))
    assert torch.equal(malicious_updates(federation(attack=edge_case(eps=1e6))), free)


def test_the_projection_is_part_of_the_training(federation: Make) -> None:
    """Projecting after every step gives a different model than projecting once at the end."""
    free = malicious_updates(federation(attack=edge_case(eps=None))).double()
    kept = malicious_updates(federation(attack=edge_case(eps=0.5))).double()
    at_the_end = 0.5 * free / free.norm(dim=1, keepdim=True)
    assert ((kept - at_the_end).norm(dim=1) > 0.01).all()


@pytest.mark.parametrize("gamma", [4.0, "auto", "bounded"])
def test_gamma_scales_after_the_projection(federation: Make, gamma: float | str) -> None:
    """auto: 6 / (0.5 * 2) = 6. bounded: up to the norm of an honest update, which is above 0.5."""
    within = malicious_updates(federation(attack=edge_case(eps=0.5, gamma=1.0), server_lr=0.5))
    sent = malicious_updates(federation(attack=edge_case(eps=0.5, gamma=gamma), server_lr=0.5))
    if gamma == "bounded":
        stretch = sent.double().norm(dim=1) / within.double().norm(dim=1)
        assert (stretch > 1.5).all()
        assert (stretch < 6).all()
        torch.testing.assert_close(sent, within * stretch[:, None].float())
    else:
        torch.testing.assert_close(sent, within * (gamma if isinstance(gamma, float) else 6))


def backdoor_samples(n: int) -> BackdoorSamples:
    """n uniform images of brightness 100, 101, ...; no client sample is that bright."""
    train = torch.arange(100, 100 + n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    return BackdoorSamples.with_target(
        train.clone(), torch.full((3, 1, 8, 8), 250).byte(), target=4
    )


@pytest.mark.parametrize(("n", "pdr", "n_poisoned"), [(40, 0.25, 10), (5, 0.5, 3), (40, 0, 0)])
@pytest.mark.parametrize("size", [1, 4, 30])
def test_backdoor_samples_replace_a_share_of_the_clients(
    n: int, pdr: float, n_poisoned: int, size: int
) -> None:
    """The share is exact, and backdoor samples are used equally often, up to one."""
    x = torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    y = torch.arange(n) % 10
    poisoning = Poisoning(0, [backdoor_samples(size)], pdr, 10, torch.Generator().manual_seed(3))
    poisoned_x, poisoned_y = EdgeCase(eps=None).poison(x, y, poisoning)
    rare = poisoned_x[:, 0, 0, 0] >= 100
    assert int(rare.sum()) == n_poisoned
    assert (poisoned_y[rare] == 4).all()
    assert torch.equal(poisoned_x[~rare], x[~rare])
    assert torch.equal(poisoned_y[~rare], y[~rare])
    assert (poisoned_x[rare] == poisoned_x[rare][:, :, :1, :1]).all(), "images must stay whole"
    drawn = (poisoned_x[rare][:, 0, 0, 0].long() - 100).bincount(minlength=size)
    assert len(drawn) == size
    assert drawn.max() - drawn.min() <= 1


def test_one_round_with_the_tail_of_a_class(federation: Make) -> None:
    """The edge cases come from the malicious clients' samples."""
    made = federation(attack=EdgeCase(eps="auto", gamma=1.0, backdoors=[{"name": "tail"}]))
    (backdoor,) = made.rank_context.data.backdoors
    assert isinstance(backdoor, BackdoorSamples)
    held = {
        tuple(made.rank_context.dataset.x_train[i].flatten().tolist())
        for client in made.rank_context.selection.malicious
        for i in made.rank_context.data.shards[client].tolist()
    }
    assert {tuple(image.flatten().tolist()) for image in backdoor.x_train} <= held
    end, record = made.round(replace(made.initial(), next_round=0))
    assert end.params.isfinite().all()
    assert record["attacked"] is True
    assert 0 <= record["BA"] <= 1
    (evaluation,) = made.rank_context.evaluator.triggered
    assert torch.equal(evaluation.x, backdoor.x_test)


@dataclass(frozen=True)
class Negatives(Backdoor):
    """Images with black and white inverted, labeled as 3, in place of the paper's samples."""

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data = context.dataset
        return BackdoorSamples.with_target(
            255 - data.x_train[context.malicious_samples], 255 - data.x_test, target=3
        )


@pytest.mark.parametrize("chosen", [{"eps": None, "gamma": "auto"}, {"eps": "auto", "gamma": 1.0}])
def test_works_in_miniature(after_rounds: Callable[..., Record], chosen: dict[str, Any]) -> None:
    """With enough inputs that no honest client holds.

    The tail of a class in the sample has one or two images, too few to learn from.
    """
    benign = after_rounds(ATTACKS.build({"name": "none"}), [Negatives()])["BA"]
    patch = [{"name": "patch"}]  # the federation starts with this one; after_rounds replaces it
    assert after_rounds(EdgeCase(backdoors=patch, **chosen), [Negatives()])["BA"] > benign + 0.5


@pytest.mark.parametrize("eps", [0, -1.0, math.nan, math.inf, "automatic", "2"])
def test_eps_out_of_range_is_refused(eps: Any) -> None:
    with pytest.raises(ValueError, match=f"eps must be auto, null or a number above 0, got {eps}"):
        EdgeCase(eps=eps)
    with pytest.raises(UserError, match=str(eps)):
        ATTACKS.build({"name": "edge_case", "eps": eps})


@pytest.mark.parametrize(
    ("eps", "gamma", "needed"),
    [
        ("auto", 1.0, True),
        ("auto", "bounded", True),
        (2.0, "bounded", True),
        (2.0, "auto", False),
        (None, 1.0, False),
    ],
)
def test_clients_train_honestly_first_only_if_eps_or_gamma_need_it(
    eps: Any, gamma: Any, needed: bool
) -> None:
    assert EdgeCase(eps=eps, gamma=gamma).needs_clean_update is needed


def test_it_accepts_any_backdoor() -> None:
    def check(backdoors: Sequence[Backdoor]) -> None:
        EdgeCase(eps=None).check(backdoors, Spec("made", (1, 28, 28), 10))

    check([BACKDOORS.build({"name": "tail"})])
    check([BACKDOORS.build({"name": "patch"}), BACKDOORS.build({"name": "tail"})])
