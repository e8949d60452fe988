"""`python -m fedbench.upload`: runs that have ended reach W&B from their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from end_to_end import fedbench_in_this_process, rounds, run_folder
from filelock import FileLock
from handmade_runs import seal
from wandb_records import KEY, stored
from wandb_server import ENTITY, WandbServer

from fedbench.tracking.trackers import RunInfo, Wandb
from fedbench.upload import config_of, main

pytestmark = pytest.mark.usefixtures("logged_out")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nothing tracked."""
    folder = tmp_path_factory.mktemp("work")
    ended = fedbench_in_this_process("defense=krum", "name=pilot", "rounds=2", cwd=folder)
    assert (ended.code, ended.err) == (0, [])
    return run_folder(folder / "runs")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / "pilot" / finished.name))


def with_tracker(run: Path, **settings: str) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["tracker"] = {"name": "wandb", **settings}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    seal(run)


def test_a_finished_run_is_uploaded_in_full(
    run: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.parent)]) == 0
    url = f"{server.url}/{ENTITY}/fedbench/runs/pilot-{run.name}"
    assert capsys.readouterr() == (f"{run}  2 rounds, {url}\n", "")
    sent = server.runs[f"pilot-{run.name}"]
    changed = "n_clients=6 rounds=2 pretrain_rounds=1 local_epochs=1"
    assert sent.name == f"krum constrain_and_scale pmr=0.2 {changed} seed=0"
    assert (sent.group, sent.project) == ("pilot", "fedbench")
    assert sent.tags == ["krum", "constrain_and_scale", "fmnist_sample"]
    assert (sent.config["n_clients"], sent.config["defense"]) == (6, "krum")
    assert (sent.config["dataset"], sent.config["pmr"]) == ("fmnist_sample", 0.2)
    plain = {key: value for key, value in sent.config.items() if key != "_wandb"}
    assert not [value for value in plain.values() if isinstance(value, dict | list)]
    assert [row["MA"] for row in sent.history] == [line["MA"] for line in rounds(run)]
    assert "partition" in sent.history[0]
    assert sent.summary["MA"] == rounds(run)[-1]["MA"]
    assert sent.summary["MA_max"] == max(line["MA"] for line in rounds(run))
    assert sent.summary["clients"]["nrows"] == 2 * 6
    assert sent.exit_code == 0
    assert "requirements.txt" not in sent.files, "the packages of the machine that uploads"


def test_the_defense_of_a_run_is_the_name_that_the_user_chose(
    run: Path, server: WandbServer
) -> None:
    """`baybfed_literal` is a variant of `baybfed`; W&B must not average over both."""
    origin = json.loads((run / "origin.json").read_text())
    origin["choices"]["defense"] = "krum_variant"
    (run / "origin.json").write_text(json.dumps(origin))
    seal(run)
    assert main([str(run)]) == 0
    (sent,) = server.runs.values()
    assert sent.config["defense"] == "krum_variant"


def test_it_replaces_what_a_tracker_sent(run: Path, server: WandbServer) -> None:
    """The tracker failed after round 0; uploading twice makes no second run."""
    about = RunInfo.of(config_of(run), "title", run, rounds(run)[:1])
    Wandb().open(about, print).finish({"status": "failed", "error": "none"})
    ((name, sent),) = server.runs.items()
    assert (sent.steps, sent.exit_code) == ([0], 1)
    for _ in range(2):
        assert main([str(run)]) == 0
        assert [*server.runs] == [name]
        assert (sent.steps, sent.exit_code) == ([0, 1], 0)
        assert sent.summary["status"] == "finished"
    assert len(stored(run)) == 1


def test_a_failed_run_is_uploaded_and_an_unfinished_one_is_not(
    run: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ["failed", "unfinished", "running", "unreadable"]
    failed, unfinished, running, unreadable = (
        Path(shutil.copytree(run, run.parent / name)) for name in others
    )
    (failed / "summary.json").write_text(json.dumps({"status": "failed", "error": "no luck"}))
    seal(failed)
    (unfinished / "summary.json").unlink()
    (unreadable / "summary.json").write_text("{")
    with FileLock(running / ".lock"):
        assert main(map(str, [failed, unfinished, running, unreadable, run])) == 1
    out, err = capsys.readouterr()
    assert [line.split("  ")[1].split(",")[0] for line in out.splitlines()] == [
        "2 rounds",
        "not finished",
        "still running",
        "2 rounds",
    ]
    assert err.startswith(f"fedbench.upload: {unreadable}: summary.json has ")
    assert err.count("\n") == 1
    assert server.runs.keys() == {"pilot-failed", f"pilot-{run.name}"}
    assert server.runs["pilot-failed"].exit_code == 1
    assert server.runs["pilot-failed"].summary["error"] == "no luck"


def test_without_a_login_it_says_so_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, run.parent / "another")
    assert main([str(run.parent)]) == 1
    out, err = capsys.readouterr()
    expected = "not logged in; run `wandb login` or set WANDB_API_KEY, or use --mode offline"
    assert (out, err) == ("", f"fedbench.upload: {expected}\n")
    assert stored(run) == []


@pytest.mark.slow
def test_an_unreachable_server_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with_tracker(run, init_timeout="2")  # type: ignore[arg-type]
    shutil.copytree(run, run.parent / "another")
    assert main([str(run.parent)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "127.0.0.1:9" in err


def test_wandb_can_be_disabled(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main([str(run)]) == 1
    assert "use --mode online" in capsys.readouterr().err


def test_offline_files_and_options(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options win over the settings of the run, those over the defaults."""
    with_tracker(run, project="backdoors", entity="team")
    assert main([str(run), "--mode", "offline"]) == 0
    (found,) = stored(run)
    assert (found.run.project, found.run.entity) == ("backdoors", "team")
    assert [row["_step"] for row in found.history] == [0, 1]
    assert str(found.files.parent) in capsys.readouterr().out
    assert main([str(run), "--mode=offline", "--project=other", "--entity=me"]) == 0
    (found,) = stored(run)
    assert (found.run.project, found.run.entity) == ("other", "me")


def test_a_wrong_folder_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"fedbench.upload: no folder {tmp_path / 'none'}\n"


def test_a_setting_of_another_version_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "config.yaml").open("a") as file:
        file.write("warp: 9\n")
    seal(run)
    assert main([str(run)]) == 1
    assert "config.yaml: warp is not a setting of this version" in capsys.readouterr().err
