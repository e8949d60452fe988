"""The origin of a run: what differs from the defaults of its choices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sweep_folders import add_sweep, composed

from fedbench.composition import compose
from fedbench.default_settings import guessed_origin, origin_of
from fedbench.results.origin import Origin
from fedbench.results.run_reader import read_runs
from fedbench.results.settings import flat


def origin(*overrides: str, sweep: bool = False) -> Origin:
    return origin_of(*composed(overrides, sweep))


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([], {}),
        (
            ["lr=0.01", "local_epochs=1", "attack.alpha=0.5"],
            {"lr": 0.01, "local_epochs": 1, "attack.alpha": 0.5},
        ),
        (["lr=0.05", "attack.alpha=0.7", "non_iid=0.50"], {}),  # the defaults, written out
        (["defense=flame", "defense.noise=0.01"], {"defense": "flame", "defense.noise": 0.01}),
        # The data set brings its model, partition, lr, n_clients and more.
        (["dataset=reddit_sample"], {"dataset": "reddit_sample"}),
        (["dataset=reddit_sample", "lr=0.05"], {"dataset": "reddit_sample", "lr": 0.05}),
        (["dataset=mnist", "model=cnn"], {"dataset": "mnist"}),
        (["dataset=mnist", "model=mlp"], {"dataset": "mnist", "model": "mlp"}),
        (["model=mlp"], {}),
        (["scenario=converged"], {"scenario": "converged"}),
        (["scenario=converged", "rounds=10"], {"scenario": "converged", "rounds": 10}),
        (["defense=baybfed_literal"], {"defense": "baybfed_literal"}),
        # tuned=mnist_dp follows from both; another choice does not.
        (["dataset=mnist", "defense=dp"], {"dataset": "mnist", "defense": "dp"}),
        (["defense=dp", "tuned=mnist_dp"], {"defense": "dp", "tuned": "mnist_dp"}),
        # Without an effect on the results, or named elsewhere
        (["seed=3", "name=x", "out=y", "tracker=none", "executor.devices=2"], {}),
        (["dataset=fmnist", "dataset.root=here"], {"dataset": "fmnist"}),
        (["pretrained=model.pt"], {"pretrained": "model.pt"}),
        (["executor=sequential"], {"executor": "sequential"}),
        (["executor.accelerator=cpu"], {"executor.accelerator": "cpu"}),
        (["n_clients=[40,90]"], {"n_clients": "[40, 90]"}),
        (
            ["dataset=custom", "dataset.source=digits.py:load"],  # its default is `???`
            {"dataset": "custom", "dataset.source": "digits.py:load"},
        ),
    ],
)
def test_changed(overrides: list[str], changed: dict[str, Any]) -> None:
    assert origin(*overrides).changed == changed


def test_choices_are_the_names_of_config_files() -> None:
    choices = origin("defense=baybfed_literal", "dataset=iot_sample").choices
    assert choices["defense"] == "baybfed_literal"
    assert (choices["dataset"], choices["model"]) == ("iot_sample", "gru")
    assert not [group for group in choices if group.startswith("hydra")]


def test_only_the_command_of_a_sweep_gives_settings_that_are_not_changed() -> None:
    words = ["pdr=0.5", "model=mlp", "++attack.alpha=0.5", "tracker=none", "seed=0", "name=x"]
    assert origin(*words).given == ()
    assert {*origin(*words, sweep=True).given} == {"pdr", "model", "attack.alpha"}


def test_choices_may_come_from_other_folders(tmp_path: Path) -> None:
    (tmp_path / "my configs" / "defense").mkdir(parents=True)
    (tmp_path / "my configs" / "defense" / "loud.yaml").write_text("name: flame\nnoise: 0.5\n")
    search = f"hydra.searchpath=['file://{tmp_path}/my configs']"
    assert origin(search, "defense=loud").changed == {"defense": "loud"}
    noisier = origin(search, "defense=loud", "defense.noise=0.6").changed
    assert noisier == {"defense": "loud", "defense.noise": 0.6}


def test_without_defaults_the_settings_of_the_command_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, job = composed(["lr=0.01", "model=mlp"])
    monkeypatch.setattr("fedbench.default_settings._composed", lambda *overrides: None)
    unknown = origin_of(config, job)
    assert unknown.changed is None
    assert unknown.given == ("model", "lr")


def test_the_origin_of_an_older_run_is_guessed_from_its_settings(tmp_path: Path) -> None:
    command = ["dataset=mnist", "defense=flame", "defense.noise=0.01", "model=mlp", "lr=0.01"]
    (folder,) = add_sweep(tmp_path, *command, "scenario=converged")
    (folder / "origin.json").unlink()
    (run,) = read_runs([folder])
    assert run.origin is None
    changed = guessed_origin({**run.config, "executor.accelerator": "cuda", "dropped": 1}).changed
    assert changed == {
        **{"defense": "flame", "dataset": "mnist", "model": "mlp"},
        **{"defense.noise": 0.01, "lr": 0.01},
        # A scenario leaves no name behind, only its settings.
        **{"pretrain_non_iid": 0.0, "pretrain_rounds": 40, "rounds": 5},
    }
    assert guessed_origin({**run.config, "defense": "gone"}).changed is None


def test_what_auto_stands_for_is_no_change() -> None:
    few = {"non_iid": 1.0, "n_clients": 5}
    for settings, clip_grad, changed in (
        ({}, None, False),
        (few, 1.0, False),
        ({"non_iid": 1.0, "n_clients": "[3, 8]"}, 1.0, False),
        ({}, 1.0, True),
        (few, None, True),
        (few, 5.0, True),
    ):
        usual = flat(asdict(compose([])))
        origin = guessed_origin({**usual, **settings, "clip_grad": clip_grad})
        assert origin.changed is not None
        assert ("clip_grad" in origin.changed) == changed, (settings, clip_grad)
