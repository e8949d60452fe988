"""Processes end with the process that started them, and with the command of their sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fedbench.multirun.parent_watch import is_running

# A child of a child reports its process id and then waits; its parents end as told.
TREE = """
import os, subprocess, sys, time
from fedbench.multirun.parent_watch import exit_with_parent
if sys.argv[1] == "leaf":
    exit_with_parent(int(sys.argv[2]))
    print(os.getpid(), flush=True)
    time.sleep(600)
elif sys.argv[1] == "middle":  # as the controller of submitit: it lives on
    subprocess.Popen([sys.executable, "-c", sys.argv[3], "leaf", *sys.argv[2:]]).wait()
else:
    middle = [sys.executable, "-c", sys.argv[2], "middle", str(os.getpid()), sys.argv[2]]
    subprocess.Popen(middle).wait()
"""
# A forked child, whose parent has ended before it asks.
LATE = """
import multiprocessing, os, time
def child():
    while os.getppid() == PARENT:
        time.sleep(0.01)
    from fedbench.multirun.parent_watch import exit_with_parent
    exit_with_parent()
    time.sleep(600)
PARENT = os.getpid()
multiprocessing.get_context("fork").Process(target=child).start()
os._exit(0)
"""


def test_a_process_ends_with_the_command_although_its_parent_lives() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TREE, "top", TREE], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    leaf = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        rest, _ = process.communicate(timeout=60)  # until all have closed stdout
    finally:
        if is_running(leaf):
            os.kill(leaf, signal.SIGKILL)
    assert rest == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_process_ends_although_its_parent_ended_first() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0
