"""Registry: plugin classes by name, found by file name, by entry point or in a given module."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedbench.errors import UserError, expected, failure, first_line, nearest

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Plugins of one kind, each imported on first use.

    `homes` are the places to look: a package with one module per plugin (`fedbench.defenses`) or
    modules with several plugins each (`fedbench.models`). A folder of the same name in the working
    folder (`defenses/`) adds modules to a package. Other distributions add plugins through entry
    points in the group `fedbench.<kind>s`.
    """

    def __init__(self, kind: str, *homes: str) -> None:
        self.kind = kind
        self.homes = homes
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that registers a plugin under `name`."""

        def add(cls: C) -> C:
            known: type = self._classes.get(name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"two {self.kind}s are called {name}: {known} and {cls}")
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """Return every name that `get` accepts, without importing the plugins of a package."""
        names = {*find_plugins(self.kind, *self.homes), *self._classes}
        return sorted(name for name in names if not name.startswith("_"))

    def get(self, name: str) -> type[T]:
        """Return the plugin class registered under `name`, importing it if necessary."""
        plugins = {} if name in self._classes else find_plugins(self.kind, *self.homes)
        if name not in self._classes:  # `find_plugins` may have imported it
            if name not in plugins:
                raise UserError(f"no {self.kind} is called {name!r}{nearest(name, self.names())}")
            self._check_unique(name)
            self._load(plugins[name])
        return self._classes[name]

    def label(self, plugin: T) -> str:
        """Name a plugin for messages: `defense krum`; by its class if it is not registered."""
        names = [name for name, cls in self._classes.items() if cls is type(plugin)]
        return f"{self.kind} {(names or [type(plugin).__name__])[0]}"

    def _load(self, plugin: EntryPoint) -> None:
        """Import a plugin. Raise a UserError if that fails, or if it has another name."""
        try:
            plugin.load()
        except UserError:
            raise
        except Exception as error:
            for name in self._names_in(plugin.module):  # the rest of the file was not executed
                del self._classes[name]
            raise UserError(f"{self.kind} {plugin.name}: {failure(error)}") from error
        if plugin.name not in self._classes:
            file = getattr(sys.modules[plugin.module], "__file__", plugin.value)
            names = self._names_in(plugin.module)
            found = f"{', '.join(names)}, not {plugin.name}" if names else f"no {self.kind}"
            decorator = f'@{self.kind.upper()}S.register("{plugin.name}")'
            raise UserError(f"{file}: registers {found}; write {decorator}")

    def _names_in(self, module: str) -> list[str]:
        return [name for name, cls in self._classes.items() if cls.__module__ == module]

    def _check_unique(self, name: str) -> None:
        """Raise a UserError if a file of the working folder has the name of a shipped plugin."""
        for home in self.homes:
            folders = getattr(importlib.import_module(home), "__path__", [])
            files = [path for folder in folders if (path := Path(folder, f"{name}.py")).exists()]
            if len(files) > 1:
                raise UserError(
                    f"{files[-1]}: fedbench has a plugin {self.kind}={name}; choose another name"
                )

    def build(self, settings: Mapping[str, Any]) -> T:
        """Build a plugin from its `name` and its dataclass fields.

        A wrong name, key, type or range is a UserError that names the value.
        """
        fields = dict(settings)
        name = fields.pop("name", None)
        if name is None:
            raise UserError(
                f"{self.kind} has no name; its config must say `name: ...`"
                f"{nearest('', self.names())}"
            )
        if not isinstance(name, str):
            raise UserError(f"{self.kind}.name={name}: must be a name{nearest('', self.names())}")
        cls = self.get(name)
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise UserError(f"{self.kind} {name}: {cls.__name__} must define {', '.join(missing)}")
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in fields:
            if key not in known:
                raise UserError(
                    f"{self.kind} {name} has no setting {key!r}{nearest(str(key), known)}"
                )
        built = OmegaConf.structured(cls)
        OmegaConf.set_readonly(built, False)
        for key, value in fields.items():  # one at a time: errors name only the innermost key
            try:
                built = OmegaConf.merge(built, {key: value})
                OmegaConf.to_container(built, resolve=True)
            except OmegaConfBaseException as error:
                given = f"{self.kind}.{key}={value}"
                raise UserError(f"{given}: {expected(given, first_line(error))}") from error
        try:
            return OmegaConf.to_object(built)  # type: ignore[return-value]
        except (ValueError, OverflowError) as error:
            raise UserError(f"{self.kind} {name}: {error}") from error


def find_plugins(kind: str, *homes: str) -> dict[str, EntryPoint]:
    """Import the homes; return what to load by name, a file rather than an entry point."""
    group = f"fedbench.{kind}s"
    found = {point.name: point for point in installed(group)}
    for home in homes:
        for name in _modules(home):
            found[name] = EntryPoint(name, f"{home}.{name}", group)
    return found


def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points that distributions have in a group, by name."""
    folders = []
    for name in sys.path:
        with suppress(OSError):  # no such folder
            folders.append((name, os.stat(name or ".").st_mtime_ns))
    return _entry_points(group, tuple(folders))


@cache
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Read the files of all distributions, which takes milliseconds; again if `folders` change."""
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))


def _modules(home: str) -> list[str]:
    """Names of the public modules of a package."""
    path = getattr(importlib.import_module(home), "__path__", [])
    return [module.name for module in pkgutil.iter_modules(path) if module.name[0] != "_"]


def with_working_folder(path: list[str], package: str) -> list[str]:
    """Extend the `__path__` of a package of plugins by the working folder's `defenses/` etc.

    The package does this itself, so that every process of a run finds the same modules.
    """
    local = Path.cwd() / package.rpartition(".")[2]
    known = {Path(folder).resolve() for folder in path}
    return [*path] if local.resolve() in known or not local.is_dir() else [*path, str(local)]


def require(plugin: object, key: str, valid: bool, rule: str) -> None:
    """Raise ValueError `<key> must be <rule>, got <value>` unless `valid`."""
    if not valid:
        raise ValueError(f"{key} must be {rule}, got {getattr(plugin, key)}")
