"""The fork server of a sweep ends with the command, even in the middle of its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from end_to_end import succeed

from fedbench.multirun import worker_pool
from fedbench.multirun.scratch import ScratchFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")

# A worker stops the server, which then cannot end by itself, and reports the server's process id.
COMMAND = """
import multiprocessing
import os
import signal

from fedbench.multirun import worker_pool


def stop_server(report):
    os.kill(os.getppid(), signal.SIGSTOP)
    report.send(os.getppid())


if __name__ == "__main__":
    worker_pool.PRELOADED[1:] = []  # torch is not needed here
    worker_pool.WorkerPool()
    reports, report = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    context.Process(target=stop_server, args=[report]).start()
    print(reports.recv(), flush=True)
    {ending}
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """Return a temporary folder with a path that is short enough for sockets."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


# The server forks a worker, which waits: nobody has given it a run yet.
IDLE_WORKER = """
import multiprocessing
import os
import time

from fedbench.multirun import worker_pool


def wait(report):
    report.send(os.getpid())
    time.sleep(600)


if __name__ == "__main__":
    worker_pool.PRELOADED[1:] = []
    worker_pool.WorkerPool()
    reports, report = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("forkserver").Process(target=wait, args=[report]).start()
    print(reports.recv(), flush=True)
    {ending}
"""


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_server_does_not_outlive_the_command(ending: str, tmp_path: Path) -> None:
    """Otherwise it keeps stdout open, and a pipe like `fedbench -m ... | tee log` hangs."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND.format(ending=ending))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server = int(process.stdout.readline())
    try:
        rest, _ = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    assert rest == ""


def test_an_idle_worker_does_not_outlive_the_command(tmp_path: Path, short: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(IDLE_WORKER.replace("{ending}", "os.kill(os.getpid(), 9)"))
    env = {**os.environ, "TMPDIR": str(short)}
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        rest, _ = process.communicate(timeout=60)  # until the worker closes its end
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert rest == ""
    assert len([*short.iterdir()]) == 1
    ScratchFolder(short, "fedtmp-").remove()
    assert [*short.iterdir()] == [], "the next sweep removes what a killed one left"


def test_the_server_is_set_up_before_its_slow_imports() -> None:
    assert worker_pool.PRELOADED[0] == "fedbench.multirun.fork_server"


# A worker creates a semaphore and is killed, as at the end of a sweep.
KILLED_WORKER = """
import multiprocessing
import os
import signal

from fedbench.multirun import worker_pool


def hold_semaphore():
    lock = multiprocessing.get_context("spawn").Lock()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    worker_pool.PRELOADED[1:] = []
    worker_pool.WorkerPool()
    worker = multiprocessing.get_context("forkserver").Process(target=hold_semaphore)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


def test_killed_workers_cause_no_warning_about_semaphores(tmp_path: Path, short: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(KILLED_WORKER)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TMPDIR": str(short)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGKILL}\n", "")
    assert [*short.iterdir()] == [], "the folder of the sweep is removed at exit"


# A worker, and a process that it forks, report their garbage collector.
COLLECTED = """
import gc
import multiprocessing

from fedbench.multirun import worker_pool


def tell(report, again):
    report.send((gc.isenabled(), gc.get_freeze_count()))
    if again:
        child = multiprocessing.get_context("fork").Process(target=tell, args=[report, False])
        child.start()
        child.join()


if __name__ == "__main__":
    worker_pool.PRELOADED[1:] = []
    worker_pool.WorkerPool()
    reports, report = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    context.Process(target=tell, args=[report, True]).start()
    worker, child = reports.recv(), reports.recv()
    assert worker[0] and child[0], "the collector works"
    assert worker[1] == child[1] > 1000, "only what the server has imported is frozen"
"""


def test_workers_collect_garbage_but_not_what_they_share(tmp_path: Path, short: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(COLLECTED)
    env = {**os.environ, "TMPDIR": str(short)}
    subprocess.run([sys.executable, script], env=env, check=True, timeout=60)


@pytest.mark.slow
def test_a_sweep_works_with_a_temporary_folder_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    sweep = ["-m", "defense=krum,median", "rounds=1", "hydra.launcher.n_jobs=2"]
    succeed(*sweep, cwd=tmp_path, env={"TMPDIR": str(folder)})
