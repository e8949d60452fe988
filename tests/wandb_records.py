"""Helpers for tests of W&B: records of rounds, sessions, and what a .wandb file holds."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.tracking.trackers import TRACKERS, RunInfo

KEY = "0123456789" * 4
SUMMARY = {"status": "finished", "MA": 0.7, "BA": 0.1, "TPR": None, "rounds": 2, "seconds": 3.5}


def record(index: int, judged: bool = True) -> dict[str, Any]:
    return {
        "round": index,
        "MA": 0.5 + index / 10,
        "BA": 0.1 if judged else None,
        "TPR": 1.0 if judged else None,
        "TNR": 0.5 if judged else None,
        "AUC": 0.75 if judged else None,
        "pdr": 0.5 if judged else None,
        "norm_ratio": 2.0 if judged else None,
        "cosine": -0.5 if judged else None,
        "benign_cosine": 0.25 if judged else None,
        "seconds": {"train": 1.0, "aggregate": 0.25, "evaluate": 0.5},
        "clients": [
            {
                "id": client,
                "malicious": client == 3,
                "accepted": client != 3 if judged else None,
                "score": client + 0.5 if judged else None,
                "weight": float(client != 3),
                "norm": client / 4,
                "cosine": client / 16,
            }
            for client in (3, 8)
        ],
    }


def info(
    directory: Path, run_id: str = "4f2a", n_earlier: int = 0, in_sweep: bool = False
) -> RunInfo:
    config = {"pmr": 0.2, "defense": "krum", "defense__f": None}
    earlier = tuple(record(index) for index in range(n_earlier))
    tags = ("krum", "dba")
    return RunInfo(run_id, "krum pmr=0.2", "table3", tags, config, directory, earlier, in_sweep)


def track(
    directory: Path,
    indices: Iterable[int] = range(2),
    summary: Mapping[str, Any] = SUMMARY,
    settings: Mapping[str, Any] | None = None,
    judged: bool = True,
    **run: Any,
) -> list[str]:
    """Run a whole session; return the lines that it said."""
    said: list[str] = []
    tracker = TRACKERS.build({"name": "wandb", **(settings or {})})
    session = tracker.open(info(directory, **run), said.append)
    for index in indices:
        session.round(record(index, judged))
    session.finish(summary)
    return said


@dataclass
class Stored:
    """The contents of a .wandb file."""

    run: Any
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int | None
    files: Path


def stored(directory: Path) -> list[Stored]:
    found = sorted(directory.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [read_back(path) for path in found]


def read_back(path: Path) -> Stored:
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    out = Stored(None, {}, [], {}, None, path.parent / "files")
    for data in entries(path.read_bytes()):
        entry = messages.Record.FromString(data)
        kind = entry.WhichOneof("record_type")
        if kind == "run":
            out.run = entry.run
            out.config = {item.key: json.loads(item.value_json) for item in entry.run.config.update}
        elif kind == "history":
            out.history.append(as_dict(entry.history.item))
        elif kind == "summary":
            out.summary |= as_dict(entry.summary.update)
        elif kind == "exit":
            out.exit_code = entry.exit.exit_code
    return out


def entries(log: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: a LevelDB log whose 32 KiB blocks may split records."""
    block, header, start, parts = 1 << 15, struct.Struct("<IHB"), 7, b""
    while start + header.size <= len(log):
        if block - start % block < header.size:
            start += block - start % block
            continue
        _, size, kind = header.unpack_from(log, start)
        start += header.size
        parts += log[start : start + size]
        start += size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def as_dict(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wait_until_gone(process: int) -> None:
    """Wait until a process that was killed is gone; its end is not immediate."""
    end = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(process, 0)
            time.sleep(0.02)
        raise AssertionError(f"process {process} is still there")
