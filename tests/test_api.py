"""The public Python API: its names, how settings are written, runs and sweeps from Python."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import hydra
import hypothesis
import numpy as np
import pytest
import torch
import yaml
from end_to_end import CONFIGS, ROOT, SMALL, environment, install, run_folder, succeed
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

import fedbench
from fedbench.api import ONE_VALUE_EACH
from fedbench.command import read_listing
from fedbench.composition import compose, overrides_of, sweep_overrides_of
from fedbench.config import RunConfig
from fedbench.results.frames import frame_of

DOCS = ROOT / "docs"
QUICK = {"tracker": "none", "n_clients": 6, "rounds": 2, "pretrain_rounds": 1, "local_epochs": 1}


def python(code: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestNames:
    def test_importing_fedbench_imports_nothing_else(self, tmp_path: Path) -> None:
        heavy = "numpy pandas torch hydra omegaconf lightning wandb"
        code = f"import sys, fedbench; print({{*'{heavy}'.split()}} & {{*sys.modules}})"
        assert python(code, tmp_path) == "set()\n"

    def test_results_load_without_torch(self, tmp_path: Path) -> None:
        code = "import sys; from fedbench import load, run, sweep; print('torch' in sys.modules)"
        assert python(code, tmp_path) == "False\n"

    def test_every_public_name_exists_and_is_listed_once(self) -> None:
        tree = ast.parse(Path(fedbench.__file__).read_text("utf-8"))
        conditional = [node for node in tree.body if isinstance(node, ast.If)]
        (block,) = (node for node in conditional if ast.unparse(node.test) == "TYPE_CHECKING")
        typed = [alias.name for line in block.body for alias in line.names]  # type: ignore[attr-defined]
        lazy = [name for names in fedbench._MODULES.values() for name in names]
        assert sorted(typed) == sorted(lazy) == sorted(fedbench.__all__)
        assert set(fedbench.__all__) <= set(dir(fedbench))
        for name in fedbench.__all__:
            assert getattr(fedbench, name).__name__ == name

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="has no attribute 'runn'"):
            fedbench.runn  # noqa: B018

    def test_no_module_hides_a_public_name(self) -> None:
        """Importing `fedbench.sweep` as a module would replace the function."""
        for folder in fedbench.__path__:
            for name in fedbench.__all__:
                assert not Path(folder, name).exists()
                assert not Path(folder, f"{name}.py").exists()

    @pytest.mark.parametrize("name", fedbench.__all__)
    def test_a_public_name_has_a_docstring_with_an_example(self, name: str) -> None:
        text = inspect.getdoc(getattr(fedbench, name))
        assert text is not None
        assert "Examples:\n    >>> " in text
        for member, value in vars(getattr(fedbench, name)).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert value.__doc__, member

    def test_the_reference_page_has_every_public_name_and_no_other(self) -> None:
        found = re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
        assert {f"fedbench.{name}" for name in fedbench.__all__} <= set(found)
        assert len(set(found)) == len(found)
        for path in found:
            module, _, name = path.rpartition(".")
            __import__(module)
            assert inspect.getdoc(getattr(sys.modules[module], name)), path

    def test_the_guide_names_every_public_name(self) -> None:
        text = (DOCS / "python-api.md").read_text()
        assert [name for name in fedbench.__all__ if f"fedbench.{name}`" not in text] == []

    def test_defenses_are_importable_by_name(self) -> None:
        from fedbench.defenses import krum

        assert fedbench.aggregate(krum.Krum(), torch.randn(5, 3)).update.shape == (3,)


TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\\'\" ,=:[]{}()$#~")
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
KEYS = st.text(st.sampled_from("ab_.:=,\\ {}[]()"), min_size=1).map(lambda key: f"k{key}k")
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


def parsed(overrides: list[str]) -> list[Any]:
    return [override.value() for override in OverridesParser.create().parse_overrides(overrides)]


class TestSettings:
    @hypothesis.settings(deadline=None)
    @given(VALUES)
    def test_every_value_arrives_as_it_is(self, value: Any) -> None:
        (arrived,) = parsed(overrides_of({"key": value}))
        assert arrived == value
        assert type(arrived) is type(value)

    @hypothesis.settings(deadline=None)
    @given(st.lists(VALUES, min_size=1, max_size=4))
    def test_every_value_of_a_sweep_arrives_as_it_is(self, values: list[Any]) -> None:
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        (override,) = OverridesParser.create().parse_overrides(sweep_overrides_of({"k": values}))
        assert override.is_sweep_override() == (len(values) > 1)
        if len(values) > 1:  # as Hydra passes them on to its workers
            arrived = parsed([f"k={text}" for text in override.sweep_string_iterator()])
        else:
            arrived = [override.value()]
        assert arrived == [list(value) if isinstance(value, tuple) else value for value in values]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("krum", "k=krum"),  # as the user writes it, and as errors quote it
            ("null", "k='null'"),
            ("True", "k='True'"),
            ("1e3", "k='1e3'"),
            ("it's", r"k='it\'s'"),
            ("", "k=''"),
            (Path("/a b"), "k='/a b'"),
            (None, "k=null"),
            (True, "k=true"),
            ((40, 90), "k=[40,90]"),
            (np.float64(0.5), "k=0.5"),
            (np.arange(2), "k=[0,1]"),
            (torch.tensor(3), "k=3"),
            ({"a b": 1}, r"k={a\ b:1}"),
        ],
    )
    def test_a_value_is_written_like_this(self, value: Any, text: str) -> None:
        assert overrides_of({"k": value}) == [text]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (["krum", "a,b"], "k=krum,'a,b'"),
            (range(3), "k=0,1,2"),
            (np.array([0.5, 1]), "k=0.5,1.0"),
            ([(40, 90), 30], "k=[40,90],30"),
            ((40, 90), "k=[40,90]"),
            ([[1, 2]], "k=[1,2]"),
            (0.5, "k=0.5"),
        ],
    )
    def test_the_values_of_a_sweep_are_written_like_this(self, value: Any, text: str) -> None:
        assert sweep_overrides_of({"k": value}) == [text]

    def test_other_values_are_user_errors(self) -> None:
        with pytest.raises(fedbench.UserError, match=r"^pmr=<object.*>: must be a number"):
            overrides_of({"pmr": object()})
        with pytest.raises(fedbench.UserError, match=r"^pmr=\[\]: must have at least one value"):
            sweep_overrides_of({"pmr": []})

    @pytest.mark.slow
    def test_settings_compose_as_on_the_command_line(self, tmp_path: Path) -> None:
        settings = {
            **{"defense": "krum", "defense.f": None, "pmr": 0.3, "n_clients": [4, 9], "pool": 20},
            **{"out": tmp_path / "a, b=c", "name": "it's", "attack.alpha": 0.5},
            "attack.backdoors": [{"name": "patch", "size": 3}],
        }
        words = [
            *("defense=krum", "defense.f=null", "pmr=0.3", "n_clients=[4,9]", "pool=20"),
            *(f"out='{tmp_path}/a, b=c'", r"name='it\'s'", "attack.alpha=0.5"),
            "attack.backdoors=[{name:patch,size:3}]",
        ]
        shown = succeed("--cfg", "job", *words, cwd=tmp_path).out
        config = compose([*overrides_of({**settings, **SMALL, "n_clients": [4, 9]})])
        resolved = {"clip_grad": None}  # `auto` on the command line
        assert {**yaml.safe_load("\n".join(shown)), **resolved} == {**vars(config)}

    @pytest.mark.parametrize(
        ("key", "value"), [("defense", ["krum", "fedavg"]), ("pmr", (0.2, 0.3)), ("seed", range(2))]
    )
    def test_a_run_takes_one_value_per_setting(self, key: str, value: Any) -> None:
        with pytest.raises(fedbench.UserError) as raised:
            fedbench.run(**{key: value})
        hint = "fedbench.run takes one value per setting; fedbench.sweep takes several"
        assert str(raised.value) == f"{key}={value}: {hint}"

    def test_only_settings_that_may_be_lists_take_a_list(self) -> None:
        fields = {
            key: [1, 2] for key in RunConfig.__dataclass_fields__ if key not in ONE_VALUE_EACH
        }
        config = compose(overrides_of(fields))
        assert {key: getattr(config, key) for key in fields} == fields
        assert sorted(fields) == ["attack_rounds", "n_clients"]

    def test_composing_leaves_another_hydra_application_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("lr: 1")
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            mine = GlobalHydra.instance().hydra
            assert compose(["defense=krum"]).defense["name"] == "krum"
            assert GlobalHydra.instance().hydra is mine
            assert hydra.compose("mine") == {"lr": 1}
        assert compose([]).defense["name"] == "fedavg"
        assert not GlobalHydra.instance().is_initialized()


def test_a_run_that_did_not_start_is_listed_as_failed(tmp_path: Path) -> None:
    listing = tmp_path / "runs.jsonl"
    config = {"defense": {"name": "krum", "f": 2}, "pmr": 0.2}
    listing.write_text(json.dumps({"folder": str(tmp_path / "krum-1"), "config": config}) + "\n")
    (row,) = frame_of(read_listing(listing)).to_dict("records")
    assert (row["defense"], row["defense.f"], row["pmr"]) == ("krum", 2, 0.2)
    assert (row["status"], row["reason"]) == ("failed", "did not start; the output says why")


@pytest.mark.slow
class TestRuns:
    def test_a_run_is_that_of_the_command_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = fedbench.run("attack.alpha=0.5", defense="krum", pmr=0.34, **QUICK)
        lines = capsys.readouterr().out.splitlines()
        assert "round 2/2" in lines[-2]
        assert result.folder == run_folder(Path("runs"))
        assert (result.summary["MA"], result.summary["BA"]) == (result.MA, result.BA)
        assert tuple(result.summary[key] for key in ("TPR", "TNR", "AUC")) == (
            result.TPR,
            result.TNR,
            result.AUC,
        )
        assert result.config["attack"]["alpha"] == 0.5
        assert list(result.rounds.MA)[-1] == result.MA
        assert len(result.clients) == 2 * 6
        assert repr(result).startswith(f"<runs/default/{result.folder.name}: BA=0.")

        small = [f"{key}={value}" for key, value in QUICK.items()]
        again = succeed("defense=krum", "pmr=0.34", "attack.alpha=0.5", *small, cwd=tmp_path)
        assert "already finished, skipped" in again.out[0]
        assert fedbench.run(defense="krum", pmr=0.34, **QUICK, **{"attack.alpha": 0.5}) == result
        assert "already finished, skipped" in capsys.readouterr().out

    def test_mistakes_raise_the_line_of_the_command_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(fedbench.UserError, match=r"^defense=krumm: no such .* mean krum\?"):
            fedbench.run(defense="krumm")
        with pytest.raises(fedbench.UserError, match=r"^pmr=1.5: must be between 0 and 1$"):
            fedbench.sweep(pmr=[0.2, 1.5])
        with pytest.raises(fedbench.UserError, match=r"^dataset.root=no where: expected"):
            fedbench.run(dataset="mnist", **QUICK, **{"dataset.root": "no where"})
        with pytest.raises(fedbench.UserError, match=r"fedbench\.sweep takes several"):
            fedbench.run("-m", "pmr=0.34,0.5", **{**QUICK, "rounds": 1})
        with pytest.raises(fedbench.UserError, match="no run started"):
            fedbench.run("--cfg=job")
        assert "Traceback" not in capsys.readouterr().out

    def test_a_sweep_returns_its_own_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        fedbench.run(defense="fedavg", pmr=0.34, **QUICK)
        runs = fedbench.sweep("seed=0,1", defense=["krum", "median"], pmr=0.34, **QUICK)
        assert list(zip(runs.defense, runs.seed, strict=True)) == [
            *(("krum", 0), ("median", 0), ("krum", 1), ("median", 1))
        ]
        assert set(runs.status) == {"finished"}
        assert len(fedbench.load()) == 5

    def test_a_sweep_varies_a_setting_of_one_defense(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        noise = {"defense.flame.noise": [0.001, 0.01]}
        runs = fedbench.sweep(defense=["krum", "flame"], pmr=0.34, **noise, **QUICK)
        found = sorted(zip(runs.defense, runs["defense.noise"].fillna(0), strict=True))
        assert found == [("flame", 0.001), ("flame", 0.01), ("krum", 0)]

    def test_a_script_needs_no_guard(self, tmp_path: Path) -> None:
        """Two processes per run, and two runs in parallel."""
        script = tmp_path / "script.py"
        settings = {**QUICK, "pmr": 0.34}
        script.write_text(
            "import fedbench\n"
            f"run = fedbench.run('executor.devices=2', **{settings})\n"
            f"runs = fedbench.sweep(defense=['krum', 'median'], **{settings})\n"
            "print('done', run.MA > 0, len(runs))\n"
        )
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.stderr == ""
        assert "sequential on 2 processes" in done.stdout
        assert done.stdout.splitlines()[-1] == "done True 2"

    def test_an_interrupt_stops_the_runs_and_the_same_call_resumes(self, tmp_path: Path) -> None:
        settings = {**QUICK, "pmr": 0.34, "rounds": 100}
        code = f"import fedbench; fedbench.sweep(seed=[0, 1], **{settings})"
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        while "starting 2 runs" not in (line := process.stdout.readline()):
            assert line
        while not any(tmp_path.glob("runs/*/*/checkpoint.pt")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert "stopped: 0 of 2 runs done; the same command resumes the others" in out
        assert err.splitlines()[-1] == "KeyboardInterrupt"
        assert set(fedbench.load(tmp_path).status) == {"unfinished"}


PLUGIN = """
import dataclasses

