"""Parts of a report run in several processes, in order, and their errors are raised."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from fedbench.report import parallel
from fedbench.report.parallel import FEW, Job, run_jobs


def write_pid(path: Path) -> list[Path]:
    path.write_text(str(os.getpid()))
    return [path]


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    return [partial(write_pid, tmp_path / str(i)) for i in range(2 * FEW)]


def test_results_are_in_the_order_of_the_jobs(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_n_cores", lambda: 2)
    assert run_jobs(jobs) == [[tmp_path / str(i)] for i in range(2 * FEW)]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(("n_cores", "n_jobs"), [(1, 2 * FEW), (2, FEW - 1)])
def test_few_jobs_or_a_single_core_take_no_process(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cores: int, n_jobs: int
) -> None:
    monkeypatch.setattr(parallel, "_n_cores", lambda: n_cores)
    run_jobs(jobs[:n_jobs])
    assert {path.read_text() for path in tmp_path.iterdir()} == {str(os.getpid())}


def test_an_error_in_a_process_is_raised(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_n_cores", lambda: 2)
    with pytest.raises(FileNotFoundError):
        run_jobs([*jobs, partial(write_pid, tmp_path / "missing" / "file")])
