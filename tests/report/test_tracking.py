"""Trackers: what reaches W&B, and that no failure of W&B stops a run.

W&B really runs, offline or against a closed port of this machine, with an empty home folder.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from PIL import Image

from fedbench.errors import UserError
from fedbench.report.tracking import TRACKERS, RunInfo, Wandb, history, short_name

ROOT = Path(__file__).parents[2]
KEY = "0123456789" * 4
CLOSED_PORT = "http://127.0.0.1:9"
GOES_ON = "; the run goes on without it"
SUMMARY = {"status": "finished", "MA": 0.7, "BA": 0.1, "TPR": None, "rounds": 2, "seconds": 3.5}


@pytest.fixture(autouse=True)
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED_PORT)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home" / name.lower()))


def record(index: int, judged: bool = True) -> dict[str, Any]:
    return {
        "round": index,
        "MA": 0.5 + index / 10,
        "BA": 0.1 if judged else None,
        "TPR": 1.0 if judged else None,
        "TNR": 0.5 if judged else None,
        "AUC": 0.75 if judged else None,
        "pdr": 0.5 if judged else None,
        "norm_ratio": 2.0 if judged else None,
        "cosine": -0.5 if judged else None,
        "benign_cosine": 0.25 if judged else None,
        "seconds": {"train": 1.0, "aggregate": 0.25, "evaluate": 0.5},
        "clients": [
            {
                "id": client,
                "malicious": client == 3,
                "accepted": client != 3 if judged else None,
                "score": client + 0.5 if judged else None,
                "weight": float(client != 3),
                "norm": client / 4,
                "cosine": client / 16,
            }
            for client in (3, 8)
        ],
    }


def info(directory: Path, run_id: str = "4f2a", first_round: int = 0) -> RunInfo:
    config = {"pmr": 0.2, "defense": {"name": "krum", "f": None}}
    return RunInfo(
        run_id, "krum pmr=0.2", "table3", ("krum", "dba"), config, directory, first_round
    )


def track(
    directory: Path,
    indices: Iterator[int] | range = range(2),
    summary: Mapping[str, Any] = SUMMARY,
    settings: Mapping[str, Any] | None = None,
    judged: bool = True,
    **run: Any,
) -> list[str]:
    """Run a whole session; return the lines that it said."""
    said: list[str] = []
    tracker = TRACKERS.build({"name": "wandb", **(settings or {})})
    session = tracker.open(info(directory, **run), said.append)
    for index in indices:
        session.round(record(index, judged))
    session.finish(summary)
    return said


@dataclass
class Stored:
    """The contents of a .wandb file."""

    run: Any
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None
    files: Path


def stored(directory: Path) -> list[Stored]:
    found = sorted(directory.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [read_back(path) for path in found]


def read_back(path: Path) -> Stored:
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    out = Stored(None, {}, [], {}, None, path.parent / "files")
    for data in entries(path.read_bytes()):
        entry = messages.Record.FromString(data)
        kind = entry.WhichOneof("record_type")
        if kind == "run":
            out.run = entry.run
            out.config = {item.key: json.loads(item.value_json) for item in entry.run.config.update}
        elif kind == "history":
            out.history.append(as_dict(entry.history.item))
        elif kind == "summary":
            out.summary |= as_dict(entry.summary.update)
        elif kind == "exit":
            out.exit_code = entry.exit.exit_code
    return out


def entries(log: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a LevelDB log whose 32 KiB blocks may split records."""
    block, header, start, parts = 1 << 15, struct.Struct("<IHB"), 7, b""
    while start + header.size <= len(log):
        if block - start % block < header.size:
            start += block - start % block
            continue
        _, size, kind = header.unpack_from(log, start)
        start += header.size
        parts += log[start : start + size]
        start += size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def as_dict(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_everything_about_a_run_reaches_wandb(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = track(tmp_path / "run")
    assert said == [
        f"wandb: offline, not logged in; {tmp_path / 'run' / 'wandb'} (wandb sync uploads it)"
    ]
    assert capfd.readouterr() == ("", "")
    (run,) = stored(tmp_path / "run")
    assert run.run.project == "fedbench"
    assert run.run.display_name == "krum pmr=0.2"
    assert run.run.run_group == "table3"
    assert sorted(run.run.tags) == ["dba", "krum"]
    assert run.run.run_id == "table3-4f2a"
    assert not run.run.git.commit
    assert run.config["pmr"] == 0.2
    assert run.config["defense"] == {"name": "krum", "f": None}
    for index, row in enumerate(run.history):
        assert row["_step"] == index
        assert {name: row[name] for name in row if not name.startswith("_")} == {
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
            "score/3": 3.5,
            "score/8": 8.5,
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


@pytest.mark.parametrize("first", [0, 2])
def test_the_partition_figure_is_logged_with_the_first_round(tmp_path: Path, first: int) -> None:
    """A resumed run logs it again, at its own first round, a step new to W&B."""
    Image.new("RGB", (7, 5), "red").save(tmp_path / "partition.png")
    assert len(track(tmp_path, range(first, first + 2), first_round=first)) == 1
    (run,) = stored(tmp_path)
    assert [row["_step"] for row in run.history] == [first, first + 1]
    row, later = run.history
    assert (row["partition/_type"], row["partition/width"]) == ("image-file", 7)
    copy = run.files / row["partition/path"]
    assert copy.read_bytes() == (tmp_path / "partition.png").read_bytes()
    assert row["MA"] == 0.5 + first / 10
    assert not [name for name in later if name.startswith("partition")]


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
    assert said[1].endswith(GOES_ON)


def test_values_that_a_round_lacks_are_not_logged(tmp_path: Path) -> None:
    track(tmp_path, judged=False)
    (run,) = stored(tmp_path)
    names = {name for name in run.history[0] if not name.startswith("_")}
    assert names == {"MA", "seconds/train", "seconds/aggregate", "seconds/evaluate"}
    assert "TPR" not in run.summary


def test_the_accuracy_of_each_backdoor_is_logged() -> None:
    values = history({**record(0), "BA_by_backdoor": {"cross": 0.2, "none_hit": None}})
    assert values["BA/cross"] == 0.2
    assert "BA/none_hit" not in values


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


def test_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume: list[str | None] = []
    init = wandb.init

    def watched(**arguments: Any) -> Any:
        resume.append(arguments["resume"])
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", watched)
    track(tmp_path)
    track(tmp_path, range(2, 4), first_round=2)
    first, second = stored(tmp_path)
    assert resume == [None, "allow"]
    assert first.run.run_id == second.run.run_id
    assert [row["_step"] for row in first.history + second.history] == [0, 1, 2, 3]


def test_a_failing_init_prints_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no\n  luck.")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", broken)
        assert track(tmp_path / "a") == [f"wandb: no luck{GOES_ON}"]
    assert len(track(tmp_path / "b")) == 1
    assert len(stored(tmp_path / "b")) == 1


def test_a_failing_table_still_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(wandb, "Table", broken)
    assert track(tmp_path)[1:] == [f"wandb: no table{GOES_ON}"]
    (run,) = stored(tmp_path)
    assert (run.exit_code, run.summary["MA"]) == (0, 0.7)


def test_a_broken_record_prints_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    session = Wandb().open(info(tmp_path), said.append)
    session.round({"round": 0})
    session.round(record(1))
    session.finish(SUMMARY)
    assert said[1:] == [f"wandb: 'clients'{GOES_ON}"]


def test_an_unwritable_folder_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = track(tmp_path / "file" / "run")
    assert line.startswith("wandb: ")
    assert str(tmp_path / "file") in line
    assert line.endswith(GOES_ON)


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
    assert track(tmp_path) == [f"wandb: offline; {tmp_path / 'wandb'} (wandb sync uploads it)"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_of_init(tmp_path, monkeypatch) is None
    assert track(tmp_path) == ["wandb: disabled by WANDB_MODE or `wandb disabled`"]
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    (line,) = track(tmp_path)
    assert line.endswith(GOES_ON)


def run_script(body: str, directory: Path, seconds: float) -> tuple[int, list[str], str]:
    """Run `body` in a new process; return its exit code, the lines it said and its stderr.

    Output goes to files: a service that hangs would keep a pipe open after the process has ended.
    """
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        import fedbench.report.tracking as tracking
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tracking import SUMMARY, info, record, service_pid, wait_for
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
        session = tracking.Wandb().open(info(directory / "a"), say)
        session.round(record(0))
        wait_for(lambda: said)
        os.kill(service_pid(), signal.SIGKILL)
        for index in range(1, 4):
            session.round(record(index))
            time.sleep(0.1)
        session.finish(SUMMARY)
        session = tracking.Wandb().open(info(directory / "b", "b"), say)
        session.round(record(0))
        session.finish(SUMMARY)
        """,
        tmp_path,
        seconds=60,
    )
    assert (code, errors) == (0, "")
    first, warning, second = lines
    assert warning.startswith("wandb: ")
    assert warning.endswith(GOES_ON)
    assert first.startswith("wandb: offline")
    assert second.startswith("wandb: offline")
    (run,) = stored(tmp_path / "b")
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_hanging_service_cannot_block_the_run(tmp_path: Path) -> None:
    code, lines, errors = run_script(
        """
        tracking.GRACE = 1
        settings = tracking.Wandb(init_timeout=2, finish_timeout=1)
        session = settings.open(info(directory / "a"), say)
        wait_for(lambda: said)
        frozen = service_pid()
        os.kill(frozen, signal.SIGSTOP)
        session.round(record(0))
        session.finish(SUMMARY)
        session = settings.open(info(directory / "b", "b"), say)
        session.round(record(0))
        os.kill(frozen, signal.SIGCONT)
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
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (code, errors) == (0, "")
    assert lines[1] == lines[4] == f"wandb: its service process does not answer{GOES_ON}"
    assert len(lines) == 5
    (run,) = stored(tmp_path / "b")
    assert (len(run.history), run.exit_code) == (2, 0)


@pytest.mark.slow
def test_a_run_that_ends_without_finish_keeps_its_rounds_and_exit_code(tmp_path: Path) -> None:
    code, _, errors = run_script(
        """
        session = tracking.Wandb().open(info(directory), say)
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
        session = tracking.Wandb(init_timeout=2, finish_timeout=2).open(info(directory), say)
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
    assert line.endswith(GOES_ON)


def test_none_does_nothing_and_needs_no_wandb(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from fedbench.report.tracking import TRACKERS, RunInfo
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
        ({"init_timeout": 0}, "init_timeout must be above 0 seconds, got 0"),
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
