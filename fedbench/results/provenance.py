"""Where a result comes from: command, git commits, versions, processor, threads."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fedbench
from fedbench.errors import INSTALLED

# Environment variables that the command sets for its processes:
COMMAND = "FEDBENCH_COMMAND"  # as typed
STARTED = "FEDBENCH_STARTED"  # when, in seconds since 1970
INTERNAL = "+hydra.callbacks.sweep.listing="  # argument that the Python API adds

PACKAGE = Path(fedbench.__file__).parent
PLUGIN_FOLDERS = ("attacks", "backdoors", "conf", "defenses")  # inside the package in a wheel
_imported_at = time.time()


def announce_command(arguments: Sequence[str]) -> None:
    """Tell all processes of this command what was typed, and when; `arguments` as in sys.argv."""
    typed = [word for word in arguments[1:] if not word.startswith(INTERNAL)]
    as_module = Path(arguments[0]).name == "__main__.py"
    program = ["python", "-m", "fedbench"] if as_module else [Path(arguments[0]).name]
    os.environ[COMMAND] = shlex.join([*program, *typed])
    os.environ[STARTED] = str(time.time())


def started_at() -> float:
    """When the command started, or this process if it belongs to none."""
    return float(os.environ.get(STARTED, _imported_at))


def provenance(n_processes: int | None = None, threads: int | None = None) -> dict[str, Any]:
    """What summary.json says about the origin of a result; `threads` are those of a process."""
    return {
        "command": os.environ.get(COMMAND),
        "git": git_state(Path.cwd()),
        "fedbench_git": git_state(PACKAGE) if INSTALLED.isdisjoint(PACKAGE.parts) else None,
        "fedbench_code": code_of_fedbench(),
        "versions": versions(),
        "processor": processor(),
        "processes": n_processes,
        "threads": threads,
    }


def versions() -> dict[str, str]:
    """Versions of fedbench, Python and the libraries that compute the results."""
    packages = ("torch", "lightning", "numpy", "scipy")
    own = {"fedbench": fedbench.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def processor() -> str:
    """Name of the CPU, the vector instructions that torch uses, and the GPUs."""
    import torch  # takes seconds

    name = platform.processor() or platform.machine()
    with suppress(OSError):  # Linux only
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    parts = [f"{name} ({torch.backends.cpu.get_cpu_capability()})"]
    with suppress(Exception):  # from a broken driver, which must not fail a run on the CPU
        parts += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(parts)


@cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around `folder`, and whether files differ from it.

    New files count if they are Python code. None without git or a repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    new = _git(folder, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    return {"commit": commit, "dirty": bool(changed or new)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def has_changed_since(summary: Mapping[str, Any]) -> bool:
    """Whether fedbench's own code is not the code that computed a result."""
    return summary.get("fedbench_code") not in (None, code_of_fedbench())


@cache
def code_of_fedbench() -> str:
    """Digest of fedbench's own files without plugins, which are part of the run id."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in PLUGIN_FOLDERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
