"""Every plugin of fedbench keeps its contract, and the house rules that others need not keep."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from shipped import ROOT, TESTS, published, shipped

from fedbench.attack import ATTACKS, BackdoorAttack, Poisoning
from fedbench.attacks.constrain_and_scale import ScaledBackdoorAttack
from fedbench.backdoor import BACKDOORS
from fedbench.composition import compose
from fedbench.config import RunConfig
from fedbench.data import DATASETS
from fedbench.defense import DEFENSES, ServerView
from fedbench.engine.executors import EXECUTORS
from fedbench.errors import UserError
from fedbench.models import MODELS
from fedbench.registry import Registry
from fedbench.testing import AttackContract, BackdoorContract, DefenseContract
from fedbench.testing.attack_samples import INVALID, patch, samples, verify_share
from fedbench.testing.backdoors import inspect_backdoor
from fedbench.tracking.trackers import TRACKERS

REGISTRIES: dict[str, Registry[Any]] = {
    "defense": DEFENSES,
    "attack": ATTACKS,
    "dataset": DATASETS,
    "model": MODELS,
    "executor": EXECUTORS,
    "tracker": TRACKERS,
}
CHOICES = [(kind, name) for kind, registry in REGISTRIES.items() for name in published(registry)]
PLUGINS = [(kind, name) for kind, name in CHOICES if kind in ("defense", "attack")]
TARGETED = [n for n in published(ATTACKS) if issubclass(ATTACKS.get(n), BackdoorAttack)]
SCALED = [n for n in TARGETED if issubclass(ATTACKS.get(n), ScaledBackdoorAttack)]
FITTING = [n for n in shipped(BACKDOORS) if inspect_backdoor(n).finding("fit").status == "ok"]
CONF = Path(importlib.import_module("fedbench.conf").__path__[0])

every_plugin = pytest.mark.parametrize(("kind", "name"), PLUGINS)
every_choice = pytest.mark.parametrize(("kind", "name"), CHOICES)


class TestDefenses(DefenseContract):
    """With default settings; the defense's own test file lists others and invalid ones."""

    plugins = shipped(DEFENSES)


class TestAttacks(AttackContract):
    plugins = shipped(ATTACKS)


class TestBackdoors(BackdoorContract):
    plugins = FITTING


@pytest.mark.parametrize("name", sorted({*published(BACKDOORS)} - {*FITTING}))
def test_backdoors_that_need_other_data_run_the_contract_in_their_own_test(name: str) -> None:
    text = (TESTS / "backdoors" / f"test_{name}.py").read_text()
    assert "check_backdoor" in text or "BackdoorContract" in text


def test_server_view_holds_no_ground_truth() -> None:
    fields = [field.name for field in dataclasses.fields(ServerView)]
    assert fields == ["index", "client_ids", "global_params", "initial_params", "layers", "rng"]


