"""docs/reproduction.md agrees with the results kept beside it, and shows every number."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

import reproduction
from fedbench.report.reported import SHIPPED, read_reported
from reproduction.claims import Verdict
from reproduction.experiments import read_experiments
from reproduction.kept import METRICS, SETTINGS, read
from reproduction.page import claims_in, clean_accuracies, page, runs_of

ROOT = Path(reproduction.__file__).parent.parent
DOCS = ROOT / "docs"
KEPT = DOCS / "reproduction"
EXPERIMENTS = read_experiments()


def test_the_page_is_made_from_the_kept_results() -> None:
    assert (DOCS / "reproduction.md").read_text("utf-8") == page(KEPT)


def test_the_page_follows_the_kept_results(tmp_path: Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    frame = pd.read_csv(tmp_path / "kept" / "table2.csv", keep_default_na=False, dtype=str)
    chosen = (frame["dataset"] == "fmnist") & (frame["defense"] == "baybfed")
    assert chosen.sum() >= 5
    frame.loc[chosen, "BA"] = "0.777"
    frame.to_csv(tmp_path / "kept" / "table2.csv", index=False)
    changed = page(tmp_path / "kept")
    assert "| `fmnist` | `baybfed` | 2 → 77.7 ✗" in changed
    assert "→ 77.7 ✗" not in page(KEPT)


def test_every_number_of_the_paper_is_on_the_page_once() -> None:
    shown = [where for experiment in EXPERIMENTS for where in experiment.where]
    assert sorted(shown) == sorted({value.where for value in read_reported([SHIPPED])})
    n_numbers = sum(len(value.metrics) for value in read_reported([SHIPPED]))
    total = re.search(r"\| \*\*all\*\* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page(KEPT))
    assert total is not None
    n, *by_verdict = map(int, total.groups())
    assert n == n_numbers == sum(by_verdict)


def test_every_sweep_is_on_the_page_and_exists() -> None:
    files = [(f"sweeps/{path.parent.name}", path.stem) for path in ROOT.glob("sweeps/*/*.yaml")]
    shown = [(e.folder, sweep) for e in EXPERIMENTS for sweep in e.sweeps]
    assert {*shown} == {*files} - {("sweeps/paper", "cifar10_model")}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.title)
def test_numbers_that_differ_have_a_reason(experiment: reproduction.experiments.Experiment) -> None:
    claims = claims_in(experiment, KEPT, clean_accuracies(KEPT))
    unexplained = [
        (claim.reported.dataset, claim.reported.defense, claim.metric)
        for claim in claims
        if claim.agreement in (Verdict.PARTLY, Verdict.NOT) and not experiment.why(claim)
    ]
    assert unexplained == []


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.csv")), ids=lambda path: path.stem)
def test_kept_runs_are_whole(path: Path) -> None:
    """Rates are rates, every run has a seed that was used for no choice, a commit and an id."""
    frame = read(KEPT, path.stem)
    assert len(frame)
    assert frame["seed"].isin(range(41, 46)).all()
    if "_rounds" in path.stem or "_scores" in path.stem:
        assert frame["run"].isin(read(KEPT, path.stem.rpartition("_")[0])["run"]).all()
        return
    assert {*SETTINGS, *METRICS} <= {*frame}
    assert frame["run"].is_unique
    assert frame["commit"].astype(str).str.fullmatch(r"[0-9a-f]{10}").all()
    assert frame["MA"].between(0, 1).all()


def test_figures_on_the_page_exist() -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page(KEPT)):
        assert (DOCS / name).read_text("utf-8").startswith("<?xml")


def test_runs_of_several_sweeps_count_once() -> None:
    for experiment in EXPERIMENTS:
        assert runs_of(experiment, KEPT)["run"].is_unique
