"""The scripts in examples/ run as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from handmade_runs import seal
from pages import run
from sweep_folders import add_sweep

import fedbench

ROOT = Path(fedbench.__file__).parent.parent


@pytest.mark.slow
def test_sweep_to_figure(tmp_path: Path) -> None:
    top = tmp_path / "runs" / "figures"
    folders = add_sweep(top, "defense=median,flame", "pmr=0.2,0.5", "seed=0,1")
    client = {"id": 3, "malicious": True, "accepted": False, "score": 1.0, "weight": 0.0}
    record = {"round": 0, "attacked": True, "BA": 0.5, "seconds": {"train": 1.0}}
    for folder in folders:
        line = json.dumps({**record, "clients": [client]})
        (folder / "rounds.jsonl").write_text(f"{line}\n")
        seal(folder)
    script = ROOT / "examples" / "sweep_to_figure.py"
    done = run(f"{script} {top}", tmp_path, path=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    assert "flame" in done.stdout
    for name in ("ba_by_pmr.pdf", "ba_by_round.pdf"):
        assert (top / name).read_bytes().startswith(b"%PDF")


def test_examples_have_cells() -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert scripts
    assert all("\n# %% " in script.read_text("utf-8") for script in scripts)
