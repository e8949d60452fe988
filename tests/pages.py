"""Helpers for tests of documentation pages: their commands and the files that they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import preloaded

from fedbench.command_line import COMMANDS


def commands(page: Path, module: str = "fedbench") -> list[str]:
    """The lines of shell blocks that start a Python module, whatever the interpreter."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [match[0] for line in lines if (match := re.search(rf"-m {module}\b.*", line))]


def is_plain_run(command: str) -> bool:
    """Whether a command is a single run that needs no process of its own."""
    first, *rest = shlex.split(command, comments=True)[1:]
    return first == "fedbench" and not any(
        word.startswith(("-", "executor.devices")) or word in COMMANDS for word in rest
    )


def is_sweep(command: str) -> bool:
    """Whether a command runs a sweep."""
    first, second, *_ = shlex.split(command, comments=True)[1:]
    return first == "fedbench" and second in ("-m", "--config-dir")


def run(
    command: str, cwd: Path, *extra: str, path: str = "", timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run a command of Python, without the seconds of its imports if that is possible."""
    words = [*shlex.split(command, comments=True), *extra]
    env = {**os.environ, "PYTHONPATH": path}
    if words[0] == "-m" and preloaded.is_possible(words[1], cwd, {"PYTHONPATH": path}):
        return preloaded.run(words[1], words[2:], cwd, env, timeout)
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def titled_blocks(page: Path) -> list[tuple[str, str]]:
    """The title and the text of every code block that has a title: the name of a file."""
    pattern = r'^```\w+ title="([^"]+)"\n(.*?)^```'
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


def write_titled_blocks(page: Path, root: Path) -> list[str]:
    """Writes every code block that has a title to the file of that name."""
    blocks = titled_blocks(page)
    for name, text in blocks:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return [name for name, _ in blocks]
