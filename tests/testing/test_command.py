"""`python -m fedbench.testing`, and the contracts as classes that pytest collects."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end import environment

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.defense import DEFENSES
from fedbench.errors import UserError
from fedbench.registry import Registry
from fedbench.testing import DefenseContract
from fedbench.testing.__main__ import main
from fedbench.testing.attacks import ATTACK
from fedbench.testing.backdoors import BACKDOOR
from fedbench.testing.contract import Contract
from fedbench.testing.defenses import DEFENSE

CONTRACTS: dict[str, Contract[Any]] = {"defense": DEFENSE, "attack": ATTACK, "backdoor": BACKDOOR}
REGISTRIES: dict[str, Registry[Any]] = {
    "defense": DEFENSES,
    "attack": ATTACKS,
    "backdoor": BACKDOORS,
}
# Imported before a test changes the working folder, whose plugins a package adds at its import
PACKAGES = {kind: importlib.import_module(f"fedbench.{kind}s") for kind in CONTRACTS}
GOOD = {"defense": "fedavg", "attack": "sign_flip", "backdoor": "patch"}
# Kind -> a plugin in the working folder, whose `factor` breaks it unless it is 1
MINE = {
    "defense": """
from dataclasses import dataclass, replace

from fedbench.defense import DEFENSES
from fedbench.errors import UserError
from fedbench.defenses.fedavg import FedAvg


