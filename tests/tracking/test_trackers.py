"""Trackers: what reaches W&B, and that no failure of W&B stops a run.

W&B really runs, offline or against a closed port of this machine, with an empty home folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from PIL import Image
from wandb_records import KEY, SUMMARY, info, record, stored, track, wait_until_gone

from fedbench.errors import UserError
from fedbench.tracking.trackers import TRACKERS, Wandb
from fedbench.tracking.wandb_session import short_name

ROOT = Path(__file__).parents[2]
GOES_ON = "; the run goes on without it"

pytestmark = pytest.mark.usefixtures("logged_out")


def later(folder: Path) -> str:
    """How the line ends that says what to do about a run which is not in W&B."""
    return f"; python -m fedbench.upload {folder} sends it later"


def test_everything_about_a_run_reaches_wandb(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = track(tmp_path / "run")
    assert said == [f"wandb: offline, not logged in{later(tmp_path / 'run')}"]
    assert capfd.readouterr() == ("", "")
    (run,) = stored(tmp_path / "run")
    assert run.run.project == "fedbench"
    assert run.run.display_name == "krum pmr=0.2"
    assert run.run.run_group == "table3"
    assert sorted(run.run.tags) == ["dba", "krum"]
    assert run.run.run_id == "table3-4f2a"
    assert not run.run.git.commit
    assert run.config["pmr"] == 0.2
    assert (run.config["defense"], run.config["defense__f"]) == ("krum", None)
    for index, row in enumerate(run.history):
        assert row["_step"] == index
        numbers = {k: v for k, v in row.items() if not k.startswith(("_", "scores"))}
        assert numbers == {
            "MA": 0.5 + index / 10,
            "BA": 0.1,
            "TPR": 1.0,
            "TNR": 0.5,
            "AUC": 0.75,
            "pdr": 0.5,
            "norm_ratio": 2.0,
            "cosine": -0.5,
            "benign_cosine": 0.25,
            "seconds/train": 1.0,
            "seconds/aggregate": 0.25,
            "seconds/evaluate": 0.5,
            "n_accepted": 1,
        }
    assert len(run.history) == 2
    assert run.exit_code == 0
    assert {name: run.summary[name] for name in ("status", "MA", "rounds", "seconds")} == {
        "status": "finished",
        "MA": 0.7,
        "rounds": 2,
        "seconds": 3.5,
    }
    table = json.loads((run.files / run.summary["clients"]["path"]).read_text())
    assert table["columns"] == [
        *("round", "client", "malicious", "accepted", "score", "weight", "norm", "cosine")
    ]
    assert table["data"] == [
        [0, 3, True, False, 3.5, 0.0, 0.75, 0.1875],
        [0, 8, False, True, 8.5, 1.0, 2.0, 0.5],
        [1, 3, True, False, 3.5, 0.0, 0.75, 0.1875],
        [1, 8, False, True, 8.5, 1.0, 2.0, 0.5],
    ]


def test_the_summary_has_the_range_of_a_rate_beside_its_value(tmp_path: Path) -> None:
    """Of all rounds, also those of an earlier attempt; `MA` itself remains a number."""
    track(tmp_path, range(1, 3), {"status": "finished", "MA": 0.65}, n_earlier=1)
    (run,) = stored(tmp_path)
    assert (run.summary["MA"], run.summary["MA_min"], run.summary["MA_max"]) == (0.65, 0.5, 0.7)
    assert (run.summary["BA"], run.summary["BA_min"], run.summary["BA_max"]) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("n_earlier", [0, 2])
def test_the_partition_figure_is_logged_with_round_0(tmp_path: Path, n_earlier: int) -> None:
    Image.new("RGB", (7, 5), "red").save(tmp_path / "partition.png")
    assert len(track(tmp_path, range(n_earlier, n_earlier + 2), n_earlier=n_earlier)) == 1
    (run,) = stored(tmp_path)
    assert [row["_step"] for row in run.history] == [*range(n_earlier + 2)]
    row, *later_rows = run.history
    assert (row["partition/_type"], row["partition/width"]) == ("image-file", 7)
    copy = run.files / row["partition/path"]
    assert copy.read_bytes() == (tmp_path / "partition.png").read_bytes()
    assert row["MA"] == 0.5
    assert not [name for late in later_rows for name in late if name.startswith("partition")]


def test_a_run_that_fails_before_round_0_has_its_partition_figure(tmp_path: Path) -> None:
    Image.new("RGB", (7, 5), "red").save(tmp_path / "partition.png")
    track(tmp_path, range(0), {"status": "failed", "error": "no luck"})
    (run,) = stored(tmp_path)
    (row,) = run.history
    assert (run.files / row["partition/path"]).exists()
    assert run.exit_code == 1


def test_a_broken_partition_figure_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "partition.png").write_text("not a picture")
    said = track(tmp_path)
    assert len(said) == 2
    assert "cannot identify image file" in said[1]
    assert said[1].endswith(GOES_ON + later(tmp_path))


def test_values_that_a_round_lacks_are_not_logged(tmp_path: Path) -> None:
    track(tmp_path, judged=False)
    (run,) = stored(tmp_path)
    names = {name for name in run.history[0] if not name.startswith("_")}
    assert names == {"MA", "seconds/train", "seconds/aggregate", "seconds/evaluate"}
    assert "TPR" not in run.summary


def test_runs_of_a_sweep_are_separate_wandb_runs(tmp_path: Path) -> None:
    hooks = sys.exit, sys.excepthook
    track(tmp_path / "a", run_id="a")
    track(tmp_path / "b", range(3), {**SUMMARY, "status": "failed"}, run_id="b")
    (a,), (b,) = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert (a.run.run_id, len(a.history), a.exit_code) == ("table3-a", 2, 0)
    assert (b.run.run_id, len(b.history), b.exit_code) == ("table3-b", 3, 1)
    assert wandb.run is None
    assert "WANDB_SERVICE" not in os.environ
    assert (sys.exit, sys.excepthook) == hooks


def test_a_failing_init_prints_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no\n  luck.")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", broken)
        assert track(tmp_path / "a") == [f"wandb: no luck{GOES_ON}{later(tmp_path / 'a')}"]
    assert len(track(tmp_path / "b")) == 1
    assert len(stored(tmp_path / "b")) == 1


def test_a_failing_table_still_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenTable(wandb.Table):
        def __init__(self, **_: Any) -> None:
            raise RuntimeError("no table")

    monkeypatch.setattr(wandb, "Table", BrokenTable)
    assert track(tmp_path)[1:] == [f"wandb: no table{GOES_ON}{later(tmp_path)}"]
    (run,) = stored(tmp_path)
    assert (run.exit_code, run.summary["MA"]) == (0, 0.7)


def test_a_broken_record_prints_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    session = Wandb().open(info(tmp_path), said.append)
    session.round({"round": 0})
    session.round(record(1))
    session.finish(SUMMARY)
    assert said[1:] == [f"wandb: 'clients'{GOES_ON}{later(tmp_path)}"]


def test_an_unwritable_folder_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = track(tmp_path / "file" / "run")
    assert line.startswith("wandb: ")
    assert str(tmp_path / "file") in line
    assert line.endswith(GOES_ON + later(tmp_path / "file" / "run"))


def mode_of_init(
    directory: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "auto"
) -> str | None:
    """Return the mode in which W&B would start, without starting it."""
    modes: list[str] = []

    def caught(**arguments: Any) -> None:
        modes.append(arguments["mode"])
        raise RuntimeError("caught")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", caught)
        track(directory, settings={"mode": mode})
    return modes[0] if modes else None


def test_online_only_when_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode_of_init(tmp_path, monkeypatch) == "offline"
    assert mode_of_init(tmp_path, monkeypatch, "online") == "offline"
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        assert mode_of_init(tmp_path, patch) == "online"
        assert mode_of_init(tmp_path, patch, "offline") == "offline"
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1:9\n login user\n password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert mode_of_init(tmp_path, monkeypatch) == "online"


def test_wandb_mode_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode_of_init(tmp_path, monkeypatch) == "offline"
    assert mode_of_init(tmp_path, monkeypatch, "online") == "online"
    assert track(tmp_path) == [f"wandb: offline{later(tmp_path)}"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_of_init(tmp_path, monkeypatch) is None
    assert track(tmp_path) == ["wandb: disabled by WANDB_MODE or `wandb disabled`"]
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    (line,) = track(tmp_path)
    assert line.endswith(GOES_ON + later(tmp_path))


def run_script(body: str, directory: Path, seconds: float) -> tuple[int, list[str], str]:
    """Run `body` in a new process; return its exit code, the lines it said and its stderr.

    Output goes to files: a service that hangs would keep a pipe open after the process has ended.
    """
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        from fedbench.tracking import trackers, wandb_session
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT / "tests")!r}]
        from test_trackers import SUMMARY, info, record, service_pid, wait_for
        said = []
        def say(line):
            said.append(line)
            print(line, flush=True)
        directory = Path({str(directory)!r})
    """
    out, err = directory / "stdout", directory / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(body)],
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
            timeout=seconds,
            check=False,
        )
    return done.returncode, out.read_text().splitlines(), err.read_text()


