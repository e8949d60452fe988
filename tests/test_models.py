"""models: sizes and definitions of the shipped networks, and users' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbench.data import Spec
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.errors import UserError
from fedbench.models import MODELS

GRAY, COLOR, WORDS = Spec("gray", (1, 28, 28), 10), Spec("c", (3, 32, 32), 10), Spec("w", (5,), 9)


def build(spec: Spec = GRAY, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    return MODELS.build(settings).build(spec.sample_shape, spec.n_classes)


@pytest.mark.parametrize(
    ("name", "spec", "n_parameters"),
    [
        ("mlp", GRAY, 235_146),
        ("cnn", GRAY, 431_080),
        ("resnet18_light", COLOR, 2_797_610),
    ],
)
def test_number_of_parameters_is_the_papers(name: str, spec: Spec, n_parameters: int) -> None:
    network = build(spec, name=name)
    assert sum(p.numel() for p in network.parameters()) == n_parameters
    assert network(torch.zeros(3, *spec.sample_shape)).shape == (3, 10)


def test_lstm_ties_embedding_and_output_and_has_the_papers_size() -> None:
    network = build(Spec("reddit", (64,), 50_000), name="lstm")
    assert sum(p.numel() for p in network.parameters()) == 10_693_200
    assert network[0].weight is network[-1].weight
    layout = ParameterLayout(network)  # counts the tied parameter once
    assert layout.n_params == 10_693_200


def test_light_resnet_matches_the_papers_description() -> None:
    """3x3 stem, 4 stages of 2 blocks, stride 2 from the second stage on, mean, linear."""
    network = build(COLOR, name="resnet18_light", widths=[4, 6, 8, 10]).eval()
    for module in network.modules():  # statistics as after training
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    state = network.state_dict()

    def normed(x: Tensor, convolution: str, norm: str, stride: int = 1) -> Tensor:
        weight = state[f"{convolution}.weight"]
        x = functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, variance, scale, shift = (
            state[f"{norm}.{key}"][:, None, None]
            for key in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (variance + 1e-5).sqrt() * scale + shift

    x = torch.randn(2, 3, 32, 32)
    features = normed(x, "0", "1").relu()
    for k in range(8):
        block, stride = f"{3 + k}", 2 if k in (2, 4, 6) else 1
        inner = normed(features, f"{block}.residual.0", f"{block}.residual.1", stride).relu()
        inner = normed(inner, f"{block}.residual.3", f"{block}.residual.4")
        if stride == 2:
            features = normed(features, f"{block}.shortcut.0", f"{block}.shortcut.1", 2)
        features = (inner + features).relu()
    assert features.shape == (2, 10, 4, 4)
    logits = features.mean(dim=(2, 3)) @ state["13.weight"].T + state["13.bias"]
    torch.testing.assert_close(network(x), logits, rtol=1e-4, atol=1e-5)


def cell(kind: str, x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """One step of an LSTM (Hochreiter 1997) or GRU (Cho 2014) by definition."""
    w, u, b, d = weights
    if kind == "lstm":
        i, f, g, o = (w @ x + b + u @ h + d).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (wr, wz, wn), (ur, uz, un) = (w @ x + b).chunk(3), (u @ h + d).chunk(3)
    z = (wz + uz).sigmoid()
    return (1 - z) * (wn + (wr + ur).sigmoid() * un).tanh() + z * h, c


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_networks_have_two_layers_and_start_from_zeros(kind: str) -> None:
    network = build(WORDS, name=kind, width=4).eval()
    (layers,) = (m for m in network.modules() if isinstance(m, nn.RNNBase))
    words = torch.tensor([3, 1, 4, 1, 5])
    sequence = list(network[0].weight[words])
    for weights in layers.all_weights:
        h, c = torch.zeros(4), torch.zeros(4)
        for t, x in enumerate(sequence):
            h, c = cell(kind, x, h, c, weights)
            sequence[t] = h
    assert len(layers.all_weights) == 2
    expected = torch.stack(sequence) @ network[-1].weight.T + network[-1].bias
    torch.testing.assert_close(network(words[None])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_predictions_do_not_depend_on_later_symbols(kind: str) -> None:
    network = build(WORDS, name=kind, width=8).eval()
    one, other = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[3, 1, 4, 8, 0]])
    assert torch.equal(network(one)[:, :3], network(other)[:, :3])
    assert not torch.equal(network(one)[:, 3:], network(other)[:, 3:])


def test_lstm_with_one_layer_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    build(WORDS, name="lstm", n_layers=1)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("name", "spec", "kind"),
    [
        ("mlp", WORDS, "images"),
        ("cnn", WORDS, "images"),
        ("resnet18_light", WORDS, "images"),
        ("lstm", GRAY, "sequences"),
        ("gru", COLOR, "sequences"),
    ],
)
def test_network_rejects_samples_it_cannot_process(name: str, spec: Spec, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^needs {kind}, but samples of {spec.name} have "):
        MODELS.build({"name": name}).check(spec)


def test_mlp_has_three_layers_with_relu_between() -> None:
    layers = [type(layer).__name__ for layer in build(name="mlp")]
    assert layers == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_cnn_matches_the_papers_description() -> None:
    """conv 5x5x20, relu, pool, conv 5x5x50, relu, pool, fc 500, relu, fc 10."""
    network = build(name="cnn")
    first, _, _, second, _, _, _, hidden, _, output = network
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    relu, pool = nn.functional.relu, nn.functional.max_pool2d
    features = pool(relu(second(pool(relu(first(x)), 2))), 2).flatten(1)
    torch.testing.assert_close(network(x), output(relu(hidden(features))))


def test_custom_module() -> None:
    settings = {"name": "custom", "target": "torch.nn.Linear"}
    arguments = {"in_features": 4, "out_features": 2}
    assert build(**settings, arguments=arguments)(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    "target", ["torch.nn.Nope", "no_such_file.Net", "os.getcwd", "torch.nn.Linear"]
)
def test_error_names_a_target_that_cannot_be_built(target: str) -> None:
    with pytest.raises(UserError, match=f"model.target={target}: "):
        build(name="custom", target=target)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "custom"},
        {"name": "custom", "target": "Net"},
        {"name": "mlp", "hidden": [0]},
        {"name": "resnet18_light", "widths": []},
        {"name": "resnet18_light", "widths": [8, 0]},
        {"name": "lstm", "width": 0},
        {"name": "lstm", "dropout": 1.0},
        {"name": "gru", "n_layers": 0},
    ],
)
def test_error_names_the_model_with_invalid_settings(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"model {settings['name']}: "):
        build(**settings)
