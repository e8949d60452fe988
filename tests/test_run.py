"""A run in this process: what is shared between runs, and what must not be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.config import RunConfig
from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView, mean_of
from fedbench.errors import UserError
from fedbench.run import Plan, run


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> str:
    """A defense that counts its rounds in its state."""

    @dataclass(frozen=True)
    class Remembering(Defense):
        def init(self) -> Any:
            return {"rounds": 0}

        def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
            everyone = torch.ones(len(updates), dtype=torch.bool)
            return mean_of(updates, everyone), {"rounds": state["rounds"] + 1}

    monkeypatch.setitem(DEFENSES._classes, "remembering", Remembering)
    return "remembering"


def config(out: Path, defense: str | dict[str, Any] = "fedavg", **settings: Any) -> RunConfig:
    return RunConfig(
        **{
            "defense": {"name": defense} if isinstance(defense, str) else defense,
            "attack": {"name": "constrain_and_scale"},
            "dataset": {"name": "fmnist_sample"},
            "model": {"name": "mlp", "hidden": [4]},
            "executor": {"name": "sequential"},
            "tracker": {"name": "none"},
            "n_clients": 5,
            "rounds": 2,
            "pretrain_rounds": 1,
            "local_epochs": 1,
            "out": str(out),
        }
        | settings
    )


def test_pretraining_is_shared_but_no_memory_is(tmp_path: Path, remembering: str) -> None:
    for first, second in (("fedavg", remembering), (remembering, "fedavg")):
        out = tmp_path / first
        run(config(out, first))
        (shared,) = (out / ".pretrained").glob("*.pt")
        made = shared.stat().st_mtime_ns
        assert run(config(out, second))["status"] == "finished"
        assert shared.stat().st_mtime_ns == made
        state = torch.load(
            Plan.of(config(out, remembering)).folder.checkpoint_file, weights_only=True
        )
        assert state["defense_state"] == {"rounds": 2}


def test_the_same_pretraining_gives_the_same_first_round(tmp_path: Path) -> None:
    alone = run(config(tmp_path / "alone", "median"))
    run(config(tmp_path / "after", "krum"))
    after = run(config(tmp_path / "after", "median"))
    for key in ("MA", "BA"):
        assert alone[key] == after[key]


def test_a_model_that_diverges_before_round_0_is_never_shared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pretraining diverges"):
        run(config(tmp_path, lr=1e30))
    assert list((tmp_path / ".pretrained").glob("*.pt")) == []
    assert Plan.of(config(tmp_path, lr=1e30)).folder.finished() is None


def test_a_warning_of_the_defense_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, defense={"name": "krum", "f": 2}))
    assert "warning: krum is proven for N > 2f + 2 only, got N=5, f=2\n" in capsys.readouterr().out
    run(config(tmp_path, defense={"name": "krum", "f": 1}))
    assert "warning" not in capsys.readouterr().out
