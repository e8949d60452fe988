"""What README and docs tell people to type works as written."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from end_to_end import fedbench_in_this_process
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import commands, is_plain_run, is_sweep, run, titled_blocks, write_titled_blocks

import fedbench
from fedbench.command_line import setting_names
from fedbench.multirun.sweeper import owner_of
from fedbench.plugin_configs import config_groups, options_of
from fedbench.preview import plan_of
from fedbench.testing.attacks import ATTACK
from fedbench.testing.backdoors import BACKDOOR
from fedbench.testing.contract import Contract
from fedbench.testing.defenses import DEFENSE

ROOT = Path(fedbench.__file__).parent.parent
README = ROOT / "README.md"
CODE = ("fedbench", "defenses", "attacks", "backdoors", "benchmarks")
DEFENSE_PAGE = ROOT / "docs" / "adding-a-defense.md"
ATTACK_PAGE = ROOT / "docs" / "adding-an-attack.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Files that a page shows, for readers to write
SHOWN = {"defenses/mine.py", *(title for page in PAGES for title, _ in titled_blocks(page))}
SMALL = ("n_clients=4", "rounds=1", "pretrain_rounds=1", "local_epochs=1", "tracker=none")
QUIET = ("-p", "no:cacheprovider")
CACHES = shutil.ignore_patterns("__pycache__")
EXTRAS = {"hydra/launcher=ray", "hydra/launcher=submitit_slurm"}  # of optional dependencies


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The project's files as a bare clone has them."""
    for folder in ("fedbench", "defenses", "attacks", "backdoors", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=CACHES)
    return tmp_path