def test_all_defenses_of_the_paper_are_registered() -> None:
    paper = {"fedavg", "krum", "foolsgold", "auror", "afa", "dp", "median", "flame", "baybfed"}
    assert paper <= {*published(DEFENSES)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
@pytest.mark.parametrize("registry", [DEFENSES, ATTACKS, BACKDOORS], ids=lambda r: r.kind)
def test_every_committed_plugin_has_a_test_file(registry: Registry[Any]) -> None:
    listed = ["git", "ls-files", f"{registry.kind}s/[!_]*.py"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {Path(file).stem for file in files.splitlines()}
    assert {*published(registry)} >= {*names}


@pytest.mark.parametrize("name", published(DEFENSES))
def test_every_setting_of_a_defense_is_validated(name: str) -> None:
    """Floats must be finite; for any other type, some value is refused."""
    for field in dataclasses.fields(DEFENSES.get(name)):  # type: ignore[arg-type]
        is_float = isinstance(field.default, float)
        values = [math.nan, math.inf, -math.inf] if is_float else [-1000, "no such value"]
        refused = [value for value in values if _is_refused(name, field.name, value)]
        assert refused == values if is_float else refused, field.name


def _is_refused(name: str, setting: str, value: Any) -> bool:
    try:
        DEFENSES.build({"name": name, setting: value})
    except UserError:
        return True
    return False


@pytest.mark.parametrize("name", TARGETED)
@settings(derandomize=True, deadline=None)
@given(n=st.integers(1, 60), pdr=st.floats(0, 1), seed=st.integers(0, 1000))
@example(n=7, pdr=0.0, seed=0)
@example(n=7, pdr=1.0, seed=0)
@example(n=5, pdr=0.5, seed=0)  # halves round up
@example(n=1, pdr=0.4999, seed=0)
def test_poison_changes_exactly_the_requested_share(
    name: str, n: int, pdr: float, seed: int
) -> None:
    attack = ATTACKS.get(name)()
    assert isinstance(attack, BackdoorAttack)
    verify_share(attack, n, pdr, seed)


@pytest.mark.parametrize("name", ["constrain_and_scale", "edge_case", "adaptive_baybfed"])
def test_backdoors_are_assigned_by_slot(name: str) -> None:
    attack = ATTACKS.get(name)()
    triggers = (patch(), patch(target=8, corner="bottom_right", size=2))
    x, y = samples(50)
    for slot in range(5):
        how = Poisoning(slot, triggers, 0.4, 10, torch.Generator().manual_seed(0))
        poisoned_x, poisoned_y = attack.poison(x, y, how)
        stamped = (poisoned_x != x).flatten(1).any(dim=1)
        assert int(stamped.sum()) == 20
        assert (poisoned_y[stamped] == triggers[slot % 2].target).all()
        assert torch.equal(poisoned_x[stamped], triggers[slot % 2].stamp(x[stamped]))


@pytest.mark.parametrize("name", published(ATTACKS))
def test_targeted_attacks_and_none_have_backdoors(name: str) -> None:
    """Untargeted attacks have none. `none` has one, so that BA is measured without an attack."""
    backdoors = ATTACKS.get(name)().backdoor_settings([{"name": "patch"}])
    assert bool(backdoors) == (name in TARGETED or name == "none")
    for backdoor in backdoors:
        BACKDOORS.build(backdoor)


@pytest.mark.parametrize("name", TARGETED)
def test_training_settings_of_attacks_are_validated(name: str) -> None:
    gamma = {"gamma": (0, -1.5, "bound", "2", math.nan, math.inf)} if name in SCALED else {}
    for setting, values in (INVALID | gamma).items():
        for value in values:
            with pytest.raises(UserError, match=rf"\b{setting}\b") as caught:
                ATTACKS.build({"name": name, setting: value})
            assert str(value) in str(caught.value)
            assert "\n" not in str(caught.value)


def composed(kind: str, name: str) -> dict[str, Any]:
    """Compose the config group `kind` as `python -m fedbench kind=name` does."""
    names = published(REGISTRIES[kind])
    alone = kind == "dataset" or name not in names  # a dataset selects tuned settings of others
    config = _compose(f"{kind}={name}") if alone else _compose_each(names.index(name))
    group: dict[str, Any] = getattr(config, kind)
    return group


@functools.cache
def _compose_each(index: int) -> RunConfig:
    """Compose a config with the plugin at `index` of every kind, to compose fewer configs."""
    choices = {kind: published(REGISTRIES[kind]) for kind in REGISTRIES if kind != "dataset"}
    return _compose(*(f"{kind}={names[index % len(names)]}" for kind, names in choices.items()))


@functools.cache
def _compose(*overrides: str) -> RunConfig:
    return compose(overrides)


@functools.cache
def names_in_files(kind: str) -> dict[str, str]:
    """Map each config file of a group to the plugin that it names."""
    texts = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / kind).glob("*.yaml")}
    groups = {file: text.get(kind, text) for file, text in texts.items()}
    return {
        file: (group if "name" in group else composed(kind, file))["name"]
        for file, group in groups.items()
    }


@pytest.mark.parametrize("kind", REGISTRIES)
def test_config_files_match_the_registered_names(kind: str) -> None:
    """Each plugin has a file; other files are other settings of a plugin, such as literal ones."""
    files = names_in_files(kind)
    own = {file for file, name in files.items() if file == name}
    assert {*published(REGISTRIES[kind])} <= own <= {*shipped(REGISTRIES[kind])}
    for file in {*files} - own:
        assert files[file] in own
        assert file.startswith(f"{files[file]}_")
        assert composed(kind, file) != composed(kind, files[file])


@pytest.mark.parametrize("kind", ["defense", "attack", "backdoor"])
def test_files_match_the_registered_names(kind: str) -> None:
    registry = {**REGISTRIES, "backdoor": BACKDOORS}[kind]
    files = (ROOT / f"{kind}s").glob("[!_]*.py")
    assert {path.stem for path in files} == {*shipped(registry)}


@every_plugin
def test_plugin_is_defined_in_the_file_of_its_name(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    assert cls.__module__.rpartition(".")[2] == name


@every_choice
def test_yaml_contains_the_name_and_every_setting_with_its_default(kind: str, name: str) -> None:
    defaults = OmegaConf.to_container(OmegaConf.structured(REGISTRIES[kind].get(name)))
    assert isinstance(defaults, dict)
    assert names_in_files(kind)[name] == name
    assert composed(kind, name) == {"name": name, **defaults}


@every_choice
def test_plugin_is_a_frozen_dataclass_with_a_docstring(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    signature = f"{cls.__name__}("  # start of the docstring that dataclass generates
    assert kind == "tracker" or not (cls.__doc__ or signature).startswith(signature)


@pytest.mark.parametrize("name", published(BACKDOORS))
def test_backdoor_is_a_documented_frozen_dataclass(name: str) -> None:
    cls = BACKDOORS.get(name)
    module = importlib.import_module(cls.__module__)
    assert module.__name__ == f"fedbench.backdoors.{name}"
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "https://" in (module.__doc__ or "")
    assert BACKDOORS.build({"name": name}) == cls()


@every_plugin
def test_plugin_links_to_its_paper(kind: str, name: str) -> None:
    cls = REGISTRIES[kind].get(name)
    module = importlib.import_module(cls.__module__)
    assert module.__doc__
    assert name == "none" or "https://" in module.__doc__
    assert isinstance(cls.version, int)
    assert cls.version >= 1
