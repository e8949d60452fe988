"""Plugins in the working folder: `defenses/mine.py` is enough, a config file is optional."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from end_to_end import environment, fedbench, rounds, run_folders, succeed

from fedbench.plugin_configs import PluginDefaults
from fedbench.registry import with_working_folder

pytestmark = pytest.mark.slow

MINE = """
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("mine")
@dataclass(frozen=True)
class Mine(Defense):
    keep: int = 1

    def aggregate(self, updates, state, view):
        return mean_of(updates, view.client_ids < self.keep), state
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "defenses").mkdir()
    (tmp_path / "defenses" / "mine.py").write_text(MINE)
    return tmp_path


def composed(*overrides: str, cwd: Path) -> dict[str, object]:
    return yaml.safe_load("\n".join(succeed("--cfg", "job", *overrides, cwd=cwd).out))


def test_a_plugin_without_a_config_has_the_defaults_of_its_class(folder: Path) -> None:
    config = composed("defense=mine", cwd=folder)
    assert config["defense"] == {"name": "mine", "keep": 1}


def test_a_config_in_the_working_folder_comes_before_the_class(folder: Path) -> None:
    for name, text in {
        "defense/mine": "name: mine\nkeep: 2\n",
        "defense/krum": "name: mine\n",  # must not replace fedbench's own
        "tuned/fmnist_sample_mine": "# @package _global_\nlr: 0.25\n",
    }.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    config = composed("defense=mine", cwd=folder)
    assert (config["defense"], config["lr"]) == ({"name": "mine", "keep": 2}, 0.25)
    assert composed("defense=krum", cwd=folder)["defense"]["name"] == "krum"


def test_a_malformed_config_is_one_line(folder: Path) -> None:
    path = folder / "conf" / "defense" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: mine\nkeep: [1\n")
    ended = fedbench("defense=mine", cwd=folder)
    assert ended.code == 1
    (line,) = ended.err
    assert line.startswith("fedbench: while parsing a flow sequence")
    assert f'"{path}", line 2' in line


def test_a_config_without_a_name_says_what_it_needs(folder: Path) -> None:
    path = folder / "conf" / "defense" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("keep: 2\n")
    ended = fedbench("defense=mine", cwd=folder)
    assert ended.code == 1
    (line,) = ended.err
    assert line.startswith("fedbench: defense has no name; its config must say `name: ...`")
    assert not (folder / "runs").exists()


BROKEN = {
    "run": ("defense", "x = 1\ndef (:\n", "SyntaxError: invalid syntax"),
    "sweep": ("attack", "\nimport nowhere\n", "ModuleNotFoundError: No module named 'nowhere'"),
    "testing": ("backdoor", "\n1 / 0\n", "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("command", BROKEN)
def test_a_plugin_that_cannot_be_imported_is_one_line(tmp_path: Path, command: str) -> None:
    kind, text, reason = BROKEN[command]
    path = tmp_path / f"{kind}s" / "mine.py"
    path.parent.mkdir()
    path.write_text(text)
    words = {
        "run": ["fedbench", "defense=mine"],
        "sweep": ["fedbench", "-m", "attack=mine", "seed=0,1"],
        "testing": ["fedbench.testing", "backdoor=mine"],
    }[command]

    def errors(**env: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=environment(env),
            capture_output=True,
            text=True,
        )
        assert (ended.returncode, ended.stdout) == (1, "")
        assert not (tmp_path / "runs").exists()
        return ended.stderr.splitlines()

    place = f"({path}:2); FEDBENCH_TRACEBACK=1 shows the traceback"
    assert errors() == [f"fedbench: {kind} mine: {reason} {place}"]
    traceback = errors(FEDBENCH_TRACEBACK="1")
    assert traceback[0] == "Traceback (most recent call last):"
    assert reason in traceback


def test_a_sweep_compares_it_with_shipped_defenses(folder: Path) -> None:
    ended = succeed("-m", "defense=mine,krum", cwd=folder)
    for name in ("mine", "krum"):
        assert any(line.startswith(f"defense={name}  finished in ") for line in ended.out)
    runs = {path.name.rpartition("-")[0]: path for path in run_folders(folder / "runs")}
    accepted = [client["accepted"] for client in rounds(runs["mine"])[0]["clients"]]
    assert (runs.keys(), sum(accepted)) == ({"mine", "krum"}, 1)


def test_a_misspelled_name_or_setting_is_one_line(folder: Path) -> None:
    wrong = fedbench("defense=mien", cwd=folder)
    assert (wrong.code, len(wrong.err)) == (1, 1)
    assert "did you mean mine?" in wrong.err[0]
    wrong = fedbench("defense=mine", "defense.kept=2", cwd=folder)
    assert (wrong.code, len(wrong.err)) == (1, 1)
    assert "defense.kept: mine has no such setting; did you mean keep?" in wrong.err[0]


def test_a_file_with_the_name_of_a_shipped_plugin_is_rejected(folder: Path) -> None:
    (folder / "defenses" / "krum.py").write_text(MINE.replace("mine", "krum"))
    wrong = fedbench("defense=krum", cwd=folder)
    assert wrong.code == 1
    (line,) = wrong.err
    assert line.endswith("krum.py: fedbench has a plugin defense=krum; choose another name")


def test_another_process_can_unpickle_a_plugin(folder: Path) -> None:
    """Ranks on GPUs are spawned: they import the plugin before any registry looks for it."""

    def python(code: str) -> bytes:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=folder, env=environment(), check=True, capture_output=True
        ).stdout

    made = "import pickle, sys; from fedbench.defense import DEFENSES; "
    packed = python(made + "sys.stdout.buffer.write(pickle.dumps(DEFENSES.get('mine')(keep=3)))")
    assert b"fedbench.defenses.mine" in packed
    read = f"import pickle; print(pickle.loads({packed!r}))"
    assert python(read).decode().strip() == "Mine(keep=3)"
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(packed)  # this process works in another folder


def test_the_working_folder_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = [str(tmp_path / "elsewhere")]
    assert with_working_folder(shipped, "fedbench.defenses") == shipped  # there is no such folder
    local = tmp_path / "defenses"
    local.mkdir()
    assert with_working_folder(shipped, "fedbench.defenses") == [*shipped, str(local)]
    (tmp_path / "link").symlink_to(local)
    assert with_working_folder([str(tmp_path / "link")], "fedbench.defenses") == [
        str(tmp_path / "link")
    ]


def test_defaults_are_listed_like_files() -> None:
    source = PluginDefaults("defaults", "plugins://")
    assert source.list("", None) == ["attack", "defense"]
    assert {"krum", "flame"} <= {*source.list("defense", None)}
    assert source.is_config("defense/krum.yaml")
    assert not source.is_config("defense/krumm")
    assert not source.is_config("executor/auto")
    config = source.load_config("defense/krum").config
    assert config == {"name": "krum", "f": None, "m": 1}
