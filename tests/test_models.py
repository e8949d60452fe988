"""models: sizes and definitions of the shipped networks, and users' own modules."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbench.composition import compose
from fedbench.data import Kind, Spec
from fedbench.engine.flat_parameters import ParameterLayout
from fedbench.errors import UserError
from fedbench.models import MODELS

GRAY, COLOR = Spec("gray", (1, 28, 28), 10), Spec("c", (3, 32, 32), 10)
WORDS = Spec("w", (5,), 9, Kind.SEQUENCES)


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
    network = build(Spec("reddit", (64,), 50_000, Kind.SEQUENCES), name="lstm")
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
    with pytest.raises(ValueError, match=rf"^needs {kind}.*, but {spec.name} has "):
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


@pytest.mark.parametrize("kind", [Kind.IMAGES, Kind.FEATURES])
def test_mlp_accepts_images_and_features(kind: Kind) -> None:
    shape = (1, 4, 4) if kind is Kind.IMAGES else (7,)
    spec = Spec("made", shape, 3, kind)
    MODELS.build({"name": "mlp"}).check(spec)
    assert build(spec, name="mlp")(torch.zeros(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("side", [15, 16])
def test_cnn_rejects_images_that_its_layers_would_reduce_to_nothing(side: int) -> None:
    spec = Spec("small", (1, side, 20), 10)
    if side == 16:
        MODELS.build({"name": "cnn"}).check(spec)
        assert build(spec, name="cnn")(torch.zeros(2, 1, side, 20)).shape == (2, 10)
    else:
        with pytest.raises(ValueError, match="at least 16 pixels per side, but small has 15 x 20"):
            MODELS.build({"name": "cnn"}).check(spec)


NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=8, n_classes=3, sample_shape=None):
        super().__init__(nn.Flatten(), nn.LazyLinear(width), nn.Linear(width, n_classes))
        self.width, self.sample_shape = width, sample_shape

class Plain(nn.Flatten):
    pass

def make_net(depth):
    return Net(width=depth)

def not_a_module():
    return 3

def broken():
    raise RuntimeError("no weights")

def mute():
    assert not Net

class Forgetful(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(2, 2)

NUMBER, BUILT = 3, nn.ReLU()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the working folder of a user: nets/my_net.py and a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("nets", "their_nets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_net.py").write_text(NET)
    (tmp_path / "their_nets" / "__init__.py").touch()
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


def custom(target: str, **arguments: object) -> Any:
    return build(name="custom", target=target, arguments=arguments)


def error_of(target: str, **arguments: object) -> str:
    with pytest.raises(UserError) as raised:
        custom(target, **arguments)
    return " ".join(str(raised.value).split())


def test_custom_module_by_dotted_path() -> None:
    network = custom("torch.nn.Linear", in_features=4, out_features=2)
    assert network(torch.zeros(1, 4)).shape == (1, 2)


def test_dotted_path_may_name_a_class_within_a_class(folder: Path) -> None:
    (folder / "outer.py").write_text("from torch import nn\nclass A:\n    class B(nn.ReLU): pass")
    assert type(custom("outer.A.B")).__name__ == "B"


@pytest.mark.parametrize(
    "target",
    [
        "nets/my_net.py:Net",
        "./nets/../nets/my_net.py:Net",
        "their_nets/my_net.py:Net",
        "their_nets.my_net.Net",
        "nets.my_net.Net",  # a folder without __init__.py
        "{folder}/nets/my_net.py:Net",
        "~/nets/my_net.py:Net",
    ],
)
def test_custom_module_by_path(folder: Path, monkeypatch: Any, target: str) -> None:
    monkeypatch.setenv("HOME", str(folder))
    network = custom(target.format(folder=folder), width=5)
    assert network.width == 5
    again = custom(target.format(folder=folder), width=6)
    assert type(again) is type(network)
    pickle.loads(pickle.dumps(network))


def test_constructor_receives_shape_and_classes_unless_they_are_set(folder: Path) -> None:
    network = custom("nets/my_net.py:Net")
    assert network.sample_shape == (1, 28, 28)
    assert network[2].out_features == 10
    network = custom("nets/my_net.py:Net", n_classes=4, sample_shape=[9])
    assert network.sample_shape == [9]
    assert network[2].out_features == 4
    assert type(custom("nets/my_net.py:Plain")).__name__ == "Plain"  # takes neither


def test_target_may_be_a_function(folder: Path) -> None:
    assert custom("nets/my_net.py:make_net", depth=3).width == 3


def test_a_file_can_import_its_siblings_and_relatives(folder: Path) -> None:
    (folder / "nets" / "layers.py").write_text("WIDTH = 7")
    (folder / "their_nets" / "layers.py").write_text("WIDTH = 11")
    (folder / "nets" / "wide.py").write_text(f"from layers import WIDTH\n{NET}\nNet.found = WIDTH")
    relative = f"from .layers import WIDTH\n{NET}\nNet.found = WIDTH"
    (folder / "their_nets" / "wide.py").write_text(relative)
    assert custom("nets/wide.py:Net").found == 7
    assert custom("their_nets/wide.py:Net").found == 11
    assert custom("nets/wide.py:Net").found == 7


def test_files_of_one_name_in_two_folders_are_two_modules(folder: Path) -> None:
    for name, found in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "sibling.py").write_text(f"FOUND = {found}")
        code = f"from sibling import FOUND\n{NET}\nNet.found = FOUND"
        (folder / name / "same_net.py").write_text(code)
    found = [custom(f"{name}/same_net.py:Net").found for name in ("a", "b", "a", "b")]
    assert found == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.nn.Linaer", r"torch.nn has no Linaer; did you mean Linear\?"),
        ("no_such_file.Net", "no module no_such_file in .* or installed$"),
        ("nets.my_nett.Net", r"no module nets.my_nett in .* did you mean my_net\?"),
        ("os.getcwd", "getcwd belongs to a package, and no annotation says that it makes"),
        ("pathlib.Path", "must be a function or a class of nn.Module, got the class Path$"),
        ("Net", "must be my_package.my_module.Net or path/to/file.py:Net"),
        ("nets/my_net.py:Nett", r": nets/my_net.py has no Nett; did you mean Net\? \(known: .*\)"),
        (
            "nets/my_net.py:NUMBER",
            "must be a function or a class of nn.Module, got an object of ty",
        ),
        ("nets/my_net.py:BUILT", "must be a function or a class of nn.Module, got an object of t"),
        ("nets/my_nte.py:Net", r"no file .*/nets/my_nte.py; did you mean my_net.py\?"),
        ("nets/my_net.py", r"must name what to use, nets/my_net.py:Net \(or Plain, make_net, .*\)"),
        ("nets/my_net.py:not_a_module", "must build an nn.Module, got int"),
        ("nets/my_net.py:broken", r"RuntimeError: no weights \(.*/nets/my_net.py:\d+\)"),
        ("nets/my_net.py:mute", r": AssertionError \(.*/nets/my_net.py:\d+\)"),
        ("nets/my_net.py:make_net", "make_net needs depth; set model.arguments.depth=..."),
        ("torch.nn.Linear", "Linear needs in_features, out_features; set model.arguments.in_feat"),
        ("bad/syntax.py:Net", r"SyntaxError: .* \(.*/bad/syntax.py:2\)"),
        ("bad/needs.py:Net", r"ModuleNotFoundError: No module named 'nowhere' \(.*needs.py:1\)"),
        ("bad.needs.Net", r"ModuleNotFoundError: No module named 'nowhere' \(.*needs.py:1\)"),
        ("bad/torch.py:Net", "must have another name, torch is also the name of .*torch"),
        ("nets/my_net.txt:Net", "must be my_package.my_module.Net or path/to/file.py:Net"),
    ],
)
def test_error_names_a_target_that_cannot_be_built(folder: Path, target: str, message: str) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "syntax.py").write_text("import os\nclass Net(:\n")
    (folder / "bad" / "needs.py").write_text("import nowhere\nclass Net: pass\n")
    (folder / "bad" / "torch.py").write_text("class Net: pass\n")
    found = error_of(target)
    assert found.startswith(f"model.target={target}: ")
    assert re.search(message, found), found


def test_error_names_an_argument_that_does_not_exist(folder: Path) -> None:
    assert error_of("nets/my_net.py:Net", widht=3) == (
        "model.arguments.widht=3: Net has no such argument; did you mean width? "
        "(known: n_classes, sample_shape, width)"
    )
    assert error_of("nets/my_net.py:not_a_module", widht=3) == (
        "model.arguments.widht=3: not_a_module has no such argument (known: none)"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("Net", {"width": "abc"}, "super().__init__(nn.Flatten()"),
        ("Forgetful", {}, "self.layer = "),
        ("make_net", {"depth": "abc"}, "super().__init__(nn.Flatten()"),
    ],
)
def test_error_names_the_users_line_and_not_the_library_it_calls(
    folder: Path, name: str, arguments: dict[str, object], line: str
) -> None:
    found = error_of(f"nets/my_net.py:{name}", **arguments)
    number = 1 + next(i for i, text in enumerate(NET.splitlines()) if line in text)
    place = f"({folder}/nets/my_net.py:{number}); FEDBENCH_TRACEBACK=1 shows the traceback"
    assert found.startswith(f"model.target=nets/my_net.py:{name}: ")
    assert found.endswith(place)


def test_error_names_the_line_of_a_helper_and_of_an_installed_target(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nets" / "helper.py").write_text("import json\ndef read():\n    json.loads('{')\n")
    (folder / "nets" / "reads.py").write_text("import helper\ndef net():\n    helper.read()\n")
    assert f"({folder}/nets/helper.py:3)" in error_of("nets/reads.py:net")
    installed = folder / "site-packages" / "their_package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    code = "from torch import nn\ndef net() -> nn.Module:\n    return nn.Linear('a', 2)\n"
    (installed / "net.py").write_text(code)
    monkeypatch.syspath_prepend(folder / "site-packages")
    assert f"({installed}/net.py:3)" in error_of("their_package.net.net")


def test_target_and_arguments_are_checked_before_the_network_is_built(folder: Path) -> None:
    with pytest.raises(UserError, match="no such argument"):
        MODELS.build({"name": "custom", "target": "nets/my_net.py:Net", "arguments": {"wdth": 3}})


@pytest.mark.parametrize("setting", ["model.arguments.width=32", "model.arguments.a.b=[1,2]"])
def test_arguments_need_no_plus(folder: Path, setting: str) -> None:
    config = compose(["model=custom", "model.target=nets/my_net.py:Net", setting])
    assert config.model["arguments"] in ({"width": 32}, {"a": {"b": [1, 2]}})
    with pytest.raises(Exception, match=r"model\.argument"):
        compose(["model=custom", setting.replace("arguments", "argument")])


def test_a_quoted_path_on_the_command_line_may_start_with_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/own-model.md: Hydra's grammar does not allow an unquoted `~`."""
    monkeypatch.setenv("HOME", str(folder))
    config = compose(["model=custom", "model.target='~/nets/my_net.py:Net'"])
    assert build(**config.model).sample_shape == GRAY.sample_shape


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "custom"},
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
