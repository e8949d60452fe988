"""The house rules: rooms, layers, sizes, unique class names, declared dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import fedbench

ROOT = Path(fedbench.__file__).parent.parent
FOLDERS = ("fedbench", "defenses", "attacks", "backdoors")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
ROOMS = ("engine", "datasets", "display", "multirun", "results", "report", "tracking")
# Room -> what it must not import, at any level: data and control move one way.
FORBIDDEN = {
    "datasets": ("engine", "federation", "plan", "report", "single_run", "multirun"),
    "engine": ("federation", "plan", "report", "single_run"),
    "results": ("federation", "plan", "report", "single_run", "multirun"),
    "display": ("federation", "multirun", "plan", "report", "single_run", "tracking"),
    "report": ("federation", "multirun", "single_run", "tracking"),
    "tracking": ("federation", "multirun", "single_run"),
}
# Dependencies that no module imports, and why they are declared all the same
INDIRECT = {
    "hydra-joblib-launcher": "conf/hydra/launcher names it",
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="checks a clone, not an installed package"
)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, also inside functions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_modules_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 300
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            n_lines = node.end_lineno - node.lineno + 1
            assert n_lines <= 40, f"{node.name} has {n_lines} lines"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_have_an_empty_init(room: str) -> None:
    """User errors must print before torch and Lightning are imported."""
    assert (ROOT / "fedbench" / room / "__init__.py").read_text() == ""


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_point_one_way(room: str) -> None:
    forbidden = {f"fedbench.{module}" for module in FORBIDDEN[room]}
    for path in (ROOT / "fedbench" / room).glob("*.py"):
        found = {".".join(module.split(".")[:2]) for module in imports(path)} & forbidden
        assert not found, f"{name(path)} imports {found}"


def test_a_class_name_means_one_thing() -> None:
    classes = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert [cls for cls, n in classes.items() if n > 1] == []


def test_every_import_is_declared_and_every_dependency_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[<>=\[ ]", line)[0].lower() for line in project["dependencies"]}
    modules = {module.split(".")[0] for path in SOURCES for module in imports(path)}
    distributions = packages_distributions()
    used = {
        distributions[module][0].lower()
        for module in modules - {*sys.stdlib_module_names, "fedbench"}
    }
    assert declared == used | {*INDIRECT}
    assert not used & {*INDIRECT}
