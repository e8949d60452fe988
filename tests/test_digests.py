"""Digests: what a result depends on besides settings, and what it does not depend on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from end_to_end import imports_undone

from fedbench import digests
from fedbench.digests import Plugin, code_digest, path_digest, plugin_digest
from fedbench.errors import UserError

PLUGIN = '''"""A plugin."""

import json
import numpy
from own_helper import FACTOR


def rule(x):
    """Scale."""
    return FACTOR * x
'''
HELPER = "FACTOR = 2\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules can be imported from."""
    with imports_undone(tmp_path):
        sys.path.insert(0, str(tmp_path))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # quick edits keep the file's time
        yield tmp_path


def module(folder: Path, files: Mapping[str, str], name: str = "own_plugin") -> ModuleType:
    """Write the files and import a module anew."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for loaded in [*sys.modules]:
        if str(folder) in str(getattr(sys.modules[loaded], "__spec__", "")):
            del sys.modules[loaded]
    importlib.invalidate_caches()
    return importlib.import_module(name)


def digest(folder: Path, files: Mapping[str, str], name: str = "own_plugin") -> str:
    return code_digest(module(folder, files, name))


def test_an_edit_counts_and_comments_docstrings_and_layout_do_not(folder: Path) -> None:
    helper = {"own_helper.py": HELPER}
    before = digest(folder, {"own_plugin.py": PLUGIN, **helper})
    same = PLUGIN.replace("Scale.", "Multiply.").replace("A plugin", "My plugin")
    same = same.replace("FACTOR * x", "(FACTOR\n        * x)  # why") + "\n\n# the end\n"
    assert digest(folder, {"own_plugin.py": same, **helper}) == before
    assert digest(folder, {"own_plugin.py": PLUGIN.replace("* x", "+ x"), **helper}) != before
    assert digest(folder, {"own_plugin.py": PLUGIN, "own_helper.py": "FACTOR = 3\n"}) != before
    assert digest(folder, {"own_plugin.py": PLUGIN, **helper}) == before


def test_a_function_that_is_only_a_docstring_stays_code(folder: Path) -> None:
    text = 'class Marker:\n    """Nothing."""\n'
    before = digest(folder, {"own_plugin.py": text})
    assert digest(folder, {"own_plugin.py": text.replace("Nothing", "None")}) == before
    assert digest(folder, {"own_plugin.py": text.replace("Marker", "Other")}) != before


@pytest.mark.parametrize(
    ("statement", "path"),
    [
        ("import own_package.deep.part", "own_package/deep/part.py"),
        ("from own_package.deep import part", "own_package/deep/part.py"),
        ("from own_package.deep.part import X", "own_package/deep/part.py"),
        ("import own_package.deep.part", "own_package/__init__.py"),
        ("def later():\n    from own_package.deep import part", "own_package/deep/part.py"),
        ("from own_package import via", "own_package/deep/part.py"),
    ],
)
def test_imports_of_the_users_modules_count(folder: Path, statement: str, path: str) -> None:
    files = {
        "own_plugin.py": f"{statement}\n",
        "own_package/__init__.py": "",
        "own_package/via.py": "from .deep import part\n",
        "own_package/deep/part.py": "X = 1\n",  # `deep` has no __init__.py
    }
    before = digest(folder, files)
    assert digest(folder, {**files, path: "X = 2\n"}) != before
    assert digest(folder, {**files, "own_package/unused.py": "X = 2\n"}) == before


def test_installed_packages_count_only_within_themselves(folder: Path) -> None:
    site = folder / "site-packages"
    sys.path.insert(0, str(site))
    files = {
        "site-packages/own_theirs/__init__.py": "",
        "site-packages/own_theirs/rule.py": "from own_theirs._math import X\nimport own_library\n",
        "site-packages/own_theirs/_math.py": "X = 1\n",
        "site-packages/own_library.py": "X = 1\n",
        "own_plugin.py": "import own_library\n",
    }
    before, user = (digest(folder, files, name) for name in ("own_theirs.rule", "own_plugin"))
    edited = {**files, "site-packages/own_theirs/_math.py": "X = 2\n"}
    assert digest(folder, edited, "own_theirs.rule") != before
    edited = {**files, "site-packages/own_library.py": "X = 2\n"}
    assert digest(folder, edited, "own_theirs.rule") == before
    assert digest(folder, edited, "own_plugin") == user


def test_a_library_counts_by_the_hashes_that_its_installer_recorded(folder: Path) -> None:
    """Without reading its modules, of which torch has thousands."""
    site = folder / "site-packages"
    sys.path.insert(0, str(site))
    rule = {"site-packages/own_wheel/__init__.py": "", "site-packages/own_wheel/rule.py": "X = 1\n"}
    metadata = "site-packages/own_wheel-1.0.dist-info/METADATA"
    record = "site-packages/own_wheel-1.0.dist-info/RECORD"
    row = "own_wheel/rule.py,sha256={},6\n"
    named = {**rule, metadata: "Metadata-Version: 2.1\nName: own_wheel\nVersion: 1.0\n"}
    first = digest(folder, {**named, record: row.format("abc")}, "own_wheel.rule")
    assert digest(folder, {**named, record: row.format("abc")}, "own_wheel.rule") == first
    assert digest(folder, {**named, record: row.format("abd")}, "own_wheel.rule") != first


def test_a_missing_import_inside_a_function_is_no_error(folder: Path) -> None:
    text = "def f():\n    import not_installed.part\n    from torch.not_there import x\n"
    assert digest(folder, {"own_plugin.py": text})


def test_an_import_of_a_library_is_not_carried_out(folder: Path) -> None:
    """Optional imports may take seconds or fail."""
    text = "def f():\n    import own_slow.part\n"
    slow = {"site-packages/own_slow/__init__.py": "raise RuntimeError\n"}
    sys.path.insert(0, str(folder / "site-packages"))
    assert digest(folder, {"own_plugin.py": text, **slow})
    assert "own_slow" not in sys.modules


def test_code_of_shipped_plugins() -> None:
    """Helper files count, the harness does not: it has RESULTS_VERSION."""

    def names(name: str) -> set[str]:
        return set(digests._with_imports(importlib.import_module(name)))

    baybfed = {"fedbench.defenses.baybfed", "fedbench.defenses._baybfed"}
    assert names("fedbench.defenses.baybfed") == baybfed
    assert names("fedbench.models") == {"fedbench.models"}
    adaptive = names("fedbench.attacks.adaptive_baybfed")
    assert adaptive >= {"fedbench.attacks.adaptive_baybfed"}
    assert all(name.startswith(digests.PLUGIN_PACKAGES) for name in adaptive)


@dataclass(frozen=True)
class FileReader(Plugin):
    """A plugin with settings of every type."""

    file: str | None = None
    numbers: list[int] = field(default_factory=lambda: [1])
    arguments: dict[str, Any] = field(default_factory=dict)
    also: Path | None = None

    def inputs(self) -> list[Path]:
        return [] if self.also is None else [self.also]


def test_the_content_of_a_named_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, plain = tmp_path / "data.npz", plugin_digest(FileReader())
    assert plugin_digest(FileReader(file="data.npz")) == plain  # no such file: just a word
    found = {}
    for content in (b"one", b"other"):
        path.write_bytes(content)
        found[content] = [
            plugin_digest(FileReader(file="data.npz")),
            plugin_digest(FileReader(arguments={"paths": ["x", str(path)]})),
            plugin_digest(FileReader(also=path)),
        ]
        assert len({plain, *found[content]}) == 2  # the same file, however it is named
    assert set(found[b"one"]).isdisjoint(found[b"other"])


def test_a_folder_counts_by_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"x")
    before = path_digest(tmp_path)
    (tmp_path / "a" / "x.png").rename(tmp_path / "a" / "y.png")
    renamed = path_digest(tmp_path)
    (tmp_path / "a" / "y.png").write_bytes(b"yy")
    assert len({before, renamed, path_digest(tmp_path)}) == 3


def test_large_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "LARGE", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "dump"
    path.write_bytes(b"12345678")
    small = digests.hashlib.sha256(b"12345678").hexdigest()
    for _ in range(2):
        digests._content_digest.cache_clear()  # as a new process
        assert digests.file_digest(path) == small
        monkeypatch.setattr(digests.hashlib, "file_digest", None)  # it is on disk now
    monkeypatch.undo()


def test_an_unreadable_input_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: cannot be read \(No such file"):
        path_digest(tmp_path / "gone")