def service_pid() -> int:
    connection = wandb.sdk.wandb_setup.singleton().assert_service()
    assert connection._proc is not None
    return connection._proc._process.pid


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_service_prints_one_line(tmp_path: Path) -> None:
    code, lines, errors = run_script(
        """
        session = trackers.Wandb().open(info(directory / "a"), say)
        session.round(record(0))
        wait_for(lambda: said)
        os.kill(service_pid(), signal.SIGKILL)
        for index in range(1, 4):
            session.round(record(index))
            time.sleep(0.1)
        session.finish(SUMMARY)
        session = trackers.Wandb().open(info(directory / "b", "b"), say)
        session.round(record(0))
        session.finish(SUMMARY)
        """,
        tmp_path,
        seconds=60,
    )
    assert (code, errors) == (0, "")
    first, warning, second = lines
    assert warning.startswith("wandb: ")
    assert warning.endswith(GOES_ON + later(tmp_path / "a"))
    assert first.startswith("wandb: offline")
    assert second.startswith("wandb: offline")
    (run,) = stored(tmp_path / "b")
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_hanging_service_cannot_block_the_run(tmp_path: Path) -> None:
    code, lines, errors = run_script(
        """
        wandb_session.GRACE = 1
        settings = trackers.Wandb(init_timeout=2, finish_timeout=1)
        session = settings.open(info(directory / "a"), say)
        wait_for(lambda: said)
        os.kill(service_pid(), signal.SIGSTOP)
        session.round(record(0))
        session.finish(SUMMARY)
        session = settings.open(info(directory / "b", "b"), say)
        session.round(record(0))
        session.round(record(1))
        session.finish(SUMMARY)
        session = settings.open(info(directory / "c", "c"), say)
        wait_for(lambda: len(said) == 4)
        os.kill(service_pid(), signal.SIGSTOP)
        (directory / "pid").write_text(str(service_pid()))
        session.finish(SUMMARY)
        """,
        tmp_path,
        seconds=60,
    )
    wait_until_gone(int((tmp_path / "pid").read_text()))
    assert (code, errors) == (0, "")
    no_answer = f"wandb: its service process does not answer{GOES_ON}"
    assert lines[1] == no_answer + later(tmp_path / "a")
    assert lines[4] == no_answer + later(tmp_path / "c")
    assert len(lines) == 5
    (run,) = stored(tmp_path / "b")
    assert (len(run.history), run.exit_code) == (2, 0)


