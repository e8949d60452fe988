"""Runs fedbench in a forked process: like `python -m fedbench`, without seconds of imports.

A server, one for each process of pytest, imports what runs need. It forks a process for every
command, with the command's own session, arguments, environment, working folder and output, and
with interpreter exit as usual. The server never runs anything else, so every command starts clean.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path

from fedbench.collector import fast_imports

ROOT = Path(__file__).parent.parent
LONGEST_REQUEST = 200_000  # bytes; a socket takes little more at once
MOST_DIGITS = 32
PRELOADED = ["fedbench.single_run", "fedbench.federation", "fedbench.engine.launch"]


def is_possible(module: str, cwd: Path, env: Mapping[str, str]) -> bool:
    """Whether Python would start the same code, and nothing in the environment counts for imports.

    `env` has the variables that differ from those of this process.
    """
    folders = [cwd, *map(Path, env.get("PYTHONPATH", "").split(os.pathsep))]
    return (
        sys.platform == "linux"  # elsewhere, forks are not safe
        and module.partition(".")[0] in ("fedbench", "benchmarks")
        and {*env} <= {"PYTHONPATH"}
        and not any((folder / "sitecustomize.py").exists() for folder in folders)
        and (cwd == ROOT or not (cwd / "fedbench").exists())
    )


def run(
    module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m module` does, until no process can write to the output any more.

    Kill it after `timeout` seconds, and raise TimeoutExpired.
    """
    began = time.monotonic()
    server = _server()
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    request = json.dumps([module, [*arguments], str(cwd), dict(env)]).encode()
    socket.send_fds(server, [request], [to_out, to_err])
    os.close(to_out)
    os.close(to_err)
    process = int(server.recv(MOST_DIGITS))
    late = threading.Timer(timeout, os.killpg, [process, signal.SIGKILL])
    late.start()
    with ThreadPoolExecutor(1) as reader:
        errors = reader.submit(_read, err)
        output = _read(out)
    code = int(server.recv(MOST_DIGITS))
    late.cancel()
    words = [module, *arguments]
    if time.monotonic() - began >= timeout:
        raise subprocess.TimeoutExpired(words, timeout, output, errors.result())
    return subprocess.CompletedProcess(words, code, output, errors.result())


def _read(end: int) -> str:
    with open(end) as lines:
        return lines.read()


@cache
def _server() -> socket.socket:
    """Start the server; it ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # -P: the folder of this file is not on the path of `python -m fedbench`.
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as commands have; Python could seek in /dev/null
            stderr=subprocess.PIPE,
        )
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _serve(requests: socket.socket) -> str:
    """Fork a process for each request, and return its module there; the server never returns."""
    while True:
        request, ends, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 2)
        if not request:
            sys.exit()
        process = os.fork()
        if process == 0:
            requests.close()
            module, *rest = json.loads(request)
            _become(*rest, *ends)
            return module
        for end in ends:
            os.close(end)
        requests.send(str(process).encode())
        _, status = os.waitpid(process, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(arguments: list[str], cwd: str, env: dict[str, str], out: int, err: int) -> None:
    """Give the forked process what a started one gets."""
    os.setsid()
    for end, standard in ((out, 1), (err, 2)):
        os.dup2(end, standard)
        os.close(end)
    before = os.environ["PYTHONPATH"].split(os.pathsep)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    folders = [folder for folder in env["PYTHONPATH"].split(os.pathsep) if folder]
    sys.path[:] = [cwd, *folders, *(folder for folder in sys.path if folder not in before)]
    sys.argv[1:] = arguments  # the first is set by runpy


if __name__ == "__main__":
    with fast_imports():
        for module in PRELOADED:
            import_module(module)
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(asked, run_name="__main__", alter_sys=True)
