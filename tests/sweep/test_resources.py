"""What a run may use of the resources, alone and in a sweep."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pooch  # type: ignore[import-untyped]
import pytest

from fedbench.datasets.files import cache_folder
from fedbench.sweep import resources


def test_cores_are_divided_by_threads_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "n_cores", lambda: 8)
    monkeypatch.delenv(resources.PARALLEL, raising=False)
    assert (resources.units("cpu"), resources.units("cpu", 3), resources.units("cpu", 9)) == (
        8,
        2,
        1,
    )
    assert (resources.side_by_side(), resources.in_sweep()) == (1, False)
    monkeypatch.setenv(resources.PARALLEL, "3")
    monkeypatch.setenv(resources.PRETRAINING, "1")
    assert (resources.side_by_side(), resources.in_sweep()) == (3, True)
    assert resources.side_by_side(resources.PRETRAINING) == 1
    assert [resources.share("cpu", 1, n) for n in (1, 3, 9)] == [8, 2, 1]
    assert resources.share("cpu", 2, 3) == 1


def test_the_last_runs_of_a_sweep_grow_as_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 runs 3 at once on 9 cores, 3 cores each, the last 2 share what the third leaves."""
    monkeypatch.setattr(resources, "n_cores", lambda: 9)
    monkeypatch.setenv(resources.SWEEP, "17")
    monkeypatch.setenv(resources.PARALLEL, "3")
    monkeypatch.setenv(resources.LAST, "krum-1 krum-2")
    assert [resources.n_last(run) for run in ("flame-1", "krum-1", "krum-2")] == [0, 2, 2]
    with resources.place_in_sweep():  # one of the two
        with resources.place_in_sweep():
            with resources.place_in_sweep():  # another run
                assert resources.room("cpu", 1) == 3
            assert resources.room("cpu", 1) == 3  # the rest is not enough for both
        assert resources.room("cpu", 1) == 6
        monkeypatch.setenv(resources.LAST, "krum-1")
        assert resources.room("cpu", 1) == 9
        assert resources.room("cpu", 9) == 3
    assert cache_folder("sweeps/17").exists()
    resources.forget_sweep(17)
    assert not cache_folder("sweeps/17").exists()


def test_outside_of_a_sweep_a_run_has_no_place_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(resources.PARALLEL, raising=False)
    monkeypatch.delenv(resources.LAST, raising=False)
    with resources.place_in_sweep():
        assert not cache_folder("sweeps").exists()
    assert resources.n_last("krum-1") == 0


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
        ("mps", 1, None, 0, 1),
    ],
)
def test_jobs_are_as_many_as_there_is_room_for(
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
    with resources.claimed("gpus", n, 3) as gpus:
        answers.put(gpus)
        time.sleep(seconds)


def test_runs_side_by_side_get_gpus_of_their_own() -> None:
    with resources.claimed("gpus", 2, 3) as first, resources.claimed("gpus", 1, 3) as second:
        assert (first, second) == ([0, 1], [2])
    with resources.claimed("gpus", 3, 3) as all_of_them:
        assert all_of_them == [0, 1, 2]


def test_a_run_waits_for_a_gpu_and_never_holds_a_part() -> None:
    """Two runs that want two of three GPUs each: the second gets them when the first is over."""
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
