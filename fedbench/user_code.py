"""Import the user's own classes and functions, and call them with arguments from the command line.

A path is dotted, `my_package.my_module.Net`, or names a file, `nets/my_net.py:Net`. Both are found
from the working folder. A file is imported under its own name with its folder on `sys.path`, as
Python does for a script: it can import its sibling modules, and its classes can be pickled into
other processes.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbench.errors import UserError, failure, is_of_library, nearest

IsWanted = Callable[[type], bool]

IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

_folders: set[Path] = set()  # that files were imported from


@dataclass(frozen=True)
class UserCode:
    """A class or function of the user's, and the arguments to call it with."""

    key: str  # setting that names it, such as model.target
    path: str
    arguments: Mapping[str, Any]
    example: str  # a name for error messages, such as Net

    def load(
        self, what: str, is_wanted: IsWanted, may_return: IsWanted | None = None
    ) -> Callable[..., Any]:
        """Import it and check, before it is called, that it makes what the setting is for.

        That is a class that `is_wanted` accepts, or a function. A function of Python or of an
        installed package could do anything: its annotation must say that it returns such a class,
        or one that `may_return` accepts.
        """
        found = self._import()[1]
        if isinstance(found, type):
            if not is_wanted(found):
                raise self._error(f"must be a function or {what}, got the class {found.__name__}")
            return found
        function = inspect.unwrap(found) if callable(found) else found
        if not inspect.isroutine(function):
            got = f"an object of type {type(found).__name__}"
            raise self._error(f"must be a function or {what}, got {got}")
        returned = _returned(function)
        if not is_users(function) and not (returned and (may_return or is_wanted)(returned)):
            name = self._name_of(found)
            raise self._error(
                f"{name} belongs to a package, and no annotation says that it makes {what}; "
                "call it in a function of your own"
            )
        return found  # type: ignore[no-any-return]

    def modules(self) -> list[ModuleType]:
        """The module that `path` names and, if that has imported it, the one that defines it."""
        home, loaded = self._import()
        modules = [home, sys.modules.get(getattr(loaded, "__module__", ""))]
        return [module for module in modules if isinstance(module, ModuleType)]

    def _import(self) -> tuple[Any, Any]:
        """Return the module, or the class in a module, that holds it, and itself."""
        _put_first(Path.cwd())  # console scripts and notebooks may not have it
        if match := IN_FILE.fullmatch(self.path):
            home, name = match["file"], match["name"]
            module = self._import_file(absolute(home))
        elif self.path.endswith(".py") and (file := absolute(self.path)).is_file():
            names = _defined(self._import_file(file)) or [self.example]
            raise self._error(f"must name what to use, {self.path}:{names[0]}", names[1:])
        elif DOTTED.fullmatch(self.path):
            home, _, name = self.path.rpartition(".")
            module = self._import_dotted(home)
        else:
            raise self._error(
                f"must be my_package.my_module.{self.example} or path/to/file.py:{self.example}"
            )
        if not hasattr(module, name):
            own = _defined(module)
            near = _did_you_mean(name, vars(module)) if len(own) < 2 else nearest(name, own)
            raise self._error(f"{home} has no {name}{near}")
        return module, getattr(module, name)

    def check_arguments(self, function: Callable[..., Any]) -> None:
        """Raise a UserError for an argument that `function` does not have."""
        parameters = _parameters(function)
        if parameters is None:
            return
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        named = _named(parameters)
        for name, value in self.arguments.items():
            if name not in named:
                raise UserError(
                    f"{self._group}.arguments.{name}={value}: {self._name_of(function)} has no "
                    f"such argument{nearest(str(name), named)}"
                )

    def call(self, function: Callable[..., Any], **offered: Any) -> Any:
        """Call `function` with the arguments, and with those `offered` that it names.

        An exception of the user's code becomes a UserError.
        """
        self.check_arguments(function)
        parameters = _parameters(function) or {}
        named = _named(parameters)
        given = {key: value for key, value in offered.items() if key in named}
        given |= self.arguments
        required = [k for k in named if parameters[k].default is inspect.Parameter.empty]
        if missing := [name for name in required if name not in given]:
            settings = " ".join(f"{self._group}.arguments.{name}=..." for name in missing)
            name = self._name_of(function)
            raise self._error(f"{name} needs {', '.join(missing)}; set {settings}")
        return self.guarded(function, **given)

    def guarded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the user's code; turn its exceptions into UserErrors."""
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            raise self._error(failure(error)) from error

    @property
    def _group(self) -> str:
        return self.key.partition(".")[0]

    def _name_of(self, function: Callable[..., Any]) -> str:
        return getattr(function, "__name__", self.path)

    def _error(self, reason: str, others: Iterable[str] = ()) -> UserError:
        others = ", ".join(others)
        return UserError(f"{self.key}={self.path}: {reason}" + (others and f" (or {others})"))

    def _import_file(self, path: Path) -> Any:
        if not path.is_file():
            files = (file.name for file in path.parent.glob("*.py"))
            raise self._error(f"no file {path}{_did_you_mean(path.name, files)}")
        root, names = path.parent, [path.stem]
        while (root / "__init__.py").is_file():  # relative imports need the package's name
            names.insert(0, root.name)
            root = root.parent
        for folder in (path.parent, root):
            _forget_namesakes(folder)
            _put_first(folder)
            _folders.add(folder)
        name = ".".join(names)
        module = self.guarded(importlib.import_module, name)
        file = getattr(module, "__file__", None)
        if file is None or not os.path.samefile(file, path):
            other = file or "a built-in module"
            raise self._error(f"must have another name, {name} is also the name of {other}")
        return module

    def _import_dotted(self, name: str) -> Any:
        """Import a module, or return a class in a module."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name != missing and not name.startswith(f"{missing}."):
                raise self._error(failure(error)) from error  # an import in the user's module
            outer, _, inner = name.rpartition(".")
            if missing == name and outer and hasattr(importlib.import_module(outer), inner):
                return getattr(importlib.import_module(outer), inner)
            *folders, stem = missing.split(".")
            near = _did_you_mean(stem, _importable(Path(*folders)))
            raise self._error(f"no module {missing} in {Path.cwd()} or installed{near}") from error
        except Exception as error:
            raise self._error(failure(error)) from error


def absolute(path: str) -> Path:
    """Return an absolute path; `~` is the home folder."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _forget_namesakes(folder: Path) -> None:
    """Unload modules from other targets' folders that `folder` has, too.

    Without this, `a/net.py` and `b/net.py` would be one module in a process that uses both.
    """
    others = _folders - {folder}
    tops = {name.partition(".")[0] for name in sys.modules}
    stale = {
        top
        for top in tops
        if _origin(sys.modules.get(top)) in others
        and ((folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file())
    }
    for name in [*sys.modules]:
        if name.partition(".")[0] in stale:
            del sys.modules[name]


def _origin(module: Any) -> Path | None:
    """Return the folder of `sys.path` that a top-level module was found in."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file)
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _put_first(folder: Path) -> None:
    """Make `folder` the first to be searched for modules."""
    with suppress(ValueError):
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the user may have written the file a moment ago


def _importable(folder: Path) -> list[str]:
    """Return the names of modules and packages in a folder."""
    return [p.stem for p in folder.glob("*.py")] + [
        p.parent.name for p in folder.glob("*/__init__.py")
    ]


def _defined(module: Any) -> list[str]:
    """Return the public classes and functions that a module defines itself."""
    own = getattr(module, "__name__", None)
    found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return [k for k, v in found.items() if callable(v) and getattr(v, "__module__", None) == own]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters by name; None for built-ins without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def is_users(function: Callable[..., Any]) -> bool:
    """Whether a function is defined in the user's own files, not in Python or a package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return file is not None and not is_of_library(Path(file))


def _returned(function: Callable[..., Any]) -> type | None:
    """Return the class that the annotation of a function names as its result."""
    try:
        hint = typing.get_type_hints(function).get("return")
    except Exception:  # names that exist for type checkers only
        return None
    made = typing.get_origin(hint) or hint
    return made if isinstance(made, type) else None


def _named(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the parameters that can be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]
