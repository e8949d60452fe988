"""What README and docs tell people to type works as written."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from end_to_end import fedbench_in_this_process
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import commands, is_plain_run, run, write_titled_blocks

import fedbench
from fedbench.preview import plan_of

ROOT = Path(fedbench.__file__).parent.parent
SMALL = ("n_clients=4", "rounds=1", "pretrain_rounds=1", "local_epochs=1", "tracker=none")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The project's files as a bare clone has them."""
    for folder in ("fedbench", "defenses", "attacks", "backdoors", "conf", "sweeps"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    return tmp_path


@pytest.mark.slow
def test_readme_commands_run(clone: Path) -> None:
    found = commands(ROOT / "README.md")
    assert any("-m defense=" in command for command in found)
    for command in found:
        if is_plain_run(command):
            continue
        reads = "fedbench.report" in command  # what the commands before it wrote
        one_of_six = ("seed=0", "attack=none") if "--config-name" in command else ()
        done = run(command, clone, *(() if reads else SMALL), *one_of_six)
        assert done.returncode == 0, (command, done.stderr)
        assert ("dba.png" if "fedbench.preview" in command else " BA ") in done.stdout, command


@pytest.mark.parametrize("command", [*filter(is_plain_run, commands(ROOT / "README.md"))])
def test_readme_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)[2:]
    ended = fedbench_in_this_process(*words, *SMALL, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, [])
    assert " BA " in ended.out[-1]


@pytest.mark.slow
def test_the_defense_of_the_readme_runs(clone: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (clone / "defenses" / "mine.py").write_text(block)
    (clone / "conf" / "defense" / "mine.yaml").write_text("name: mine")
    done = run("-m fedbench defense=mine", clone, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "kept 2/4" in done.stdout


@pytest.mark.slow
def test_the_documented_defense_works_as_documented(clone: Path) -> None:
    page = ROOT / "docs" / "adding-a-defense.md"
    assert "defenses/short_only.py" in write_titled_blocks(page, clone)
    sweep, by_factor, out_of_tree = commands(page)
    done = run(sweep, clone, *SMALL)
    assert done.returncode == 0, done.stderr
    table = done.stdout.rpartition("seconds")[2]
    assert [table.count(f" {name} ") for name in ("fedavg", "short_only")] == [2, 2]
    assert run(by_factor, clone, *SMALL).stdout.count("finished in") == 3
    wrong = run("-m fedbench defense=short_only defense.factor=-1", clone)
    assert wrong.returncode == 1
    assert wrong.stderr == "fedbench: defense short_only: factor must be above 0, got -1.0\n"

    theirs = clone / "theirs"
    for package in ("theirs", "theirs/conf"):
        (theirs / package / "__init__.py").touch()
    site = clone / "site"
    install = "-m pip install --quiet --no-deps --no-build-isolation --target"
    installed = run(f"{install} {site} {theirs}", clone)
    assert installed.returncode == 0, installed.stderr
    done = run(out_of_tree, clone, *SMALL, path=str(site))
    assert done.returncode == 0, done.stderr
    assert "kept 1/4" in done.stdout


@pytest.mark.slow
def test_the_documented_defense_keeps_the_contract(clone: Path) -> None:
    write_titled_blocks(ROOT / "docs" / "adding-a-defense.md", clone)
    shutil.copytree(ROOT / "tests", clone / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    done = run("-m pytest -q tests/test_contract.py -k short_only -p no:cacheprovider", clone)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


@pytest.mark.slow
def test_the_documented_attack_and_backdoor_work_as_documented(clone: Path) -> None:
    page = ROOT / "docs" / "adding-an-attack.md"
    written = write_titled_blocks(page, clone)
    assert {"attacks/noisy_patch.py", "backdoors/stripe.py"} <= set(written)
    sweep, *single, preview = commands(page)
    done = run(sweep, clone, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished in") == 4
    assert len(single) == 2
    for command in single:
        done = run(command, clone, *SMALL)
        assert done.returncode == 0, done.stderr
    done = run(preview, clone)
    assert done.returncode == 0, done.stderr
    assert (clone / "stripe.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_documented_attack_keeps_the_contract(clone: Path) -> None:
    write_titled_blocks(ROOT / "docs" / "adding-an-attack.md", clone)
    shutil.copytree(ROOT / "tests", clone / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    tests = "tests/test_contract.py tests/attacks/test_attacks.py"
    done = run(f"-m pytest -q {tests} -k noisy_patch -p no:cacheprovider", clone)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def settings_of(command: str) -> list[list[str]]:
    """The overrides of a run, or of a sweep with each of its values once."""
    words = [word for word in shlex.split(command, comments=True)[2:] if "=" in word]
    parsed = OverridesParser.create().parse_overrides(words)
    values = [
        [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for override in parsed
    ]
    first = [choices[0] for choices in values]
    others = [(i, choice) for i, choices in enumerate(values) for choice in choices[1:]]
    return [first, *([*first[:i], choice, *first[i + 1 :]] for i, choice in others)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_that_a_page_names_exist(page: Path) -> None:
    """Pages with plugins, models or data of their own: above and in test_own_model_and_data.py."""
    made_up = (
        "short_only",
        "first_only",
        "noisy_patch",
        "stripe",
        "model=custom",
        "dataset=custom",
    )
    for command in commands(page):
        if "fedbench.report" in command or any(name in command for name in made_up):
            continue
        for overrides in settings_of(command):
            plan_of(overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    folders = "benchmarks|sweeps|docs|conf|tests|fedbench|attacks|backdoors|defenses"
    targets += re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    for target in targets:
        known = [page.parent / target, ROOT / target]
        made_up = Path(target).stem in ("mine", "short_only", "noisy_patch", "stripe")
        assert made_up or any(path.exists() for path in known), target


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "pytest" in line
    )
    assert command in (ROOT / ".ci" / "run").read_text()
    assert command in (ROOT / "CONTRIBUTING.md").read_text()
