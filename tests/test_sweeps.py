"""The files of sweeps/paper and sweeps/beyond run, and reproduction reads what they leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end import fedbench_in_this_process, summary
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import fedbench
from fedbench.config import register_schema
from reproduction.__main__ import main
from reproduction.experiments import read_experiments
from reproduction.kept import ROUNDS_OF, SCORES_OF

ROOT = Path(fedbench.__file__).parent.parent
FILES = sorted(ROOT.glob("sweeps/*/*.yaml"))
TRAFFIC = {"backdoors", "pdr_traffic"}
SMALL = [
    *("tracker=none", "hydra/launcher=basic", "seed=41", "local_epochs=1"),
    *("rounds=2", "pretrain_rounds=1", "n_clients=5", "pool=null", "pmr=0.4"),
]
EXTRA = {
    "clients": ["n_clients=[3,5]", "pool=6"],
    "cifar10_model": ["n_clients=2", "pmr=0", "lr=0.01"],
    "durability": ["attack_rounds=[0]"],
    "table2_edge_case": [
        "dataset.backdoors=[{name: tail}]",
        "attack.edge_case.backdoors=[{name: tail}]",
    ],
}


def swept(path: Path) -> Iterator[str]:
    """The last value of each setting that the file sweeps over, on data that ships."""
    GlobalHydra.instance().clear()
    register_schema()
    with initialize_config_dir(str(path.parent), version_base="1.3"):
        found = ["hydra.searchpath=[pkg://fedbench.conf]"]
        params = compose(path.stem, found, return_hydra_config=True).hydra.sweeper.params
        last = {key: str(values).split(",")[-1].strip() for key, values in params.items()}
    GlobalHydra.instance().clear()
    last["dataset"] = "iot_sample" if path.stem in TRAFFIC else "fmnist_sample"
    small = {word.partition("=")[0] for word in [*SMALL, *EXTRA.get(path.stem, [])]}
    return (f"{key}={value}" for key, value in last.items() if key not in small)


@pytest.mark.slow
def test_every_file_runs_and_its_results_can_be_kept(tmp_path: Path) -> None:
    for path in FILES:
        words = ["--config-dir", str(path.parent), "--config-name", path.stem]
        words += [*SMALL, *swept(path), *EXTRA.get(path.stem, [])]
        ended = fedbench_in_this_process(*words, cwd=tmp_path)
        assert ended.code == 0, (path, ended)
        (run,) = tmp_path.glob(f"runs/{path.stem}/*/config.yaml")
        assert summary(run.parent)["status"] == "finished", path
    docs = tmp_path / "docs"
    assert main([str(tmp_path / "runs"), "--docs", str(docs)]) == 0
    shown = {sweep for experiment in read_experiments() for sweep in experiment.sweeps}
    assert {path.stem for path in FILES} == {*shown, "cifar10_model"}
    more = {
        *(f"{sweep}_rounds" for sweep in ROUNDS_OF),
        *(f"{sweep}_scores" for sweep in SCORES_OF),
    }
    assert {path.stem for path in (docs / "reproduction").glob("*")} == shown | more
    made = (docs / "reproduction.md").read_text("utf-8")
    assert "Not run yet" not in made
    for figure in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", made):
        assert (docs / figure).exists()
    for experiment in read_experiments():
        assert f"## {experiment.title}\n" in made


def test_runs_that_are_not_there_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere"), "--docs", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"reproduction: no folder {tmp_path / 'nowhere'}\n"
    assert [*tmp_path.iterdir()] == []
