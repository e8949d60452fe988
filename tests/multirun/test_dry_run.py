"""`--dry-run`: lists what would run, what is done and the time left, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from end_to_end import Ended, fedbench_in_this_process, files, with_small
from sweep_folders import composed

from fedbench.command_line import hydra_arguments
from fedbench.display.sweep_panel import about
from fedbench.errors import UserError
from fedbench.multirun import dry_run
from fedbench.multirun.dry_run import FINISHED, REUSED, TO_RESUME, TO_RUN, Forecast, summary_line
from fedbench.multirun.hydra_callback import SweepCallback
from fedbench.plan import Plan
from fedbench.results.checkpoint import Checkpoint, save_checkpoint
from fedbench.results.paces import Pace

SECONDS = {"train": 60.0, "evaluate": 30.0}  # of a round
MODEL = torch.zeros(3)
UNKNOWN = "no finished run to estimate from"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path


def dry(folder: Path, *overrides: str) -> Ended:
    """Run a command with `--dry-run`, which must not change anything."""
    before = {name: (folder / name).stat().st_mtime_ns for name in files(folder)}
    ended = fedbench_in_this_process(*overrides, "--dry-run", cwd=folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in files(folder)} == before
    assert SweepCallback.workers is None
    return ended


def lines_of(folder: Path, *overrides: str) -> list[str]:
    ended = dry(folder, *overrides)
    assert (ended.code, ended.err) == (0, []), ended
    return ended.out


def plan_of(*overrides: str) -> Plan:
    return Plan.of(composed(with_small(overrides))[0])


def checkpoint(next_round: int) -> Checkpoint:
    return Checkpoint(next_round, MODEL, MODEL, MODEL, MODEL, None)


def left_by(plan: Plan, n_rounds: int, status: str | None = None) -> Path:
    """Write what a run with this plan leaves after `n_rounds`, without training."""
    run = plan.folder
    run.path.mkdir(parents=True)
    run.start(plan.config)
    for index in range(n_rounds):
        run.record({"round": index})
    if n_rounds:
        run.checkpoint(checkpoint(n_rounds))
    if status is not None:
        total = sum(SECONDS.values()) * n_rounds
        steps = {step: seconds * n_rounds for step, seconds in SECONDS.items()}
        end = {"rounds": n_rounds, "seconds": total, "seconds_by_step": steps}
        run.finish({"status": status, **end})
    return run.path


def test_a_sweep_that_has_not_started(folder: Path) -> None:
    assert lines_of(folder, "-m", "defense=krum,median", "pmr=0.2,0.34") == [
        f"defense=krum pmr=0.2     to run, {UNKNOWN}",
        f"defense=krum pmr=0.34    to run, {UNKNOWN}",
        f"defense=median pmr=0.2   to run, {UNKNOWN}",
        f"defense=median pmr=0.34  to run, {UNKNOWN}",
        f"4 runs: 4 to run; {UNKNOWN}",
    ]
    assert files(folder) == []


@pytest.mark.parametrize(
    ("launcher", "left"),
    [
        # Rounds take 1 + 3 + 1 + 3 + 1 times 90 s, pretraining of seeds 3 and 5 takes 60 s each.
        ("hydra/launcher=basic", f"about {about(930)} left, pretraining included"),
        ("hydra.launcher.n_jobs=3", f"about {about(310)} left with 3 runs at a time, pretraining "
         "included"),
        # No more than five runs are left, and the longest one takes 270 s.
        ("hydra.launcher.n_jobs=9", f"about {about(270)} left with 5 runs at a time, pretraining "
         "included"),
    ],
)  # fmt: skip
def test_every_state_of_a_run(launcher: str, left: str, folder: Path) -> None:
    plans = [plan_of(f"seed={seed}", "name=new") for seed in range(7)]
    left_by(plans[0], 3, "finished")
    left_by(plan_of("seed=1", "name=old"), 3, "finished")
    left_by(plans[2], 2)
    left_by(plans[3], 0, "failed")
    left_by(plans[4], 2, "failed")
    shorter = left_by(plan_of("seed=6", "name=new", "rounds=2"), 2, "finished")
    lines = lines_of(folder, "-m", "seed=0,1,2,3,4,5,6,5", "name=new", launcher)
    assert lines == [
        "seed=0  finished",
        "seed=1  reused from runs/old",
        "seed=2  resumes at round 3 of 3, about 2 min",
        "seed=3  to run (failed before, tried again), about 4 min",
        "seed=4  resumes at round 3 of 3 (failed before, tried again), about 2 min",
        "seed=5  to run, about 4 min",
        f"seed=6  continues {shorter.name} at round 3 of 3, about 2 min",
        f"7 runs: 1 finished, 1 reused, 3 to resume, 2 to run; {left}",
    ]


def test_a_run_that_lacks_only_its_summary(folder: Path) -> None:
    left_by(plan_of("name=new"), 3)
    line, counts = lines_of(folder, "name=new")
    assert line.endswith("seed=0  resumes after its last round")
    assert counts == "1 run: 1 to resume; nothing left to compute"


def test_a_damaged_checkpoint_is_named(folder: Path) -> None:
    path = left_by(plan_of(), 2)
    (path / "checkpoint.pt").write_bytes(b"?")
    line, _ = lines_of(folder)
    assert f"  cannot resume, {path}/checkpoint.pt is damaged, " in line


def test_a_single_run(folder: Path) -> None:
    title = (
        "krum constrain_and_scale pmr=0.2 n_clients=6 rounds=3 pretrain_rounds=1 local_epochs=1 "
        "seed=0  "
    )
    first = [f"{title}to run, {UNKNOWN}", f"1 run: 1 to run; {UNKNOWN}"]
    assert lines_of(folder, "defense=krum") == first
    assert files(folder) == []
    left_by(plan_of("defense=krum", "name=old"), 3, "finished")
    done = "1 reused; nothing left to compute"
    assert lines_of(folder, "defense=krum") == [f"{title}reused from runs/old", f"1 run: {done}"]
    assert lines_of(folder, "defense=krum", "name=old")[0] == f"{title}finished"
    again = lines_of(folder, "defense=krum", "name=old", "--force")
    assert again[0] == f"{title}to run again (rerun=true), about {about(270)}"
    assert "reused" not in lines_of(folder, "defense=krum", "--force")[0]


def test_results_of_other_code_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(plan_of("name=old"), 3, "finished")
    monkeypatch.setattr(dry_run, "has_changed_since", lambda summary: True)
    for name, state in (("old", "finished"), ("new", "reused from runs/old")):
        line, _ = lines_of(folder, f"name={name}")
        assert line.endswith(f"  {state} (fedbench has changed since)")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["-m", "pmr=0.2,1.5"], "pmr=1.5: must be between 0 and 1"),
        (["-m", "defense=krum", "n_clients=6,2"], "N - f - 2 >= 1"),
        (["pmr=1.5"], "pmr=1.5: must be between 0 and 1"),
        (["defense=krum", "n_clients=2"], "N - f - 2 >= 1"),
        (["executor.accelerator=cuda"], "this machine has no GPU"),
        (["-m", "pmr=0.2,0.3", "hydra/sweeper=mine"], "hydra/sweeper=mine: no such"),
    ],
)
def test_the_user_errors_are_those_of_a_real_start(
    overrides: list[str], message: str, folder: Path
) -> None:
    if "cuda" in message and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    ended = dry(folder, *overrides)
    assert (ended.code, ended.out) == (1, []), ended
    (line,) = ended.err
    assert line.startswith("fedbench: ")
    assert message in line
    assert files(folder) == []


def test_a_sweep_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "defaults: [config, _self_]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {defense: 'krum,flame'}}}\n"
    )
    lines = lines_of(folder, "--config-dir", ".", "--config-name", "mine")
    assert [line.split("  ")[0].strip() for line in lines] == [
        *("defense=krum", "defense=flame", f"2 runs: 2 to run; {UNKNOWN}")
    ]


def test_the_option_is_an_internal_setting() -> None:
    words = ["+hydra.callbacks.sweep.dry_run=true", "pmr=0.3"]
    assert hydra_arguments(["--dry-run", "pmr=0.3"]) == words
    with pytest.raises(UserError, match="did you mean --dry-run"):
        hydra_arguments(["--dryrun"])


def test_a_shared_pretrained_model_counts_once(folder: Path) -> None:
    pace, slow = Pace(100.0, 60.0), Pace(300.0, 60.0)
    settings = ["pretrain_rounds=10", "rounds=4"]
    runs = [
        Forecast(plan_of("defense=krum", *settings), TO_RUN, "", 4, pace),
        Forecast(plan_of("defense=flame", *settings), TO_RUN, "", 4, slow),
        Forecast(plan_of("defense=median", *settings), TO_RESUME, "", 1, pace),
    ]
    # 400 + 1200 + 100 for rounds, 10 times 60 for pretraining
    left = f"about {about(2300)} left, pretraining included"
    assert summary_line(runs, 1) == f"3 runs: 1 to resume, 2 to run; {left}"
    shared = Path("runs", ".pretrained", f"{runs[0].plan.pretrain_id}.pt")
    shared.parent.mkdir(parents=True)
    save_checkpoint(shared, checkpoint(-4), runs[0].plan.pretrain_id)
    assert f"about {about(1700 + 4 * 60)} left, " in summary_line(runs, 1)
    save_checkpoint(shared, checkpoint(0), runs[0].plan.pretrain_id)
    assert summary_line(runs, 1).endswith(f"about {about(1700)} left")
    assert summary_line(runs, 2).endswith(f"about {about(1200)} left with 2 runs at a time")


def test_runs_without_an_estimate_are_counted_not_guessed() -> None:
    plan = plan_of()
    done = [Forecast(plan, FINISHED, ""), Forecast(plan, REUSED, "")]
    assert summary_line(done, 1) == "2 runs: 1 finished, 1 reused; nothing left to compute"
    unknown = [Forecast(plan, TO_RUN, "", 3)] * 2
    known = Forecast(plan, TO_RESUME, "", 2, Pace(60.0, 30.0))
    assert summary_line([*done, known, *unknown], 1) == (
        "5 runs: 1 finished, 1 reused, 1 to resume, 2 to run; about 2 min left, without 2 runs "
        f"with {UNKNOWN}"
    )
    assert summary_line(unknown, 1) == f"2 runs: 2 to run; {UNKNOWN}"