@pytest.mark.slow
def test_readme_commands_run(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first one is a sweep in a clone, in parallel; other sweeps stay in this process."""
    first, *others = [c for c in commands(README) if not is_plain_run(c)]
    assert "-m defense=" in first
    done = run(first, clone, *SMALL)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert " BA " in done.stdout

    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "sweeps", folder / "sweeps")
    for command in others:
        one_of_six = ("seed=0", "attack=none") if "--config-name" in command else ()
        extra = () if "fedbench report" in command else (*SMALL, *one_of_six)
        if is_sweep(command):
            words = shlex.split(command, comments=True)[2:]
            ended = fedbench_in_this_process(*words, *extra, "hydra/launcher=basic", cwd=folder)
            code, out = ended.code, "\n".join(ended.out)
        else:
            done = run(command, folder, *extra, path=str(ROOT))
            code, out = done.returncode, done.stdout
        assert code == 0, (command, out)
        assert _expected(command) in out, command


def _expected(command: str) -> str:
    """What the output of a command in the README contains."""
    if "fedbench preview" in command:
        return "dba.png"
    return " to run" if "--dry-run" in command else " BA "


@pytest.mark.slow
@pytest.mark.parametrize("command", [*filter(is_plain_run, commands(README))])
def test_readme_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)[2:]
    ended = fedbench_in_this_process(*words, *SMALL, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, [])
    assert " BA " in ended.out[-1]


@pytest.mark.slow
def test_the_defense_of_the_readme_passes_the_check(clone: Path, tmp_path_factory: Any) -> None:
    text = README.read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    check, compare = re.findall(r"`python (-m fedbench[^`]*=mine\b[^`]*)`", text)
    empty = tmp_path_factory.mktemp("empty")
    for folder in (clone, empty):
        (folder / "defenses").mkdir(exist_ok=True)
        (folder / "defenses" / "mine.py").write_text(block)
        done = run(check, folder, path=str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"\n{len(DEFENSE.checks) + 2} ok\n" in done.stdout  # and exemptions and config
    done = run(compare, clone, *SMALL)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^defense=mine pmr=0.3  finished in .+ TNR ", done.stdout, re.MULTILINE)
    table = done.stdout.rpartition("seconds")[2]
    assert [table.count(f" {name} ") for name in ("mine", "krum")] == [2, 2]


@pytest.mark.slow
def test_the_documented_defense_works_as_documented(tmp_path: Path) -> None:
    """In a working folder, which is not a clone."""
    assert "defenses/short_only.py" in write_titled_blocks(DEFENSE_PAGE, tmp_path)
    sweep, by_factor, check, *_ = commands(DEFENSE_PAGE)
    own_test, _ = commands(DEFENSE_PAGE, "pytest")
    done = run(sweep, tmp_path, *SMALL, path=str(ROOT))
    assert done.returncode == 0, done.stderr
    table = done.stdout.rpartition("seconds")[2]
    assert [table.count(f" {name} ") for name in ("fedavg", "short_only")] == [2, 2]
    done = run(by_factor, tmp_path, *SMALL, path=str(ROOT))
    assert done.stdout.count("finished in") == 3
    wrong = run("-m fedbench defense=short_only defense.factor=-1", tmp_path, path=str(ROOT))
    assert wrong.returncode == 1
    assert wrong.stderr == "fedbench: defense short_only: factor must be above 0, got -1.0\n"
    for command in (check, own_test, "debug_short_only.py"):
        done = run(command, tmp_path, path=str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_documented_package_works_as_documented(clone: Path, tmp_path_factory: Any) -> None:
    """It needs no search path and, once installed, does not disturb the tests of a clone."""
    for page in (DEFENSE_PAGE, ATTACK_PAGE):
        write_titled_blocks(page, clone)
    theirs, site = clone / "theirs", clone / ".venv" / "site"
    (theirs / "theirs" / "__init__.py").touch()
    install = "-m pip install --quiet --no-deps --no-build-isolation --target"
    installed = run(f"{install} {site} {theirs}", clone)
    assert installed.returncode == 0, installed.stderr
    *_, first_run, check = commands(DEFENSE_PAGE)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    path = os.pathsep.join([str(site), str(ROOT)])
    done = run(first_run, elsewhere, *SMALL, path=path)
    assert done.returncode == 0, done.stderr
    assert "kept 1/4" in done.stdout
    done = run(check, elsewhere, path=path)
    assert done.returncode == 0, done.stdout + done.stderr

    _, own_test = commands(DEFENSE_PAGE, "pytest")
    done = run(own_test, clone, *QUIET, path=str(site))
    assert done.returncode == 0, done.stdout
    shutil.copytree(ROOT / "tests", clone / "tests", dirs_exist_ok=True, ignore=CACHES)
    shutil.copy(ROOT / "pyproject.toml", clone)
    names = ("short_only", "noisy_patch", "stripe", "first_only", "registered_names")
    ours = f"-m pytest -v tests/test_contract.py -k '{' or '.join(names)}'"
    done = run(ours, clone, *QUIET, path=str(site))
    assert done.returncode == 0, done.stdout
    tests = " ".join(re.findall(r"^tests/.*", done.stdout, re.MULTILINE))
    assert {name for name in names if name in tests} == {*names} - {"first_only"}


@pytest.mark.slow
def test_the_documented_attack_and_backdoor_work_as_documented(tmp_path: Path) -> None:
    """In a working folder, which is not a clone."""
    written = write_titled_blocks(ATTACK_PAGE, tmp_path)
    assert {"attacks/noisy_patch.py", "backdoors/stripe.py"} <= set(written)
    sweep, *single, preview, check = commands(ATTACK_PAGE)
    (own_tests,) = commands(ATTACK_PAGE, "pytest")
    done = run(sweep, tmp_path, *SMALL, path=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished in") == 4
    assert len(single) == 2
    for command in single:
        done = run(command, tmp_path, *SMALL, path=str(ROOT))
        assert done.returncode == 0, done.stderr
    for command in (preview, check, own_tests):
        done = run(command, tmp_path, path=str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "stripe.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("page", "heading", "contract"),
    [
        (DEFENSE_PAGE, "The checks", DEFENSE),
        (ATTACK_PAGE, "Checks of an attack", ATTACK),
        (ATTACK_PAGE, "Checks of a backdoor", BACKDOOR),
    ],
    ids=["defense", "attack", "backdoor"],
)
def test_pages_list_every_check(page: Path, heading: str, contract: Contract[Any]) -> None:
    section = page.read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    optional = {name.strip("`"): cells[-1] == "yes" for name, *cells in rows}
    assert optional == {name: check.optional for name, check in contract.checks.items()}


def settings_of(command: str) -> list[tuple[str, ...]]:
    """The overrides of a run, or of as many runs of a sweep as show each of its values."""
    words = [word for word in shlex.split(command, comments=True)[2:] if "=" in word]
    if not EXTRAS.isdisjoint(words):
        words = [word for word in words if not word.startswith("hydra")]
    parsed = OverridesParser.create().parse_overrides(words)
    groups = {group: options_of(group) for group in config_groups()}
    owned = [(o, owner_of(o.key_or_group, groups)) for o in parsed]
    own = [
        (f"{owner[0]}={owner[1]}", f"{owner[2]}={value}")
        for override, owner in owned
        if owner is not None
        for value in override.sweep_string_iterator()
    ]
    parsed = [override for override, owner in owned if owner is None]
    values = [
        [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for override in parsed
    ]
    n_runs = max(map(len, values), default=1)
    return own + [tuple(choices[i % len(choices)] for choices in values) for i in range(n_runs)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_that_a_page_names_exist(page: Path) -> None:
    """Plugins, models and data that a page shows: above and in test_own_model_and_data.py."""
    plugin = re.compile(r"(defenses|attacks|backdoors|theirs)/(\w+)\.py")
    plugins = {match[2] for file in SHOWN if (match := plugin.search(file))}
    skipped = re.compile(
        r"fedbench[. ](dashboard|report|testing|list|upload)|model=custom|dataset=custom|"
        + "|".join(plugins)
    )
    runs = [settings_of(c) for c in commands(page) if not skipped.search(c)]
    for overrides in dict.fromkeys(chain.from_iterable(runs)):
        plan_of(overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    folders = "benchmarks|sweeps|docs|conf|examples|tests|fedbench|attacks|backdoors|defenses"
    targets += re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    for target in targets:
        known = [page.parent / target, ROOT / target]
        assert target in SHOWN or any(path.exists() for path in known), target


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = next(line for line in README.read_text().splitlines() if "pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text()
    assert command in (ROOT / "CONTRIBUTING.md").read_text()


# A setting with brackets that no quote encloses: zsh takes it for a pattern. Lists of Python's
# arguments have spaces or quotes.
UNQUOTED = re.compile(
    rf"(?<![\w.'\"])(?:{'|'.join(sorted(setting_names()))})(?:\.\w+)*"
    r"=\w*[\[({][^\s`'\"]*[\])}]"
)
CODE_BLOCK = re.compile(r"^```(?:python|yaml|json)\b.*?^```", re.DOTALL | re.MULTILINE)
CONFIGS = sorted([*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "sweeps").rglob("*.yaml")])
SOURCES = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def shell_text(path: Path) -> str:
    """What a file tells people to type: a page, the comments of a config, strings of a module."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return CODE_BLOCK.sub("", text)
    if path.suffix == ".yaml":
        return "\n".join(re.findall(r"#.*", text))
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def test_documented_brackets_are_quoted() -> None:
    for path in [*PAGES, *CONFIGS, *SOURCES]:
        assert UNQUOTED.findall(shell_text(path)) == [], path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_quote_what_zsh_would_expand(page: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
        lexer.whitespace_split = True
        for word in lexer:
            outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", word)
            assert not set("[](){}") & {*outside}, line


def test_a_bracket_without_quotes_is_found() -> None:
    assert UNQUOTED.findall("`n_clients=[4,9]`, 'attack_rounds=[5]' and x.lr=[1]") == [
        "n_clients=[4,9]"
    ]
