"""Run directories with rounds for tests of reports: real settings, made-up numbers, no training."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from handmade_runs import seal
from sweep_folders import add_sweep

from fedbench.metrics import auc, rates
from fedbench.results.summary import summarise

STEPS = {"train": 1.25, "collude": 0.05, "screen": 0.25, "aggregate": 0.5, "evaluate": 0.75}
PROVENANCE = {
    "command": "python -m fedbench -m defense=krum,median",
    "git": {"commit": "32af57d2dd1b9dd5669160bd54f38fff53d28d88", "dirty": True},
    "versions": {"fedbench": "0.1.0", "torch": "2.9.0"},
    "processor": "Test CPU (AVX2)",
}


def round_lines(n_rounds: int, n_clients: int, seed: int, first_attack: int = 1) -> list[Any]:
    """Return records of rounds like those of a run; every third benign client is rejected."""
    rng = random.Random(seed)
    records = []
    for index in range(n_rounds):
        attacked = index >= first_attack
        clients: list[Any] = []
        for i in range(n_clients):
            malicious = attacked and i % 5 == 0
            score = rng.random() * 10 + 8 * malicious
            clients.append(
                {
                    "id": 100 + i,
                    "malicious": malicious,
                    "accepted": score < 9,
                    "score": score,
                    "weight": 0.0,
                    "norm": rng.random(),
                    "cosine": rng.uniform(-1, 1),
                }
            )
        clients[-1] |= {"refused": "NaN", "score": None, "accepted": False}
        scored = [client for client in clients if client["score"] is not None]
        tpr, tnr = rates(clients)
        ba = rng.random()
        records.append(
            {
                **{"round": index, "attacked": attacked, "pdr": 0.5, "applied": True},
                **{"MA": rng.random(), "BA": ba, "TPR": tpr, "TNR": tnr, "threshold": None},
                "AUC": auc([c["score"] for c in scored], [c["malicious"] for c in scored]),
                **dict.fromkeys(("norm_ratio", "cosine", "benign_cosine"), 0.5),
                **{"BA_by_backdoor": {"0": ba}, "seconds": STEPS, "clients": clients},
            }
        )
    return records


def add_rounds(folder: Path, n_rounds: int = 4, n_clients: int = 6, seed: int = 0) -> list[Any]:
    """Write rounds.jsonl and the summary.json that follows from it; return the records."""
    records = round_lines(n_rounds, n_clients, seed)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "rounds.jsonl").write_text(lines)
    (folder / "summary.json").write_text(json.dumps(summarise(records) | PROVENANCE))
    seal(folder)
    return records


def add_runs(top: Path, *overrides: str, n_rounds: int = 4, n_clients: int = 6) -> list[Path]:
    """Create the finished runs of `-m *overrides`."""
    folders = add_sweep(top, *overrides)
    for number, folder in enumerate(folders):
        add_rounds(folder, n_rounds, n_clients, number)
    return folders


def add_many_runs(
    top: Path, *overrides: str, pmrs: Sequence[float], seeds: Sequence[int], size: tuple[int, int]
) -> list[Path]:
    """Create the runs of `-m *overrides` with each pmr and seed; `size` is rounds, clients.

    Composing takes most of the time, so that every setting is composed once.
    """
    first = add_sweep(top / "composed", *overrides)
    samples = []
    for number, folder in enumerate(first[:10]):
        add_rounds(folder, *size, number)
        samples.append([(folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json")])
    folders = []
    for number, (pmr, seed, folder) in enumerate(product(pmrs, seeds, first)):
        target = top / f"run{number:03}"
        target.mkdir()
        set_config(folder, target, pmr=pmr, seed=seed)
        origin = json.loads((folder / "origin.json").read_text())
        origin["changed"]["pmr"] = pmr
        (target / "origin.json").write_text(json.dumps(origin))
        seal(target)
        rounds, summary = samples[number * 7 % len(samples)]
        (target / "rounds.jsonl").write_bytes(rounds)
        (target / "summary.json").write_bytes(summary)
        seal(target)
        folders.append(target)
    shutil.rmtree(top / "composed")
    return folders


def set_config(folder: Path, target: Path, **settings: Any) -> None:
    """Write the config.yaml of a run to another folder, with other settings."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (target / "config.yaml").write_text(yaml.safe_dump(config | settings, sort_keys=False))
    seal(target)
