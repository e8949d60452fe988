"""A W&B run has every round exactly once, however the run was interrupted and tracked.

W&B really runs. It talks to a server on this machine that stores history as W&B's own does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from end_to_end import rounds, run_folders, start, succeed, wait
from wandb_records import record, stored, track, wait_until_gone
from wandb_server import WandbServer

TESTS = Path(__file__).parents[1]
RUN = "table3-4f2a"
N_ROUNDS = 6

pytestmark = pytest.mark.usefixtures("logged_out")


def script(body: str) -> list[str]:
    head = f"""
        import os, signal, sys, threading, time
        from pathlib import Path
        sys.path.insert(0, {str(TESTS)!r})
        from fedbench.tracking.trackers import Wandb
        from wandb_records import SUMMARY, info, record
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)]


def killed(directory: Path, mode: str, n_earlier: int, n_rounds: int) -> None:
    """A session whose process is killed in the middle of a round, perhaps before W&B wrote any."""
    body = f"""
        run = info(Path({str(directory)!r}), n_earlier={n_earlier})
        session = Wandb(mode={mode!r}).open(run, print)
        for index in range({n_earlier}, {n_rounds}):
            session.round(record(index))
        while not session.address:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(script(body), cwd=TESTS.parent, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def sync(directory: Path) -> None:
    folders = sorted(directory.glob("wandb/offline-run-*"))
    command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def assert_complete(server: WandbServer, n_rounds: int = N_ROUNDS) -> None:
    assert [*server.runs] == [RUN]
    run = server.runs[RUN]
    assert run.steps == [*range(n_rounds)]
    assert [row["MA"] for row in run.history] == [record(index)["MA"] for index in run.steps]
    assert (run.summary["status"], run.exit_code) == ("finished", 0)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["online", "offline"])
@pytest.mark.parametrize("second", ["online", "offline"])
def test_a_resumed_run_has_every_round_once(
    first: str, second: str, server: WandbServer, tmp_path: Path
) -> None:
    killed(tmp_path, first, 0, 4)
    track(tmp_path, range(3, N_ROUNDS), settings={"mode": second}, n_earlier=3)
    assert len(stored(tmp_path)) == 1, "the complete folder replaces the earlier one"
    if second == "offline":
        sync(tmp_path)
    assert_complete(server)
    table = stored(tmp_path)[0].summary["clients"]
    assert table["nrows"] == 2 * N_ROUNDS


@pytest.mark.slow
def test_an_earlier_folder_stays_until_another_one_is_complete(tmp_path: Path) -> None:
    track(tmp_path, range(4), {"status": "failed"}, {"mode": "offline"})
    (complete,) = tmp_path.glob("wandb/offline-run-*")
    killed(tmp_path, "offline", 3, 4)
    assert len(stored(tmp_path)) == 2
    assert complete.exists()
    track(tmp_path, range(4, 5), settings={"mode": "offline"}, n_earlier=4)
    (run,) = stored(tmp_path)
    assert [row["_step"] for row in run.history] == [0, 1, 2, 3, 4]


def test_a_run_whose_upload_was_lost_in_part_is_repaired(
    server: WandbServer, tmp_path: Path
) -> None:
    track(tmp_path, [0, 1, 4, 5])
    assert server.runs[RUN].steps == [0, 1, 4, 5]
    track(tmp_path, range(5, N_ROUNDS), n_earlier=5)
    assert_complete(server)


def test_everything_reaches_the_server(server: WandbServer, tmp_path: Path) -> None:
    assert track(tmp_path) == [f"wandb: online, {server.url}/tester/fedbench/runs/{RUN}"]
    run = server.runs[RUN]
    assert (run.name, run.group, run.tags) == ("krum pmr=0.2", "table3", ["krum", "dba"])
    assert (run.config["defense"], run.config["defense__f"]) == ("krum", None)
    first = run.history[0]
    assert not [name for name in first if name.startswith("score/")]
    for kind, score in (("malicious", 3.5), ("benign", 8.5)):
        histogram = first[f"scores/{kind}"]
        assert (histogram["_type"], sum(histogram["values"])) == ("histogram", 1)
        assert (histogram["bins"][0], histogram["bins"][-1]) == (3.5, 8.5), score
    assert run.summary["clients"]["nrows"] == 4
    assert any(name.startswith("media/table/clients") for name in run.files)


def test_a_sweep_is_announced_by_its_folder_and_group(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two runs say is the same, so that it can be said once."""
    both = [track(tmp_path / run, run_id=run, in_sweep=True) for run in "ab"]
    assert both == [[f"wandb: online, {server.url}/tester/fedbench, group table3"]] * 2
    monkeypatch.setenv("WANDB_MODE", "offline")
    both = [track(tmp_path / run, run_id=run, in_sweep=True) for run in "ab"]
    later = f"python -m fedbench.upload {tmp_path} sends the runs later"
    assert both == [[f"wandb: offline; {later}"]] * 2


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_an_upload(server: WandbServer, tmp_path: Path) -> None:
    """`finish_timeout` is far longer than the test may take."""
    body = f"""
        say = lambda line: print(line, flush=True)
        session = Wandb(finish_timeout=3600).open(info(Path({str(tmp_path)!r})), say)
        while not session.address:
            time.sleep(0.01)
        input()
        say(session.service.pid)
        session.round(record(0))
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            session.finish(SUMMARY)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    said = tmp_path / "said"  # a file: W&B's service would keep a pipe open
    with (
        said.open("w") as out,
        subprocess.Popen(
            script(body), cwd=TESTS.parent, stdin=subprocess.PIPE, stdout=out, text=True
        ) as process,
    ):
        while not said.read_text() and process.poll() is None:
            time.sleep(0.02)
        server.down = True
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(120) == 130
    _, service, line = said.read_text().splitlines()
    assert line.startswith("wandb: interrupted; ")
    wait_until_gone(int(service))


@pytest.mark.slow
def test_a_killed_sweep_is_complete_in_wandb_and_says_so_once(
    server: WandbServer, tmp_path: Path
) -> None:
    command = ["-m", "defense=krum,median,fedavg", "rounds=8", "tracker=wandb", "name=pilot"]
    names = ("WANDB_BASE_URL", "WANDB_API_KEY", "HOME", "NETRC")
    env = {name: os.environ[name] for name in names}
    process = start(*command, cwd=tmp_path, env=env)
    out = tmp_path / "runs"
    while not any(len(rounds(folder)) >= 3 for folder in begun(out)) and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    wait(process)
    with TemporaryDirectory() as temporary:
        ended = succeed(*command, cwd=tmp_path, env=env | {"TMPDIR": temporary})
        assert not [path for path in Path(temporary).rglob("*") if "inductor" not in str(path)]
    said = [line for line in ended.out if "wandb" in line]
    assert said == [f"wandb: online, {server.url}/tester/fedbench, group pilot"]
    assert len(server.runs) == 3
    for folder in run_folders(out):
        run = server.runs[f"pilot-{folder.name}"]
        assert run.steps == [*range(8)]
        assert [row["MA"] for row in run.history] == [line["MA"] for line in rounds(folder)]
        assert run.exit_code == 0
        assert len([*folder.glob("wandb/*run-*")]) == 1


def begun(out: Path) -> list[Path]:
    return [path.parent for path in out.glob("*/*/rounds.jsonl")]