@pytest.mark.slow
def test_a_run_that_ends_without_finish_keeps_its_rounds_and_exit_code(tmp_path: Path) -> None:
    code, _, errors = run_script(
        """
        session = trackers.Wandb().open(info(directory), say)
        session.round(record(0))
        wait_for(lambda: said)
        sys.exit(3)
        """,
        tmp_path,
        seconds=60,
    )
    assert (code, errors) == (3, "")
    (run,) = stored(tmp_path)
    assert [row["MA"] for row in run.history] == [0.5]


@pytest.mark.slow
def test_an_unreachable_server_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    start = time.monotonic()
    code, lines, errors = run_script(
        """
        session = trackers.Wandb(init_timeout=2, finish_timeout=2).open(info(directory), say)
        session.round(record(0))
        session.finish(SUMMARY)
        """,
        tmp_path,
        seconds=60,
    )
    assert time.monotonic() - start < 30
    assert (code, errors) == (0, "")
    (line,) = lines
    assert line.startswith("wandb: ")
    assert "127.0.0.1:9" in line
    assert "wandb.init" not in line
    assert line.endswith(GOES_ON + later(tmp_path))


def test_none_does_nothing_and_needs_no_wandb(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from fedbench.tracking.trackers import TRACKERS, RunInfo
        tracker = TRACKERS.build({{"name": "none"}})
        session = tracker.open(RunInfo("a", "a", "s", (), {{}}, Path({str(tmp_path)!r})), print)
        session.round({{"round": 0}})
        session.finish({{"status": "finished"}})
        TRACKERS.build({{"name": "wandb"}})
        assert "wandb" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "onlin"}, "tracker wandb: mode=onlin: no such mode; did you mean online?"),
        ({"init_timeout": 0}, "init_timeout must be above 0 and at most 86400 seconds, got 0"),
        ({"projet": "x"}, "did you mean project?"),
    ],
)
def test_a_wrong_setting_is_a_user_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TRACKERS.build({"name": "wandb", **settings})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["none", "wandb"])
def test_config_and_class_agree(name: str) -> None:
    config = {**OmegaConf.load(ROOT / "conf" / "tracker" / f"{name}.yaml")}
    assert config.pop("name") == name
    cls: Any = TRACKERS.get(name)
    assert config == {field.name: field.default for field in fields(cls)}


def test_a_long_name_is_cut_visibly_and_still_tells_runs_apart() -> None:
    settings = " ".join(f"attack.setting_{i}=0.5" for i in range(9))
    title = f"krum dba pmr=0.2 {settings} lr=0.1 seed="
    names = [short_name(f"{title}{seed}", f"krum-00{seed}a") for seed in (0, 1)]
    assert [len(name) for name in names] == [128, 128]
    assert [name[-6:] for name in names] == ["… 000a", "… 001a"]
    assert all(f"{title}0".startswith(name[:-6]) for name in names)
    assert short_name("x" * 128, "krum-000a") == "x" * 128
