"""Helpers for end-to-end tests: start fedbench as a user does, read what a run leaves on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import preloaded
import torch
from torch import Tensor

from fedbench.__main__ import main

ROOT = Path(__file__).parent.parent
# Settings for a run of a second or two, apart from the start-up.
SMALL = {
    "tracker": "none",
    "n_clients": "6",
    "rounds": "3",
    "pretrain_rounds": "1",
    "local_epochs": "1",
}
# Files of a finished run.
RUN_FILES = [
    ".lock",
    "checkpoint.pt",
    "config.yaml",
    "origin.json",
    "partition.png",
    "rounds.jsonl",
    "summary.json",
]
CONFIGS = "[fedbench.configs]\ntheirs = theirs_conf\n"  # entry point of `install`'s configs
TIMEOUT = 240.0  # seconds; generous, as the machine may be busy


@dataclass(frozen=True)
class Ended:
    """Exit code and output lines of a process."""

    code: int
    out: list[str]
    err: list[str]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables that affect fedbench, with ROOT importable."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HYDRA_", "FEDBENCH_", "WANDB_", "PYTHON"))
        and key not in ("FORCE_COLOR", "COLUMNS")
    }
    return kept | {"PYTHONPATH": str(ROOT)} | dict(extra or {})


@contextlib.contextmanager
def imports_undone(folder: Path) -> Iterator[None]:
    """Forget modules that are imported from a folder, and restore `sys.path`."""
    before = {*sys.modules}
    with mock.patch.object(sys, "path", [*sys.path]):
        yield
    for name in {*sys.modules} - before:
        if str(folder) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


def with_small(overrides: Sequence[str]) -> list[str]:
    """Add the SMALL settings that `overrides` do not set."""
    named = {override.partition("=")[0] for override in overrides}
    return [*overrides, *(f"{key}={value}" for key, value in SMALL.items() if key not in named)]


def start(
    *overrides: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `python -m fedbench` with SMALL settings, unless `overrides` set them."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedbench", *with_small(overrides)],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal can reach all its processes, as from a terminal
    )


def wait(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout:g} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out.splitlines(), err.splitlines())


def fedbench(
    *overrides: str,
    cwd: Path,
    timeout: float = TIMEOUT,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run `python -m fedbench` to its end, without the seconds of its imports if that is possible.

    The line that announces them is then missing; `wait(start(...))` shows it.
    """
    if not preloaded.is_possible("fedbench", cwd, env or {}):
        return wait(start(*overrides, cwd=cwd, env=env), timeout)
    ended = preloaded.run("fedbench", with_small(overrides), cwd, environment(env), timeout)
    return Ended(ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines())


def fedbench_in_this_process(
    *overrides: str, cwd: Path, env: Mapping[str, str] | None = None
) -> Ended:
    """Call what `python -m fedbench` calls: saves the imports where no process is needed.

    A sweep must use `hydra/launcher=basic`, as worker processes would outlive the call.
    """
    out, err = io.StringIO(), io.StringIO()
    code: str | int | None = 0
    n_threads = torch.get_num_threads()
    with (
        mock.patch.object(sys, "argv", ["fedbench", *with_small(overrides)]),
        mock.patch.dict(os.environ, environment(env), clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            torch.set_num_threads(n_threads)  # a run sets its own
    if isinstance(code, str):  # the interpreter would print it
        err.write(f"{code}\n")
        code = 1
    return Ended(code or 0, out.getvalue().splitlines(), err.getvalue().splitlines())


def succeed(*overrides: str, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run `python -m fedbench`, which must succeed and print nothing to stderr."""
    ended = fedbench(*overrides, cwd=cwd, env=env)
    assert (ended.code, ended.err) == (0, []), ended
    return ended


@dataclass(frozen=True)
class Plugins:
    """An installed distribution of plugins: the environment and the override to use it."""

    env: dict[str, str]
    searchpath: str


def install(folder: Path, entry_points: str, module: str, configs: Mapping[str, str]) -> Plugins:
    """Install a module `theirs` and its configs into `folder` as pip would.

    Commands find the configs through `searchpath`, or if `entry_points` has CONFIGS.
    """
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    (folder / "theirs.py").write_text(module)
    for name, text in configs.items():
        path = folder / "theirs_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return Plugins({"PYTHONPATH": path}, f"hydra.searchpath=[file://{folder}/theirs_conf]")


def files(folder: Path) -> list[str]:
    """Return every file and folder below `folder`, including hidden ones."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/*/config.yaml"))


def run_folder(out: Path) -> Path:
    (folder,) = run_folders(out)
    return folder


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def result(folder: Path) -> dict[str, Any]:
    """Return the complete result of a run, to the bit, without its times."""
    return {
        "rounds": [json.dumps(_timeless(record)) for record in rounds(folder)],
        "summary": json.dumps(_timeless(_measured(summary(folder)))),
        "checkpoint": fingerprint(checkpoint(folder / "checkpoint.pt")),
    }


def fingerprint(value: Any) -> Any:
    """Replace tensors by hashes, so that == compares bits and failures are readable."""
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        return f"{value.dtype} {tuple(value.shape)} {digest}"
    if isinstance(value, dict):
        return {key: fingerprint(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(item) for item in value]
    return value


def _measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what the summary says about the command, the machine and its times."""
    origin = ("command", "git", "fedbench_git", "fedbench_code", "processor", "processes")
    origin += ("last_check", "check")
    return {key: value for key, value in record.items() if key not in origin}


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith(("seconds", "check"))}
