"""origin.json, and the title of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import seal

from fedbench.config import RunConfig
from fedbench.results.origin import Origin, read_origin, title
from fedbench.results.run_dir import RunDir
from fedbench.results.sealed import DamageError

CONFIG: dict[str, Any] = {
    **{"defense": "krum", "defense.f": 2, "attack": "dba", "attack.gamma": 1.0},
    **{"dataset": "mnist", "model": "cnn", "pmr": 0.2, "pdr": 0.5, "non_iid": 0.0, "lr": 0.01},
    **{"rounds": 10, "seed": 3, "partition": "main_class"},
}


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "krum dba pmr=0.2 seed=3"),
        (Origin({}, {}), "krum dba pmr=0.2 seed=3"),
        (Origin({}, {"lr": 0.01, "seed": 3}), "krum dba pmr=0.2 lr=0.01 seed=3"),
        (Origin({}, {}, ("pdr", "non_iid")), "krum dba pmr=0.2 pdr=0.5 non_iid=0 seed=3"),
        (
            Origin({}, {"lr": 0.01, "attack.gamma": 1.0, "defense.f": 2, "dataset": "mnist"}),
            "krum dba pmr=0.2 defense.f=2 dataset=mnist attack.gamma=1 lr=0.01 seed=3",
        ),
        (
            Origin({"defense": "krum_b", "scenario": "converged"}, {"scenario": "converged"}),
            "krum_b dba pmr=0.2 scenario=converged seed=3",
        ),
        (Origin({}, None, ("rounds",)), "krum dba pmr=0.2 rounds=10 seed=3"),
    ],
)
def test_title(origin: Origin | None, expected: str) -> None:
    assert title(CONFIG, origin) == expected


def test_a_title_names_no_setting_without_an_effect_unless_it_is_given() -> None:
    """A Dirichlet partition does not use non_iid."""
    config = CONFIG | {"partition": "dirichlet"}
    changed = {"non_iid": 0.0, "partition": "dirichlet"}
    assert title(config, Origin({}, changed)) == "krum dba pmr=0.2 partition=dirichlet seed=3"
    assert " non_iid=0 " in title(config, Origin({}, changed, ("non_iid",)))


def test_a_resumed_run_keeps_its_origin(tmp_path: Path) -> None:
    first = Origin({"defense": "krum", "tuned": None}, {"lr": 0.1}, ("lr",))
    RunDir(tmp_path).start(RunConfig(), first)
    RunDir(tmp_path).start(RunConfig(), Origin({}, {"pmr": 0.3}))
    RunDir(tmp_path).start(RunConfig())
    assert read_origin(tmp_path) == first
    assert list(json.loads((tmp_path / "origin.json").read_text())) == [
        *("choices", "changed", "given", "run", "check")
    ]


def test_a_missing_origin_is_none(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", "[" * 100_000])
def test_a_damaged_origin_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "origin.json").write_text(text)
    with pytest.raises(DamageError, match="no checksum"):
        read_origin(tmp_path)


def test_keys_of_later_versions_are_ignored(tmp_path: Path) -> None:
    content = {"choices": {}, "changed": {"lr": 1}, "given": ["lr"], "command": "fedbench"}
    (tmp_path / "origin.json").write_text(json.dumps(content))
    seal(tmp_path)
    assert read_origin(tmp_path) == Origin({}, {"lr": 1}, ("lr",))
