"""Defenses without the harness: arrays in, a verdict out, memory kept between rounds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import fingerprint
from shipped import shipped
from torch import nn

import fedbench
from fedbench.defense import DEFENSES, ServerView
from fedbench.defenses.foolsgold import FoolsGold
from fedbench.defenses.krum import Krum
from fedbench.federation import Federation
from fedbench.rng import generator

UPDATES = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", shipped(DEFENSES))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_defense_takes_an_array(name: str, dtype: type) -> None:
    result = fedbench.aggregate(name, UPDATES.numpy().astype(dtype))
    assert result.update.shape == (40,)
    assert result.weights.shape == (10,)
    expected = torch.float32 if dtype is np.float32 else torch.float64
    assert result.update.dtype == expected


def test_the_defaults_are_those_of_a_first_round() -> None:
    zeros = torch.zeros(40)
    rng = generator(0, "defense", 0)
    view = ServerView(0, torch.arange(10), zeros, zeros, {"params": slice(0, 40)}, rng)
    for defense in (Krum(m=3), FoolsGold()):
        expected, _ = defense.aggregate(UPDATES, defense.init(), view)
        given = fedbench.aggregate(defense, UPDATES)
        assert fingerprint(vars(given)) == fingerprint(vars(expected))


def test_integers_and_nested_lists_are_updates() -> None:
    assert fedbench.aggregate("fedavg", [[1, 2], [3, 4]]).update.tolist() == [2.0, 3.0]


def test_a_server_keeps_model_state_and_round() -> None:
    server = fedbench.Server(FoolsGold(), torch.ones(40), server_lr=0.5)
    first = server.aggregate(UPDATES)
    assert torch.equal(server.params, 1 + 0.5 * first.update)
    second = server.aggregate(UPDATES)
    assert server.index == 2
    assert torch.equal(server.params, 1 + 0.5 * first.update + 0.5 * second.update)


def test_memory_belongs_to_a_client_and_not_to_a_row() -> None:
    """Clients 0 and 1 send the same in round 0 and something else, in other rows, in round 1."""
    twins = UPDATES.clone()
    twins[1] = twins[0]
    server = fedbench.Server("foolsgold")
    server.aggregate(twins)
    weights = server.aggregate(0.1 * UPDATES, client_ids=range(9, -1, -1)).weights
    assert weights[[9, 8]].max() < 0.01
    assert weights[:8].min() > 0.1
    fresh = fedbench.aggregate("foolsgold", 0.1 * UPDATES).weights
    assert fresh.min() > 0.05


def test_named_parameters_name_the_layers() -> None:
    """The last layer alone decides for FoolsGold."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))  # P = 30 + 7
    server = fedbench.Server("foolsgold", dict(model.named_parameters()))
    assert server.layers == {
        **{"0.weight": slice(0, 24), "0.bias": slice(24, 30)},
        **{"1.weight": slice(30, 36), "1.bias": slice(36, 37)},
    }
    assert torch.equal(server.params, nn.utils.parameters_to_vector(model.parameters()))
    other = UPDATES[:, :37].clone()
    other[:, :30] = 7
    weights = [
        fedbench.aggregate("foolsgold", rows, params=dict(model.named_parameters())).weights
        for rows in (UPDATES[:, :37], other)
    ]
    assert torch.equal(*weights)


def test_a_server_gives_the_bits_of_the_harness(
    federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same updates, model, clients and seed lead to the same model."""
    defense = DEFENSES.build({"name": "flame"})
    harness = federation(defense=defense, seed=3, pretrain_rounds=0)
    state = harness.initial()
    layers = harness.rank_context.replica.layout.layers
    params = {name: state.params[place] for name, place in layers.items()}
    server = fedbench.Server(defense, params, seed=3)
    calls: list[tuple[Any, Any]] = []
    original = type(defense).aggregate

    def record(self: Any, updates: Any, state: Any, view: Any) -> Any:
        calls.append((updates.clone(), view.client_ids))
        return original(self, updates, state, view)

    monkeypatch.setattr(type(defense), "aggregate", record)
    for _ in range(2):
        state, _ = harness.round(state)
    for updates, client_ids in calls[:]:
        server.aggregate(updates, client_ids)
    assert torch.equal(server.params, state.params)


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one row": (torch.zeros(5), {}, "updates: must be of shape [N, P], got (5,)"),
    "no rows": (torch.zeros(0, 5), {}, "updates: must be of shape [N, P], got (0, 5)"),
    "not finite": (
        torch.tensor([[1.0], [torch.nan], [torch.inf]]).repeat(2, 1),
        {},
        "updates: must be finite, rows [1, 2, 4, 5] are not; leave them out",
    ),
    "other model": (UPDATES, {"params": torch.zeros(7)}, "updates: must have P=7 columns, got 40"),
    "too few clients": (UPDATES[:2], {}, "updates: krum needs N - f - 2 >= 1, got N=2, f=0"),
    "too few ids": (UPDATES, {"client_ids": [1, 2]}, "client_ids: must be 10 different integers"),
    "ragged": ([[1, 2], [3]], {}, "updates: must be numbers of shape [N, P] ("),
    "text": ("x", {}, "updates: must be numbers of shape [N, P] ("),
    "text as ids": (UPDATES, {"client_ids": "x"}, "client_ids: must be numbers of shape [N] ("),
    "text as model": (
        UPDATES,
        {"params": "x"},
        "params: must be a tensor [P] or dict(model.named_parameters()), got str",
    ),
    "module as model": (UPDATES, {"params": nn.Linear(39, 1)}, "_parameters()), got Linear"),
    "texts as model": (UPDATES, {"params": {"a": "x"}}, "_parameters()), got str"),
    "no model": (UPDATES, {"params": {}}, "_parameters()), got an empty dict"),
    "same ids": (UPDATES, {"client_ids": [1] * 10}, "client_ids: must be 10 different integers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_user_errors(mistake: str) -> None:
    updates, settings, message = MISTAKES[mistake]
    with pytest.raises(fedbench.UserError, match=re.escape(message)) as raised:
        fedbench.aggregate("krum", updates, **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("defense", "got"), [(3, "int"), (Krum, "the class Krum")])
def test_a_server_needs_a_defense(defense: Any, got: str) -> None:
    with pytest.raises(fedbench.UserError, match=f"^defense: must be a defense or .*, got {got}$"):
        fedbench.Server(defense)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(fedbench.UserError, match="did you mean krum"):
        fedbench.aggregate("krumm", UPDATES)


def test_updates_are_not_modified() -> None:
    updates = UPDATES.numpy().copy()
    for name in shipped(DEFENSES):
        fedbench.aggregate(name, updates)
        assert (updates == UPDATES.numpy()).all()
