"""The networks: their sizes, and modules that users bring."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbench.errors import UserError
from fedbench.models import MODELS


def build(**settings: object) -> nn.Module:
    return MODELS.build(settings).build((1, 28, 28), 10)


@pytest.mark.parametrize(("name", "n_parameters"), [("mlp", 235_146), ("cnn", 431_080)])
def test_sizes_are_those_of_the_paper(name: str, n_parameters: int) -> None:
    network = build(name=name)
    assert sum(p.numel() for p in network.parameters()) == n_parameters
    assert network(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_the_mlp_has_three_layers_with_relu_between() -> None:
    layers = [type(layer).__name__ for layer in build(name="mlp")]
    assert layers == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_the_cnn_computes_what_the_paper_describes() -> None:
    """conv 5x5x20, relu, pool, conv 5x5x50, relu, pool, fc 500, relu, fc 10: in that order."""
    network = build(name="cnn")
    first, _, _, second, _, _, _, hidden, _, output = network
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    relu, pool = nn.functional.relu, nn.functional.max_pool2d
    features = pool(relu(second(pool(relu(first(x)), 2))), 2).flatten(1)
    torch.testing.assert_close(network(x), output(relu(hidden(features))))


def test_a_module_of_the_users_own() -> None:
    settings = {"name": "custom", "target": "torch.nn.Linear"}
    arguments = {"in_features": 4, "out_features": 2}
    assert build(**settings, arguments=arguments)(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    "target", ["torch.nn.Nope", "no_such_file.Net", "os.getcwd", "torch.nn.Linear"]
)
def test_a_target_that_cannot_be_made_is_named(target: str) -> None:
    with pytest.raises(UserError, match=f"model.target={target}: "):
        build(name="custom", target=target)


@pytest.mark.parametrize(
    "settings",
    [{"name": "custom"}, {"name": "custom", "target": "Net"}, {"name": "mlp", "hidden": [0]}],
)
def test_bad_settings_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"model {settings['name']}: "):
        build(**settings)
