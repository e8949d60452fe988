"""The scripts and sweeps in examples/ run as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from end_to_end import run_folders, succeed, summary
from handmade_runs import seal
from pages import run
from sweep_folders import add_sweep

import fedbench

ROOT = Path(fedbench.__file__).parent.parent
BATCH_NORM = ROOT / "examples" / "batch_norm"
# Settings that make the sweeps of BATCH_NORM small, and need no files
SMALL_SWEEPS = {
    "cost": ["defense=krum,krum_mean"],
    "cost_cifar10": [
        *("defense=foolsgold,foolsgold_mean", "dataset=fmnist_sample"),
        *("model=custom", "model.target=net.py:Net"),
    ],
    "shifted": [
        *("defense=flame,flame_mean", "attack.scale=1.1", "pmr=0.4"),
        *("n_clients=10", "local_epochs=2"),
    ],
}


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


def test_every_sweep_of_batch_norm_is_tried() -> None:
    assert {path.stem for path in (BATCH_NORM / "sweeps").glob("*")} == SMALL_SWEEPS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_SWEEPS)
def test_batch_norm(tmp_path: Path, name: str) -> None:
    """Shifted statistics ruin the model if they are averaged, and only then."""
    folder = tmp_path / "batch_norm"
    shutil.copytree(BATCH_NORM, folder)
    settings = ["seed=0", "hydra/launcher=basic", "rounds=2", *SMALL_SWEEPS[name]]
    succeed("--config-dir", "sweeps", "--config-name", name, *settings, cwd=folder)
    ma = {run.name.rpartition("-")[0]: summary(run)["MA"] for run in run_folders(folder / "runs")}
    assert len(ma) == 2
    if name == "shifted":
        assert ma["flame"] > ma["flame_mean"] + 0.3
