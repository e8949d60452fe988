"""fedbench: which defense stops which backdoor in federated learning, and at what cost.

The public Python API is what `__all__` lists. Its names are imported on first use, so that
`import fedbench` takes no time.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` returns
    from fedbench.api import FinishedRun, run, sweep
    from fedbench.errors import UserError
    from fedbench.results.frames import load, load_clients, load_rounds
    from fedbench.server import Server, aggregate

__version__ = "0.1.0"

__all__ = [
    "FinishedRun",
    "Server",
    "UserError",
    "aggregate",
    "load",
    "load_clients",
    "load_rounds",
    "run",
    "sweep",
]

_MODULES = {
    "fedbench.api": ("FinishedRun", "run", "sweep"),
    "fedbench.errors": ("UserError",),
    "fedbench.results.frames": ("load", "load_clients", "load_rounds"),
    "fedbench.server": ("Server", "aggregate"),
}

# In a clone, `defenses/`, `attacks/`, `backdoors/` and `conf/` are next to this package; in a wheel
# they are inside it.
if not (Path(__file__).parent / "defenses").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
