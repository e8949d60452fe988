"""Which plugins are fedbench's own: installed ones and experiments must not break the tests."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import fedbench
from fedbench.registry import Registry, find_plugins

ROOT = Path(fedbench.__file__).parent.parent
TESTS = Path(__file__).parent


@cache
def shipped(registry: Registry[Any]) -> list[str]:
    """Names of the plugins whose files are in this clone or package.

    Plugins of other packages are not even imported. They may be installed below this folder, in a
    virtual environment.
    """
    found = find_plugins(registry.kind, *registry.homes)
    names = [n for n in registry.names() if n not in found or found[n].dist is None]
    files = {name: Path(inspect.getfile(registry.get(name))) for name in names}
    return [name for name, file in files.items() if file.resolve().is_relative_to(ROOT.resolve())]


def published(registry: Registry[Any]) -> list[str]:
    """Names of the shipped plugins that must follow the house rules: those with a test file.

    A defense, an attack or a backdoor that somebody tries out in a clone has none.
    """
    if registry.kind not in ("defense", "attack", "backdoor"):
        return shipped(registry)
    folder = TESTS / f"{registry.kind}s"
    return [name for name in shipped(registry) if (folder / f"test_{name}.py").exists()]