from fedbench.defense import DEFENSES, Defense, mean_of


@DEFENSES.register("boom")
@dataclasses.dataclass(frozen=True)
class Boom(Defense):
    fuse: int = 1

    def aggregate(self, updates, state, view):
        if view.index == self.fuse:
            raise RuntimeError(f"boom in round {view.index}")
        return mean_of(updates, view.client_ids >= 0), state
"""


@pytest.mark.slow
def test_failed_runs_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = f"[fedbench.defenses]\nboom = theirs:Boom\n{CONFIGS}"
    install(tmp_path / "site", points, PLUGIN, {"defense/boom": "name: boom\nfuse: 1\n"})
    monkeypatch.syspath_prepend(tmp_path / "site")  # the command finds what this process finds
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"boom-\w+ failed: RuntimeError: boom in round 1"):
        fedbench.run(defense="boom", pmr=0.34, **QUICK)
    assert "Traceback" in capsys.readouterr().out

    runs = fedbench.sweep(defense=["boom", "fedavg"], pmr=0.34, **QUICK)
    assert dict(zip(runs.defense, runs.status, strict=True)) == {
        **{"boom": "failed", "fedavg": "finished"}
    }
    assert runs.reason.tolist() == ["RuntimeError: boom in round 1", ""]


def execute_example(name: str, cwd: Path) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    text = inspect.getdoc(getattr(fedbench, name)) or ""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=flags)
    names = {"fedbench": fedbench, "torch": torch}
    test = parser.get_doctest(text, names, name, None, 0)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr("fedbench.command.print", lambda *_, **__: None, raising=False)
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0


@pytest.fixture(scope="module")
def example_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of the example of `sweep`."""
    folder = tmp_path_factory.mktemp("examples")
    execute_example("sweep", folder)
    return folder


@pytest.mark.slow
class TestExamples:
    @pytest.mark.parametrize("name", fedbench.__all__)
    def test_the_example_of_a_docstring_works(
        self, name: str, example_runs: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(example_runs, tmp_path, dirs_exist_ok=True)
        execute_example(name, tmp_path)

    def test_the_guide_works_from_top_to_bottom(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MPLBACKEND", "Agg")
        page = (DOCS / "python-api.md").read_text()
        names: dict[str, Any] = {}
        for title, code in re.findall(
            r'^```python(?: title="([^"]+)")?\n(.*?)^```', page, re.DOTALL | re.MULTILINE
        ):
            if title:
                Path(title).parent.mkdir(parents=True, exist_ok=True)
                Path(title).write_text(code)
            else:
                exec(code, names)
        out = capsys.readouterr().out
        assert "defense=krumm: no such defense; did you mean krum?" in out
        assert "already finished, skipped" in out
        assert names["result"].folder.name.startswith("half-")
        assert set(names["runs"].status) == {"finished"}
        assert names["rounds"]["attack.alpha"].notna().all()
