"""Installed plugins bring their config files; a broken one breaks nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from end_to_end import (
    CONFIGS,
    ROOT,
    Plugins,
    environment,
    fedbench,
    install,
    run_folders,
    succeed,
)
from hydra._internal.utils import create_config_search_path

from fedbench.config import register_schema

pytestmark = pytest.mark.slow

PLUGIN = """
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("first_only")
@dataclass(frozen=True)
class FirstOnly(Defense):
    k: int = 1

    def aggregate(self, updates, state, view):
        return mean_of(updates, view.client_ids < self.k), state
"""
DEFENSES = "[fedbench.defenses]\nfirst_only = theirs:FirstOnly\n"
YAML = {
    "defense/first_only": "name: first_only\nk: 1\n",
    "defense/krum": "name: fedavg\n",  # must not replace fedbench's own krum
    "tuned/fmnist_sample_first_only": "# @package _global_\ndefense:\n  k: 3\n",
}


@pytest.fixture
def theirs(tmp_path: Path) -> Plugins:
    return install(tmp_path / "site", DEFENSES + CONFIGS, PLUGIN, YAML)


def composed(*overrides: str, plugins: Plugins, cwd: Path) -> dict[str, object]:
    text = "\n".join(succeed("--cfg", "job", *overrides, cwd=cwd, env=plugins.env).out)
    return yaml.safe_load(text)


def test_an_installed_config_is_composed(tmp_path: Path, theirs: Plugins) -> None:
    config = composed("defense=first_only", plugins=theirs, cwd=tmp_path)
    assert config["defense"] == {"name": "first_only", "k": 3}  # its tuned settings are found, too


def test_fedbenchs_own_configs_come_first(tmp_path: Path, theirs: Plugins) -> None:
    config = composed("defense=krum", plugins=theirs, cwd=tmp_path)
    assert config["defense"] == {"name": "krum", "f": None, "m": 1}


def test_help_and_errors_list_installed_configs(tmp_path: Path, theirs: Plugins) -> None:
    out = succeed("--help", cwd=tmp_path, env=theirs.env).out
    text = " ".join(" ".join(out).split())
    assert " first_only," in text[text.index(" defense=fedavg ") : text.index(" attack=")]
    (line,) = fedbench("defense=first_onyl", cwd=tmp_path, env=theirs.env).err
    assert "did you mean first_only?" in line


def test_workers_of_a_sweep_find_installed_configs(tmp_path: Path, theirs: Plugins) -> None:
    sweep = ["-m", "defense=first_only", "seed=0,1", "rounds=1", "hydra.launcher.n_jobs=2"]
    succeed(*sweep, cwd=tmp_path, env=theirs.env)
    folders = run_folders(tmp_path / "runs")
    assert len(folders) == 2
    for folder in folders:
        assert yaml.safe_load((folder / "config.yaml").read_text())["defense"]["k"] == 3


def plan_in(tmp_path: Path, env: dict[str, str], override: str) -> subprocess.CompletedProcess[str]:
    code = f"from fedbench.preview import plan_of; print(plan_of([{override!r}]).defense)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_composition_in_python_finds_installed_configs(tmp_path: Path, theirs: Plugins) -> None:
    done = plan_in(tmp_path, theirs.env, "defense=first_only")
    assert (done.stdout, done.stderr) == ("FirstOnly(k=3)\n", "")


BROKEN = {
    "no such package": "nowhere.conf",
    "no such package in a module": "theirs.conf",
    "no such folder": "json.conf",
}


@pytest.mark.parametrize("package", BROKEN.values(), ids=BROKEN)
def test_a_missing_config_package_is_one_warning(tmp_path: Path, package: str) -> None:
    points = f"[fedbench.configs]\nbroken = {package}\ntheirs = theirs_conf\n"
    plugins = install(tmp_path / "site", points, "raise RuntimeError('broken')", YAML)
    ended = fedbench("--cfg", "job", "defense=first_only", cwd=tmp_path, env=plugins.env)
    assert ended.code == 0
    assert ended.err == [
        f"fedbench: warning: theirs names {package} in fedbench.configs, "
        "but there is no such package"
    ]
    assert "  name: first_only" in ended.out


def test_composing_does_not_import_the_plugin_package(tmp_path: Path) -> None:
    """Its import may take seconds or fail."""
    site = tmp_path / "site"
    points = "[fedbench.configs]\nslow = slow.conf\n"
    install(site, points, "", {})
    (site / "slow" / "conf" / "defense").mkdir(parents=True)
    (site / "slow" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "slow" / "conf" / "defense" / "late.yaml").write_text("name: krum\nf: 1\n")
    done = plan_in(tmp_path, {"PYTHONPATH": f"{site}:{ROOT}"}, "defense=late")
    assert (done.stdout, done.stderr) == ("Krum(f=1, m=1)\n", "")


def test_other_hydra_applications_keep_their_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, CONFIGS, "", {"defense/x": "name: krum\n"})
    monkeypatch.syspath_prepend(tmp_path)
    register_schema()

    def providers(main: str) -> list[str]:
        return [element.provider for element in create_config_search_path(main).get_path()]

    assert providers("pkg://fedbench.conf") == ["hydra", "main", "theirs", "defaults", "schema"]
    assert providers("pkg://other.conf") == ["hydra", "main", "schema"]
