"""The fork server of a sweep ends with the command, even in the middle of its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from end_to_end import succeed

from fedbench.multirun import worker_pool

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
    worker_pool.prepare()
    reports, report = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    context.Process(target=stop_server, args=[report]).start()
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
    worker_pool.prepare()
    worker = multiprocessing.get_context("forkserver").Process(target=hold_semaphore)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


def test_killed_workers_cause_no_warning_about_semaphores(tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(KILLED_WORKER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{-signal.SIGKILL}\n", "")


@pytest.mark.slow
def test_a_sweep_works_with_a_temporary_folder_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    sweep = ["-m", "defense=krum,median", "rounds=1", "hydra.launcher.n_jobs=2"]
    succeed(*sweep, cwd=tmp_path, env={"TMPDIR": str(folder)})
