"""The configuration: every shipped file composes, and the run id names what matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import fedbench
from fedbench.config import RunConfig, register_schema
from fedbench.errors import UserError
from fedbench.plan import Plan

ROOT = Path(fedbench.__file__).parent.parent
GROUPS = ("defense", "attack", "dataset", "model", "executor", "tracker")
FILES = [(path.parent.name, path.stem) for path in sorted((ROOT / "conf").glob("*/*.yaml"))]
TUNED_GROUPS = {"tuned": "defense", "tuned_attack": "attack"}
CHOICES = [(group, choice) for group, choice in FILES if group not in TUNED_GROUPS]
TUNED = [(group, choice) for group, choice in FILES if group in TUNED_GROUPS]
VARIANTS = {"baybfed_literal": "baybfed"}  # other settings of the same plugin


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    register_schema()
    with initialize_config_module("fedbench.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def config(*overrides: str) -> RunConfig:
    return RunConfig.from_hydra(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=map("/".join, CHOICES))
def test_every_file_of_conf_composes_and_builds(group: str, choice: str) -> None:
    needed = {
        "custom": ["model.target=torch.nn.Flatten"],
        "lstm": ["dataset=reddit_sample"],
        "gru": ["dataset=iot_sample"],
    }
    composed = config(f"{group}={choice}", *needed.get(choice, []))
    assert getattr(composed, group)["name"] == VARIANTS.get(choice, choice)
    Plan.of(composed)


@pytest.mark.parametrize(("choice", "name"), VARIANTS.items())
def test_a_variant_differs_from_its_plugin_in_settings_it_has(choice: str, name: str) -> None:
    variant, plain = config(f"defense={choice}").defense, config(f"defense={name}").defense
    assert variant != plain
    assert variant.keys() == plain.keys()


@pytest.mark.parametrize(("folder", "tuned"), TUNED, ids=map("/".join, TUNED))
def test_settings_tuned_to_a_data_set_are_used_with_it_and_the_command_line_wins(
    folder: str, tuned: str
) -> None:
    kind = TUNED_GROUPS[folder]
    names = [choice for group, choice in CHOICES if group == kind]
    name = next(name for name in names if tuned.endswith(f"_{name}"))
    data = f"dataset={tuned.removesuffix(f'_{name}')}"
    values = yaml.safe_load((ROOT / "conf" / folder / f"{tuned}.yaml").read_text())
    whole = config(data, f"{kind}={name}")
    plain, there = getattr(config(f"{kind}={name}"), kind), getattr(whole, kind)
    assert there == plain | values
    assert there.keys() == plain.keys()
    Plan.of(whole)
    for key, value in values.items():
        assert value != plain[key]
        chosen = config(data, f"{kind}={name}", f"{kind}.{key}=0.5")
        assert getattr(chosen, kind)[key] == 0.5
    other = next(other for other in names if other != name)
    assert getattr(config(data, f"{kind}={other}"), kind) == getattr(
        config(f"{kind}={other}"), kind
    )


def test_every_group_has_a_folder() -> None:
    assert {group for group, _ in FILES} == {*GROUPS, *TUNED_GROUPS}


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_sweep_composes(path: Path) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(path.parent), version_base="1.3"):
        found = ["hydra.searchpath=[pkg://fedbench.conf]"]
        sweep = compose(path.stem, overrides=found, return_hydra_config=True)
        assert sweep.hydra.mode.name == "MULTIRUN"
        assert sweep.name == path.stem
        for key, values in sweep.hydra.sweeper.params.items():
            for value in str(values).split(","):
                compose(path.stem, overrides=[*found, f"{key}={value}"])


def test_the_defaults_of_the_schema_are_those_of_the_file() -> None:
    composed, schema = OmegaConf.to_container(compose("config")), RunConfig()
    assert isinstance(composed, dict)
    for key, value in composed.items():
        if key not in GROUPS:
            assert getattr(schema, str(key)) == value, key


def test_a_data_set_brings_its_model_and_the_command_line_wins() -> None:
    assert config("dataset=mnist").model["name"] == "cnn"
    assert config("dataset=fmnist").model["name"] == "mlp"
    assert config("dataset=mnist", "model=mlp").model["name"] == "mlp"
    assert config("model=mlp", "dataset=mnist").model["name"] == "mlp"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("pmr", v) for v in (-0.1, 1.5, float("nan"))],
        *[("pdr", v) for v in (-1.0, 1.01)],
        *[("non_iid", v) for v in (-0.5, 2.0)],
        *[(k, 0) for k in ("n_clients", "rounds", "local_epochs", "batch_size")],
        *[(k, -1) for k in ("pretrain_rounds", "attack_start", "seed", "momentum")],
        *[(k, 0.0) for k in ("lr", "server_lr", "dirichlet_alpha")],
        *[("lr", float("inf")), ("weight_decay", float("nan")), ("weight_decay", -1.0)],
        *[("pool", 29), ("partition", "by_size")],
        *[("name", v) for v in ("", ".", "..", "a/b", ".hidden")],
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key}={value}: must be "):
        replace(RunConfig(), **{key: value}).check()


def run_id(*overrides: str) -> str:
    return Plan.of(config(*overrides)).folder.path.name


@pytest.mark.parametrize(
    "override",
    [
        *("defense=krum", "attack=none", "attack.alpha=0.5", "attack.gamma=3", "dataset=fmnist"),
        *("model=cnn", "model.hidden=[10]", "pmr=0.3", "pdr=0.4", "n_clients=29", "pool=31"),
        *("partition=dirichlet", "non_iid=0.4", "dirichlet_alpha=1", "pretrain_rounds=1"),
        *("rounds=11", "attack_start=1", "local_epochs=1", "batch_size=32", "lr=0.01"),
        *("momentum=0", "weight_decay=0.1", "server_lr=0.5", "seed=1"),
        *("executor.threads=2", "executor.precision=bf16-mixed"),
        *("attack.backdoors=[{name:patch,target:3}]", "attack_rounds=[1]", "malicious=sampled"),
        *("pdr_step=0.1", "attack.lr_decay=0.5", "attack=ipm", "attack=dba"),
    ],
)
def test_what_affects_the_result_changes_the_run_id(override: str) -> None:
    assert run_id(override) != run_id()


@pytest.mark.parametrize(
    "override", ["out=elsewhere", "name=other", "tracker=none", "executor.devices=2", "pool=30"]
)
def test_what_does_not_affect_the_result_keeps_the_run_id(override: str) -> None:
    assert run_id(override) == run_id()


def test_a_share_of_malicious_clients_that_rounds_to_nobody_is_told() -> None:
    with pytest.raises(UserError, match=r"pmr=0.01: of n_clients=30 that is no client"):
        Plan.of(config("pmr=0.01"))
    Plan.of(config("pmr=0.01", "attack=none"))
    Plan.of(config("pmr=0"))


@pytest.mark.parametrize("kind", ["defense", "attack", "backdoor"])
def test_a_plugin_with_a_new_version_makes_a_new_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = run_id(), Plan.of(config())
    plugin = plan.backdoors[0] if kind == "backdoor" else getattr(plan, kind)
    monkeypatch.setattr(type(plugin), "version", 2)
    assert run_id() != before


def test_an_attack_that_would_never_start_is_told() -> None:
    with pytest.raises(UserError, match=r"attack_start=10: must be below rounds=10"):
        Plan.of(config("attack_start=10"))
    Plan.of(config("attack_start=9"))
    Plan.of(config("attack_start=10", "attack=none"))


def test_omniscience_is_on_record_though_a_file_leaves_it_out() -> None:
    plan = Plan.of(config("attack=alie", "~attack.omniscient"))
    assert plan.config.attack["omniscient"] is True
    assert plan.folder.path.name == run_id("attack=alie")
    assert "omniscient" not in Plan.of(config("attack=dba")).config.attack


@pytest.mark.parametrize(
    "override",
    [
        *("attack.gamma=" + "9" * 400, "attack=edge_case attack.eps=" + "9" * 400),
        *("attack=alie attack.z=" + "9" * 400, "attack.backdoors=[{name:patch,1:2}]"),
    ],
    ids=["gamma", "eps", "z", "key"],
)
def test_what_no_float_and_no_name_can_be_is_told(override: str) -> None:
    with pytest.raises(UserError, match=r"too large|has no setting 1"):
        Plan.of(config(*override.split()))


def test_a_share_that_rounds_to_nobody_of_the_pool_is_told() -> None:
    with pytest.raises(UserError, match=r"pmr=0.01: of pool=40 that is no client"):
        Plan.of(config("pmr=0.01", "malicious=sampled", "pool=40"))
    Plan.of(config("pmr=0.03", "malicious=sampled", "pool=40"))  # one in 40, in some rounds


@pytest.mark.parametrize("dataset", ["fmnist_sample", "fmnist", "mnist", "cifar10"])
@pytest.mark.parametrize("attack", [name for group, name in CHOICES if group == "attack"])
def test_every_attack_fits_every_data_set_of_images(attack: str, dataset: str) -> None:
    Plan.of(config(f"attack={attack}", f"dataset={dataset}"))


def test_pretraining_is_shared_by_what_does_not_change_it() -> None:
    base = config().pretrain_id()
    for same in (
        *("defense=krum", "attack=none", "attack=dba", "pmr=0.5", "malicious=sampled", "rounds=3"),
        *("pdr=0.1", "pdr_step=0.1", "attack_start=2", "attack_rounds=[3]"),
    ):
        assert config(same).pretrain_id() == base, same
    for other in (
        "seed=1",
        "lr=0.1",
        "non_iid=0",
        "n_clients=10",
        "pretrain_rounds=2",
        "model=cnn",
    ):
        assert config(other).pretrain_id() != base, other
