"""The cores and GPUs that a run may use, alone and in a sweep."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import pooch  # type: ignore[import-untyped]
import pytest

from fedbench.datasets.files import cache_folder
from fedbench.multirun import resources


def test_cores_are_divided_by_threads_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "n_cores", lambda: 8)
    monkeypatch.delenv(resources.PARALLEL, raising=False)
    assert [resources.units("cpu", threads) for threads in (1, 3, 9)] == [8, 2, 1]
    assert (resources.n_parallel(), resources.in_sweep()) == (1, False)
    monkeypatch.setenv(resources.PARALLEL, "3")
    monkeypatch.setenv(resources.PRETRAINING, "1")
    assert (resources.n_parallel(), resources.in_sweep()) == (3, True)
    assert resources.n_pretraining() == 1
    assert [resources.units_per_run("cpu", 1, n) for n in (1, 3, 9)] == [8, 2, 1]
    assert resources.units_per_run("cpu", 2, 3) == 1


def test_the_last_batch_takes_over_the_cores_of_runs_that_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 runs, 3 at a time on 9 cores: the last 2 divide the 3 cores that the third leaves."""
    monkeypatch.setattr(resources, "n_cores", lambda: 9)
    monkeypatch.setenv(resources.SWEEP, "17")
    monkeypatch.setenv(resources.PARALLEL, "3")
    monkeypatch.setenv(resources.LAST_BATCH, "krum-1 krum-2")
    assert [resources.last_batch_size(run) for run in ("flame-1", "krum-1", "krum-2")] == [0, 2, 2]
    with resources.sweep_slot():  # krum-1
        with resources.sweep_slot():
            with resources.sweep_slot():  # a run of the batch before
                assert resources.units_available("cpu", 1) == 3
            assert resources.units_available("cpu", 1) == 3  # 1 free slot, 2 runs
        assert resources.units_available("cpu", 1) == 6
        monkeypatch.setenv(resources.LAST_BATCH, "krum-1")
        assert resources.units_available("cpu", 1) == 9
        assert resources.units_available("cpu", 9) == 3
    assert cache_folder("sweeps/17").exists()
    resources.forget_sweep(17)
    assert not cache_folder("sweeps/17").exists()


def test_a_run_outside_a_sweep_holds_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(resources.PARALLEL, raising=False)
    monkeypatch.delenv(resources.LAST_BATCH, raising=False)
    with resources.sweep_slot():
        assert not cache_folder("sweeps").exists()
    assert resources.last_batch_size("krum-1") == 0


@pytest.mark.parametrize(
    ("accelerator", "threads", "devices", "n_gpus", "expected"),
    [
        ("cpu", 1, None, 0, 8),
        ("cpu", 2, None, 0, 4),
        ("cpu", 2, 2, 0, 2),
        ("cpu", 1, 16, 0, 1),
        ("gpu", 1, None, 4, 4),
        ("cuda", 1, 2, 4, 2),
        ("auto", 1, None, 0, 8),
        ("auto", 1, None, 4, 4),
        ("cpu", 1, None, 4, 8),
        ("cuda", 1, None, 0, 1),
    ],
)
def test_jobs_is_the_number_of_runs_that_fit_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    threads: int,
    devices: int | None,
    n_gpus: int,
    expected: int,
) -> None:
    monkeypatch.setattr(resources, "n_cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: n_gpus)
    assert resources.jobs(accelerator, threads, devices) == expected


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)


def hold(n: int, answers: multiprocessing.Queue[list[int]], seconds: float) -> None:
    with resources.claim("gpus", n, 3) as gpus:
        answers.put(gpus)
        time.sleep(seconds)


def test_parallel_runs_claim_different_gpus() -> None:
    with resources.claim("gpus", 2, 3) as first, resources.claim("gpus", 1, 3) as second:
        assert (first, second) == ([0, 1], [2])
    with resources.claim("gpus", 3, 3) as all_of_them:
        assert all_of_them == [0, 1, 2]


def test_a_run_waits_for_all_its_gpus_and_holds_none_meanwhile() -> None:
    """Three runs want two of three GPUs each, so they go one after another."""
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[list[int]] = context.Queue()
    arguments = (2, answers, 0.5)
    runs = [context.Process(target=hold, args=arguments) for _ in range(3)]
    begun = time.monotonic()
    for run in runs:
        run.start()
    assert [len(answers.get(timeout=20)) for _ in runs] == [2, 2, 2]
    for run in runs:
        run.join(20)
        assert run.exitcode == 0
    assert time.monotonic() - begun >= 1.5


def test_a_line_is_said_once_per_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(resources.SWEEP, raising=False)
    said: list[str] = []
    for _ in range(2):  # two runs without a sweep
        resources.once_per_sweep(said.append)("a")
    assert said == ["a", "a"]
    for sweep in ("17", "18"):
        monkeypatch.setenv(resources.SWEEP, sweep)
        said.clear()
        for _ in range(2):  # two runs of a sweep
            say = resources.once_per_sweep(said.append)
            say("a")
            say("b")
        assert said == ["a", "b"]
        resources.forget_sweep(sweep)
        resources.once_per_sweep(said.append)("a")
        assert said == ["a", "b", "a"]
        resources.forget_sweep(sweep)


def test_a_line_is_said_if_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(pooch, "os_cache", lambda _: tmp_path / "file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    monkeypatch.setenv(resources.SWEEP, "17")
    said: list[str] = []
    for _ in range(2):
        resources.once_per_sweep(said.append)("a")
    assert said == ["a", "a"]


def test_sweeps_do_without_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "file" / project)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with (
        resources.claim("sweeps/7-7", 1, 2) as first,
        resources.claim("sweeps/7-7", 1, 2) as second,
    ):
        assert (first, second) == ([0], [1])
    resources.forget_sweep("7-7")
    assert [*(tmp_path / "temporary").iterdir()] == []
