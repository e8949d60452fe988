"""Seconds of a round, from the finished runs that cost about the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from handmade_runs import seal

from fedbench.results.paces import Pace, Paces, read_paces

CONFIG: dict[str, Any] = {
    "defense": "krum",
    "attack": "dba",
    "dataset": "mnist",
    "dataset.root": None,
    "model": "mlp",
    "model.hidden": "[4]",
    "executor": "auto",
    "executor.devices": None,
    "n_clients": 30,
    "pool": None,
    "local_epochs": 2,
    "batch_size": 64,
    "evaluate_every": 1,
    "seed": 0,
}


def pace(seconds: float) -> Pace:
    return Pace(seconds, seconds / 2)


def test_the_median_of_the_most_similar_runs_counts() -> None:
    paces = Paces(
        [
            (CONFIG, pace(1)),
            (CONFIG | {"seed": 1, "dataset.root": "elsewhere", "lr": 0.1}, pace(2)),
            (CONFIG | {"pool": 30}, pace(9)),
            (CONFIG | {"defense": "flame"}, pace(20)),
            (CONFIG | {"defense": "flame", "batch_size": 32}, pace(1000)),
        ]
    )
    assert paces.estimate(CONFIG | {"seed": 7}) == Pace(2, 1)  # of 1, 2, 9
    assert paces.estimate(CONFIG | {"defense": "dp"}) == pace(5.5)  # of 1, 2, 9, 20
    # Another size of batches and other layers: all runs on this data set and model
    assert paces.estimate(CONFIG | {"batch_size": 8}) == Pace(9, 4.5)
    assert paces.estimate(CONFIG | {"model.hidden": "[8]"}) == Pace(9, 4.5)


@pytest.mark.parametrize(
    "other",
    [{"dataset": "iot"}, {"model": "cnn"}, {"n_clients": 31}, {"pool": 60}, {"local_epochs": 1}],
)
def test_runs_of_another_size_are_not_comparable(other: dict[str, Any]) -> None:
    assert Paces([(CONFIG, pace(1))]).estimate(CONFIG | other) is None
    assert Paces([]).estimate(CONFIG) is None


def add_run(folder: Path, **summary: Any) -> None:
    folder.mkdir(parents=True)
    config = {"defense": {"name": "krum"}, "dataset": {"name": "mnist"}, "n_clients": 30}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    finished = {"status": "finished", "rounds": 4, "seconds": 10.0}
    finished |= {"seconds_by_step": {"train": 8.0, "evaluate": 2.0}}
    (folder / "summary.json").write_text(json.dumps(finished | summary))
    seal(folder)


def test_all_finished_intact_runs_in_a_folder_of_results_are_read(tmp_path: Path) -> None:
    add_run(tmp_path / "a" / "krum-1")
    add_run(tmp_path / "b" / "krum-2", seconds=20.0, seconds_by_step={"train": 12.0})
    add_run(tmp_path / "b" / "krum-3", status="failed")
    add_run(tmp_path / "b" / "krum-4", seconds=None)
    add_run(tmp_path / "b" / "krum-5", seconds_by_step={})
    add_run(tmp_path / "b" / "krum-6", seconds=9000.0)
    damaged = tmp_path / "b" / "krum-6" / "summary.json"
    damaged.write_text(damaged.read_text().replace("9000", "9001"))
    add_run(tmp_path / "b" / "krum-7", seconds=9000.0)
    (tmp_path / "b" / "krum-7" / "config.yaml").unlink()
    (tmp_path / "b" / "report").mkdir()
    wanted = {"defense": "krum", "dataset": "mnist", "n_clients": 30}
    # 10 s and 20 s for four rounds, 8 s and 12 s of them for training
    assert read_paces([str(tmp_path)]).estimate(wanted) == Pace((2.5 + 5) / 2, (2 + 3) / 2)
    assert read_paces([str(tmp_path / "nowhere")]).estimate(wanted) is None
