"""checkpoint.pt: it survives a round trip, runs no code, and is replaced atomically."""

from __future__ import annotations

import errno
import io
import os
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
    save_checkpoint(path, CHECKPOINT, "krum-1")
    again = load_checkpoint(path, CPU, "delete it", "krum-1")
    assert again.next_round == 2
    assert torch.equal(again.params, CHECKPOINT.params)
    assert again.defense_state["seen"][7].tolist() == [1, 1]
    assert again.defense_state["rounds"] == [1, 2]


def refusal(path: Path, run: str | None = "krum-1") -> str:
    """Return the message of the UserError."""
    with pytest.raises(UserError) as caught:
        load_checkpoint(path, CPU, "delete it", run)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_what_is_no_checkpoint_is_a_user_error(path: Path) -> None:
    path.write_bytes(b"not a checkpoint")
    assert refusal(path).startswith(" has no checksum")
    path.unlink()
    assert refusal(path) == " cannot be read (No such file or directory)"
    path.mkdir()
    assert refusal(path) == " cannot be read (Is a directory)"


def test_any_other_bit_is_found(path: Path) -> None:
    save_checkpoint(path, CHECKPOINT, "krum-1")
    content = path.read_bytes()
    for position in range(0, len(content), 97):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert refusal(path).endswith("; delete it")


def test_a_checkpoint_of_another_run_is_refused(path: Path) -> None:
    save_checkpoint(path, CHECKPOINT, "krum-2")
    assert refusal(path) == " is of another run, krum-2; delete it"
    assert load_checkpoint(path, CPU, "delete it").next_round == 2  # as `pretrained=PATH` does


@pytest.mark.parametrize("name", ["params", "buffers"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_refused(path: Path, name: str, value: float) -> None:
    changed: dict[str, Any] = {name: torch.tensor([0, value])}
    save_checkpoint(path, replace(CHECKPOINT, **changed), "krum-1")
    assert "not finite" in refusal(path)


def test_a_full_disk_is_named_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself would report an unexpected position in the file."""
    save_checkpoint(path, CHECKPOINT, "krum-1")
    before = path.read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=f"no space left on the disk of {path.parent}; free"):
            save_checkpoint(path, CHECKPOINT, "krum-1")

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full())
        with pytest.raises(UserError, match=f"no space left on the disk of {path.parent}; free"):
            save_checkpoint(path, CHECKPOINT, "krum-1")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_cannot_run_code(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (path.with_name("owned").touch, ())

    evil: Any = Evil()
    save_checkpoint(path, replace(CHECKPOINT, defense_state=evil), "krum-1")
    assert "is unreadable (UnpicklingError)" in refusal(path)
    assert not path.with_name("owned").exists()


def test_a_new_checkpoint_replaces_the_old_one(path: Path) -> None:
    for next_round in (1, 2):
        save_checkpoint(path, replace(CHECKPOINT, next_round=next_round), "krum-1")
    assert load_checkpoint(path, CPU, "delete it", "krum-1").next_round == 2
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]
