"""engine.captured_step: replaying a captured step gives the bits of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_contexts import ATTACK_SETTINGS, SETTINGS, DataDependent, MakeRankContext, updates_of
from torch import Tensor, nn

from fedbench.engine.captured_step import (
    CAPTURE_AFTER,
    CapturedStep,
    GradientFunction,
    can_capture,
    loss_function,
)
from fedbench.engine.executors import Sequential, Vectorized
from fedbench.engine.local_training import Classifier
from fedbench.engine.sequential import SequentialBackend


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attack", ATTACK_SETTINGS)
def test_captured_steps_give_the_bits_of_autograd(
    make_rank_context: MakeRankContext,
    attack: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_context = make_rank_context(attack=attack, **settings)
    replays = count_calls(monkeypatch, CapturedStep, "__call__")
    captured = updates_of(Sequential(), rank_context)
    n_replays = len(replays)
    assert n_replays > 10
    assert torch.equal(updates_of(Sequential(capture=False), rank_context), captured)
    assert len(replays) == n_replays


@pytest.mark.parametrize("attack", ATTACK_SETTINGS)
def test_results_do_not_depend_on_when_a_stack_is_captured(
    make_rank_context: MakeRankContext, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That depends on what the process trained before."""
    unequal = {"partition": "dirichlet", "dirichlet_alpha": 0.3, "local_epochs": 6}
    rank_context = make_rank_context(attack=attack, **unequal)
    replays = count_calls(monkeypatch, CapturedStep, "__call__")
    captured = updates_of(Vectorized(stack=3), rank_context)
    n_replays = len(replays)
    assert n_replays > 10
    monkeypatch.setattr("fedbench.engine.captured_step.CAPTURE_AFTER", 10**6)
    assert torch.equal(updates_of(Vectorized(stack=3), rank_context), captured)
    assert len(replays) == n_replays


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Return a list that gets one entry per call of the method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(None)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


class RareOperations(nn.Module):
    """One operation has no out= variant, another returns two results."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.celu(x) + x.std(dim=1, keepdim=True) + x.max(dim=1, keepdim=True)[0]


ACTIVATIONS = [
    nn.ReLU(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Identity(),
    RareOperations(),
]


@pytest.mark.parametrize("objective", [None, lambda loss, w: loss**2 + 0.1 * w[0].norm()])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_equal_those_of_autograd(activation: nn.Module, objective: Any) -> None:
    """Bit by bit on changing batches and parameters; once captured, the loss is not called."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), activation, nn.Linear(8, 3))
    params = [*network.parameters()]
    loss, calls = loss_function(Classifier(network, 0.1), lambda x: x.float() / 255), []

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return loss(*arguments)

    gradients = GradientFunction(counted, params)
    for i in range(CAPTURE_AFTER + 5):
        x, y = torch.randint(256, (5, 3, 4), dtype=torch.uint8), torch.randint(3, (5,))
        value = loss(params, x, y)
        total = value if objective is None else objective(value, params)
        expected = torch.autograd.grad(total, params)
        assert all(map(torch.equal, gradients(x, y, objective), expected))
        assert len(calls) == (1 + (objective is not None)) * min(i + 1, CAPTURE_AFTER) + (
            i + 1 >= CAPTURE_AFTER
        )
        with torch.no_grad():
            for param, gradient in zip(params, expected, strict=True):
                param -= 0.01 * gradient
    calls.clear()
    gradients(x[:3], y[:3])  # another shape is not captured yet
    assert len(calls) == 1


def test_one_captured_step_serves_honest_and_malicious_clients() -> None:
    params = [torch.tensor([1.0, 2.0])]
    gradients = GradientFunction(lambda w, x, y: (w[0] * x).sum() * y, params)
    x, y = torch.tensor([3.0, 4.0]), torch.tensor(2.0)
    for _ in range(CAPTURE_AFTER):
        gradients(x, y)
    for _ in range(2):
        assert gradients(x, y)[0].tolist() == [6, 8]
        assert gradients(x, y, lambda loss, w: 5 * loss + w[0][0])[0].tolist() == [31, 40]
        assert gradients(x, y, lambda loss, w: w[0].sum())[0].tolist() == [1, 1]  # loss unused


class OwnTrainingStep(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 2


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Classifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU()), 0.1), True),
        (Classifier(nn.Linear(4, 2), 0.1), True),
        (Classifier(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), 0.1), False),
        (Classifier(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), 0.1), False),
        (Classifier(nn.Sequential(nn.Linear(4, 2), DataDependent()), 0.1), False),
        (OwnTrainingStep(nn.Linear(4, 2), 0.1), False),
    ],
)
def test_only_modules_with_fixed_operations_are_captured(
    module: Classifier, expected: bool
) -> None:
    assert can_capture(module) is expected


def test_networks_with_unknown_layers_are_not_captured(make_rank_context: MakeRankContext) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), DataDependent())
    rank_context = make_rank_context(network)
    assert SequentialBackend(rank_context.replica, capture=True).captured is None
    assert updates_of(Sequential(), rank_context).isfinite().all()
