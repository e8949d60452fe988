"""checkpoint.pt: it survives a round trip, runs no code, and is replaced atomically."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbench.errors import UserError
from fedbench.results.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
CHECKPOINT = Checkpoint(
    next_round=2,
    params=torch.arange(3.0),
    buffers=torch.zeros(0),
    initial_params=torch.ones(3),
    initial_buffers=torch.zeros(0),
    defense_state={"seen": {7: torch.ones(2)}, "rounds": [1, 2], "nothing": None},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_survives_a_round_trip(path: Path) -> None:
    save_checkpoint(path, CHECKPOINT)
    again = load_checkpoint(path, CPU)
    assert again.next_round == 2
    assert torch.equal(again.params, CHECKPOINT.params)
    assert again.defense_state["seen"][7].tolist() == [1, 1]
    assert again.defense_state["rounds"] == [1, 2]


def test_an_unreadable_checkpoint_is_a_user_error(path: Path) -> None:
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"checkpoint.pt is unreadable.*delete it to start over"):
        load_checkpoint(path, CPU)


def test_a_checkpoint_cannot_run_code(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (path.with_name("owned").touch, ())

    torch.save({"params": Evil()}, path)
    with pytest.raises(UserError):
        load_checkpoint(path, CPU)
    assert not path.with_name("owned").exists()


def test_a_new_checkpoint_replaces_the_old_one(path: Path) -> None:
    for next_round in (1, 2):
        save_checkpoint(path, replace(CHECKPOINT, next_round=next_round))
    assert load_checkpoint(path, CPU).next_round == 2
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]