@DEFENSES.register("mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    factor: float = 1.0

    def aggregate(self, updates, state, view):
        result, state = super().aggregate(updates, state, view)
        return replace(result, update=self.factor * result.update), state
""",
    "attack": """
from dataclasses import dataclass

from fedbench.attack import ATTACKS, Attack


@ATTACKS.register("mine")
@dataclass(frozen=True)
class Mine(Attack):
    factor: float = 1.0

    def craft(self, update, view):
        return -update if self.factor == 1 else update.mul_(self.factor)
""",
    "backdoor": """
from dataclasses import dataclass

from fedbench.backdoor import BACKDOORS
from fedbench.backdoors.patch import Patch


@BACKDOORS.register("mine")
@dataclass(frozen=True)
class Mine(Patch):
    factor: float = 1.0

    def poison(self, x, y, rng):
        return super().poison(x, y, rng) if self.factor == 1 else (x, y)
""",
}
# Kind -> the check that it fails, and part of the reason
BROKEN = {
    "defense": ("unanimity", "all clients sent one update, the result is"),
    "attack": ("craft", "craft modified update in place; clone it first"),
    "backdoor": ("poison", "poison returns 5 samples of example images (1, 28, 28) unchanged"),
}

every_kind = pytest.mark.parametrize("kind", CONTRACTS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a plugin of each kind, called `mine`."""
    monkeypatch.chdir(tmp_path)
    for kind, text in MINE.items():
        local = tmp_path / f"{kind}s"
        local.mkdir()
        (local / "mine.py").write_text(text)
        monkeypatch.setattr(PACKAGES[kind], "__path__", [*PACKAGES[kind].__path__, str(local)])
    yield tmp_path
    for kind in MINE:
        REGISTRIES[kind]._classes.pop("mine", None)
        if sys.modules.pop(f"fedbench.{kind}s.mine", None):
            del PACKAGES[kind].mine


def write_config(folder: Path, text: str) -> None:
    path = folder / "conf" / "defense" / "mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def table(out: str) -> dict[str, str]:
    """Map each check of the printed table to its status."""
    return {
        match["check"]: match["status"]
        for match in re.finditer(
            r"^(?P<status>ok|failed|exempt|skipped|not run) +(?P<check>\w+) +\S", out, re.MULTILINE
        )
    }


@every_kind
def test_a_good_plugin_prints_its_table(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = GOOD[kind]
    assert main([f"{kind}={name}"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    cls = REGISTRIES[kind].get(name)
    assert out.startswith(f"{kind} {name} (fedbench.{kind}s.{name}.{cls.__name__})\n\n")
    found = table(out)
    config = [] if kind == "backdoor" else ["config"]  # backdoors have no config group
    assert list(found) == ["exemptions", *CONTRACTS[kind].checks, *config]
    assert {*found.values()} <= {"ok", "exempt", "skipped"}
    for check in CONTRACTS[kind].checks.values():
        assert check.meaning in out
    n_ok = [*found.values()].count("ok")
    assert f"\n\n{n_ok} ok" in out


def test_settings_are_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defense=krum", "defense.m=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("defense krum-m=3 (fedbench.defenses.krum.Krum)\n")
    assert out.endswith("\n19 ok\n\n")


def test_an_exemption_shows_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defense=krum"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^exempt +tied_clients .*\n +selects the first of equal scores$", out, re.M)
    assert out.endswith("\n18 ok, 1 exempt\n\n")


@every_kind
def test_a_broken_plugin_names_the_failed_check(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{kind}=mine"]) == 0
    capsys.readouterr()
    assert main([f"{kind}=mine", f"{kind}.factor=0.9"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{kind} mine-factor=0.9 (fedbench.{kind}s.mine.Mine)\n")
    check, reason = BROKEN[kind]
    assert [name for name, status in table(out).items() if status == "failed"] == [check]
    meaning = CONTRACTS[kind].checks[check].meaning
    assert re.search(rf"^failed +{check} +{re.escape(meaning)}\n +{re.escape(reason)}", out, re.M)
    assert ", 1 failed" in out


def test_several_plugins_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = ["backdoor=mine", "backdoor.factor=0"]
    assert main([*broken, "defense=fedavg"]) == 1
    out = capsys.readouterr().out
    assert out.index("backdoor mine-factor=0 (") < out.index("defense fedavg (")
    assert "\n4 ok, 1 failed, 2 not run\n" in out
    assert "\n19 ok\n" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "name a plugin, for example: fedbench testing defense=krum defense.m=3"),
        (["defence=krum"], "defence=krum: no such plugin; did you mean defense? (known: attack, "),
        (["model=cnn"], "model=cnn: no such plugin (known: attack, backdoor, defense)"),
        (["defense=krm"], "no defense is called 'krm'; did you mean krum? (known: afa, "),
        (["attack=sign_flp"], "no attack is called 'sign_flp'; did you mean sign_flip? (known: "),
        (["backdoor=pacth"], "no backdoor is called 'pacth'; did you mean patch? (known: "),
        (["defense=krum", "defense.mm=3"], "defense krum has no setting 'mm'; did you mean m?"),
        (["defense.m=3"], "defense.m: name the defense, as in defense=NAME"),
        (["defense=krum", "attack.gamma=2"], "attack.gamma: name the attack, as in attack=NAME"),
        (["defense=krum", "defense.m=0"], "defense krum: m must be"),
        (["defense=krum,median"], "defense=krum,median: give one value, to check one defense"),
        (["defense=krum", "defense.m=1,3"], "defense.m=1,3: give one value, to check one defense"),
        (["krum"], "Error parsing override 'krum'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fedbench: {line}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_traceback_can_be_requested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDBENCH_TRACEBACK", "1")
    assert main([]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(
        "UserError: name a plugin, for example: fedbench testing defense=krum defense.m=3\n"
    )


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    assert "fedbench testing defense=krum" in capsys.readouterr().out


def test_arguments_come_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedbench.testing", "backdoor=patch"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("backdoor patch (")


@pytest.mark.parametrize("config", [None, "name: mine\n", "name: mine\nfactor: 2\n"])
def test_a_config_that_builds(
    config: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a config file, the class's defaults are composed."""
    if config is not None:
        write_config(folder, config)
    assert main(["defense=mine"]) == 0
    assert table(capsys.readouterr().out)["config"] == "ok"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("name: mine\nfactr: 2\n", "defense mine has no setting 'factr'; did you mean factor?"),
        ("name: mine\nfactor: two\n", "defense.factor=two: must be a number"),
        ("factor: 2\n", "defense has no name; its config must say `name: ...`"),
        ("name: mien\n", "no defense is called 'mien'; did you mean mine?"),
        ("name: fedavg\n", "builds FedAvg; the config must say `name: mine`"),
        ("name: [\n", "fedbench: while parsing a flow node"),
    ],
)
def test_a_config_that_does_not_build(
    config: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(folder, config)
    assert main(["defense=mine"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    found = table(out)
    assert [check for check, status in found.items() if status != "ok"] == ["config"]
    meaning = "`python -m fedbench defense=mine` builds the plugin"
    head, _, last = out.partition(f"{meaning}\n")
    assert head.endswith("failed   config             ")
    assert reason in last.partition("\n")[0]


CLASSES = """
from dataclasses import dataclass, replace

from fedbench.attack import Attack
from fedbench.backdoors.patch import Patch
from fedbench.defenses.fedavg import FedAvg
from fedbench.testing import AttackContract, BackdoorContract, DefenseContract
from fedbench.testing.samples import images


class TestDefense(DefenseContract):
    plugins = ["fedavg", {"name": "krum", "m": 1}]


class TestAttack(AttackContract):
    plugins = ["sign_flip"]


class TestBackdoor(BackdoorContract):
    plugins = ["patch"]


@dataclass(frozen=True)
class Shrinks(FedAvg):
    factor: float = 0.9

    def aggregate(self, updates, state, view):
        result, state = super().aggregate(updates, state, view)
        return replace(result, update=self.factor * result.update), state


@dataclass(frozen=True)
class DoesNothing(Attack):
    pass


@dataclass(frozen=True)
class InPlace(Patch):
    def stamp(self, x, part=0, n_parts=1):
        return x.fill_(255)


class TestBrokenDefense(DefenseContract):
    plugins = [Shrinks]
    invalid = {"factor": [-1]}


class TestBrokenAttack(AttackContract):
    plugins = [DoesNothing()]
    checks = ["craft", "round_loop"]


class TestBrokenBackdoor(BackdoorContract):
    plugins = [InPlace]
    datasets = [images(1, 16, 16)]
"""
# Each test that fails, and its message: the meaning of the check and the reason
FAILED = {
    "TestBrokenDefense::test_contract[Shrinks-unanimity]": (
        f"{DEFENSE.checks['unanimity'].meaning}:\nall clients sent one update, the result is"
    ),
    "TestBrokenDefense::test_invalid_settings_are_refused": "factor=-1 must be refused",
    "TestBrokenAttack::test_contract[DoesNothing()-round_loop]": (
        f"{ATTACK.checks['round_loop'].meaning}:\nmalicious clients send honest updates"
    ),
    "TestBrokenBackdoor::test_contract[InPlace-inputs]": (
        f"{BACKDOOR.checks['inputs'].meaning}:\npoison modified x in place; clone it first"
    ),
}


@pytest.mark.slow
def test_pytest_collects_a_test_for_each_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(CLASSES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        env=environment({"COLUMNS": "500"}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, set[str]] = {"PASSED": set(), "FAILED": set()}
    for status, test in re.findall(r"^(PASSED|FAILED) test_mine\.py::(\S+)", done.stdout, re.M):
        found[status].add(test)
    for kind, contract in CONTRACTS.items():
        checks = ["exemptions", *contract.checks]
        own = {f"test_contract[{GOOD[kind]}-{check}]" for check in checks}
        own.add("test_invalid_settings_are_refused")
        assert {f"Test{kind.title()}::{test}" for test in own} <= found["PASSED"]
    assert "TestDefense::test_contract[krum-m=1-result]" in found["PASSED"]
    assert ": selects the first of equal scores" in done.stdout
    only = {test for test in found["PASSED"] if test.startswith("TestBrokenAttack::test_contract")}
    assert only == {"TestBrokenAttack::test_contract[DoesNothing()-craft]"}
    assert found["FAILED"] == FAILED.keys()
    plain = re.sub(r"^E? +", "", done.stdout, flags=re.M)
    for message in FAILED.values():
        assert f"AssertionError: {message}" in plain


def test_a_class_without_plugins_is_an_error() -> None:
    """Otherwise pytest would skip its tests, and a misspelled `plugins` would go unnoticed."""

    class TestNothing(DefenseContract):
        plugin = ("fedavg",)

    with pytest.raises(UserError, match=r"TestNothing\.plugins must list at least one plugin"):
        TestNothing().pytest_generate_tests(None)
