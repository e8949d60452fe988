"""Digests of what results depend on besides settings: the code of plugins and data files.

They are part of the run id, so a run with edited code or with other data is a new run.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbench.errors import INSTALLED, STDLIB, UserError

# Packages of fedbench whose modules count as code of a plugin. The rest of fedbench has
# `config.RESULTS_VERSION`.
PLUGIN_PACKAGES = ("fedbench.defenses", "fedbench.attacks", "fedbench.backdoors")
LARGE = 2**26  # bytes of a file whose digest is kept on disk; reading takes a tenth of a second


class Plugin:
    """Base class of all plugins."""

    def inputs(self) -> Iterable[Path | ModuleType]:
        """Return files, folders and modules that the results depend on.

        Not needed for the plugin's own module, what that imports, and files that settings name.
        """
        return ()


def plugin_digest(plugin: Plugin) -> str:
    """Digest of a plugin's code and inputs."""
    inputs = [*plugin.inputs(), *_named_files(plugin)]
    modules = [sys.modules[type(plugin).__module__]]
    modules += [found for found in inputs if isinstance(found, ModuleType)]
    paths = sorted({found for found in inputs if isinstance(found, Path)})
    return _joined([*map(code_digest, modules), *map(path_digest, paths)])


@cache  # edits count in the next process, which imports them
def code_digest(module: ModuleType) -> str:
    """Digest of a module and of the user's modules it imports, without comments and docstrings.

    Modules of Python and of installed packages do not count, except those of its own package.
    """
    if (recorded := _recorded_hashes(module)) is not None:
        return _joined(recorded)
    parts = []
    for name, path in sorted(_with_imports(module).items()):
        content = path.read_bytes()
        code = _executed(content) if path.suffix == ".py" else content
        parts.append(f"{name} {hashlib.sha256(code).hexdigest()}")
    return _joined(parts)


def _recorded_hashes(module: ModuleType) -> list[str] | None:
    """Files of an installed package with the hashes that its installer recorded, if it did.

    Reading all modules of a library such as torch would take minutes.
    """
    top = module.__name__.partition(".")[0]
    path = _path_of(module.__name__)
    if top == "fedbench" or path is None or INSTALLED.isdisjoint(path.parts):
        return None
    try:
        files = distribution(top).files or []
    except PackageNotFoundError:
        return None
    own = [(file, file.hash) for file in files if file.parts[0] == top]  # no scripts, no metadata
    return sorted(f"{file} {recorded.value}" for file, recorded in own if recorded) or None


def path_digest(path: Path) -> str:
    """Digest of a file's content, or of a folder's file names and contents."""
    try:
        if not path.is_dir():
            return file_digest(path)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return _joined(f"{file.relative_to(path)} {file_digest(file)}" for file in files)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _joined(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "no ordinary file")  # reading a device or pipe may never end
    return _content_digest(path.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _content_digest(path: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, computed once for large files as long as size and time stay the same."""
    if size < LARGE:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    from fedbench.datasets.cache import cached  # imports torch, which takes seconds

    def build() -> dict[str, Any]:
        with path.open("rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    return str(cached("digests", [str(path), size, changed], build)["sha256"])


def _named_files(plugin: Any) -> Iterator[Path]:
    """Files that settings name, also inside lists and dicts."""
    values = [getattr(plugin, field.name) for field in fields(plugin)]
    while values:
        value = values.pop()
        if isinstance(value, str) and os.path.isfile(path := os.path.expanduser(value)):
            yield Path(path)
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, dict):
            values += value.values()


def _executed(source: bytes) -> bytes:
    """Source without comments, docstrings and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode("utf-8", "surrogatepass")


def _with_imports(module: ModuleType) -> dict[str, Path]:
    """Files by module name: the module's own and, recursively, those of the user's imports."""
    files: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [*_with_parents(module.__name__)]
    while waiting:
        name = waiting.pop()
        if name in seen or not _is_reachable(name, module.__name__):
            continue
        seen.add(name)
        path = _path_of(name)
        if path is None or not _is_own(name, module.__name__):
            continue
        files[name] = path
        if path.suffix == ".py":
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += _imports(ast.parse(path.read_bytes()), package)
    return files


def _is_reachable(name: str, plugin: str) -> bool:
    """Whether `_path_of` may import the package of a module: it is the user's or fedbench's."""
    package = name.rpartition(".")[0]
    return not package or package.partition(".")[0] == "fedbench" or _is_own(package, plugin)


def _is_own(name: str, plugin: str) -> bool:
    """Whether a module counts as code of `plugin`, itself the name of a module."""
    top = name.partition(".")[0]
    if top == "fedbench":
        package = plugin.rpartition(".")[0]
        homes = (*PLUGIN_PACKAGES, *([package] if "." in package else []))
        return name == plugin or name.startswith(tuple(f"{home}." for home in homes))
    if top == plugin.partition(".")[0]:
        return True
    path = _path_of(name)
    is_installed = path is not None and not INSTALLED.isdisjoint(path.parts)
    is_pythons = path is not None and path.is_relative_to(STDLIB)
    return name not in sys.builtin_module_names and not is_installed and not is_pythons


def _path_of(name: str) -> Path | None:
    """File of a module, imported or not; None for namespace packages and what is no module."""
    try:
        spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    except Exception:  # it imports the parents of `name`, which may fail
        return None
    origin = getattr(sys.modules.get(name), "__file__", None) or (spec and spec.origin)
    return Path(origin) if origin and os.path.isfile(origin) else None


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names of modules that a source may import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))
