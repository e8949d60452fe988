"""Runs against the benign run of the same seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import a_run

from fedbench.report.benign_pairs import with_benign_pairs
from fedbench.results.run_reader import RunResult
from fedbench.results.run_rounds import RunRounds

ATTACKED = [True, True, False, False, False]  # the attack ends with round 1
USUAL = [0.50, 0.60, 0.70, 0.75, 0.80]  # MA of the benign run


def benign(seed: int = 0, **given: Any) -> RunResult:
    return a_run("fedavg", seed, attack="none", **{"MA": 0.8, **given})


def a_rounds(attacked: Sequence[bool], main_accuracies: Sequence[float | None]) -> RunRounds:
    n = len(attacked)
    return RunRounds([*range(n)], [*attacked], {"MA": [*main_accuracies]}, {}, [])


def lost(*runs: RunResult) -> list[float | None]:
    return [run.metrics["MA_lost"] for run in with_benign_pairs(runs, {})]


def recovered(
    attacked: Sequence[bool], main_accuracies: Sequence[float | None], usual: Sequence[float | None]
) -> RunResult:
    """Return a run with these rounds, paired with a benign run."""
    pair, run = benign(), a_run("krum")
    rounds: Mapping[Path, RunRounds] = {
        pair.folder: a_rounds([False] * len(usual), usual),
        run.folder: a_rounds(attacked, main_accuracies),
    }
    return with_benign_pairs([pair, run], rounds)[1]


def test_ma_lost_by_hand() -> None:
    # 0.80 - 0.75 = 0.05 with seed 0, 0.82 - 0.85 = -0.03 with seed 1
    runs = [
        benign(0, MA=0.80),
        benign(1, MA=0.82),
        a_run("krum", 0, MA=0.75),
        a_run("krum", 1, MA=0.85),
    ]
    assert lost(*runs) == pytest.approx([0, 0, 0.05, -0.03])
    assert lost(*reversed(runs)) == pytest.approx([-0.03, 0.05, 0, 0])


def test_the_cost_of_a_defense_without_an_attack() -> None:
    assert lost(benign(MA=0.8), a_run("flame", attack="none", MA=0.7)) == pytest.approx([0, 0.1])


@pytest.mark.parametrize(
    "attack",
    [
        {"pdr": 0.9, "pdr_step": 0.1, "pdr_end": 1.0},
        {"attack_start": 3, "attack_rounds": [3, 4], "malicious": "sampled", "pmr": 0.4},
        {"attack": {"name": "dba", "parts": 4}, "defense.m": 5},
        {"dataset": {"name": "mnist", "backdoors": [{"name": "patch"}], "root": "/data"}},
        {"name": "demo", "tracker": {"name": "wandb", "project": "p"}},
    ],
)
def test_settings_of_the_attack_do_not_matter(attack: dict[str, Any]) -> None:
    assert lost(benign(), a_run("krum", MA=0.7, **attack))[1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"rounds": 20},
        {"non_iid": 0.9},
        {"pretrained": "model.pt"},
        {"dataset": {"name": "fmnist"}},
        {"lr": 0.1},
    ],
)
def test_other_settings_are_no_pair(other: dict[str, Any]) -> None:
    assert lost(benign(), a_run("krum", **other)) == [0, None]


@pytest.mark.parametrize("run", [a_run("fedavg"), a_run("median", attack="none")])
def test_only_fedavg_without_an_attack_is_benign(run: RunResult) -> None:
    assert lost(run) == [None]


def test_without_results_there_is_no_pair() -> None:
    runs = [a_run("fedavg", attack="none", status="running"), a_run("krum")]
    first, second = with_benign_pairs(runs, {})
    assert first == runs[0]
    assert second.metrics["MA_lost"] is second.metrics["recovery"] is None
    assert lost(benign(MA=None), a_run("krum")) == [None, None]


def test_of_several_benign_runs_that_with_the_same_clients_counts() -> None:
    # pmr decides who takes part in a round of a larger pool.
    runs = [benign(MA=0.8, pmr=0.2), benign(MA=0.9, pmr=0.3)]
    assert lost(*runs, a_run("krum", MA=0.7, pmr=0.2))[2] == pytest.approx(0.1)
    assert lost(*runs, a_run("krum", MA=0.7, pmr=0.5))[2] == pytest.approx(0.2)


def test_of_the_same_benign_run_the_newest_counts() -> None:
    runs = [benign(MA=0.8, folder="runs/old"), benign(MA=0.9, folder="runs/new")]
    assert lost(*runs, a_run("krum", MA=0.7))[2] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("main_accuracies", "rounds", "censored"),
    [
        # The last attacked round is 1. Round 1 + k is the first within 1 point: k rounds.
        ([0.1, 0.59, 0.10, 0.10, 0.10], 0, False),  # 60 - 59 is 1 point, also in floating point
        ([0.5, 0.58, 0.70, 0.10, 0.10], 1, False),
        ([0.5, 0.10, 0.60, 0.90, 0.10], 2, False),  # better than the benign run
        ([0.5, 0.10, 0.60, 0.70, 0.79], 3, False),
        ([0.5, 0.10, 0.60, 0.70, 0.78], 3, True),
        ([None, 0.10, None, None, 0.80], 3, False),  # evaluate_every
    ],
)
def test_recovery_by_hand(main_accuracies: list[float | None], rounds: int, censored: bool) -> None:
    run = recovered(ATTACKED, main_accuracies, USUAL)
    assert run.metrics["recovery"] == rounds
    assert run.censored == {*["recovery"] * censored}


@pytest.mark.parametrize(
    ("attacked", "usual"),
    [
        ([False] * 5, USUAL),  # no attack
        ([False] * 4 + [True], USUAL),  # no round after it
        (ATTACKED, [None] * 5),
    ],
)
def test_nothing_to_recover_from(attacked: list[bool], usual: list[float | None]) -> None:
    run = recovered(attacked, [0.1] * 5, usual)
    assert run.metrics["recovery"] is None
    assert run.censored == frozenset()


def test_lifespans_remain_lower_bounds() -> None:
    runs = [benign(), a_run("krum", lifespan_50=3, censored=["lifespan_50"])]
    rounds = {run.folder: a_rounds(ATTACKED, [0.1 * i] * 5) for i, run in enumerate(runs)}
    assert with_benign_pairs(runs, rounds)[1].censored == {"lifespan_50"}
    rounds = {run.folder: a_rounds(ATTACKED, [0.9 - i] * 5) for i, run in enumerate(runs)}
    assert with_benign_pairs(runs, rounds)[1].censored == {"lifespan_50", "recovery"}


def test_thousands_of_runs_are_paired_at_once() -> None:
    more = {f"setting{i}": i for i in range(40)}
    runs = [a_run("krum", seed, MA=0.7, **more) for seed in range(2000)]
    runs += [benign(seed, **more) for seed in range(2000)]
    start = time.process_time()
    found = with_benign_pairs(runs, {})
    assert time.process_time() - start < 4  # 0.2 s; to compare all pairs of runs takes minutes
    assert all(run.metrics["MA_lost"] is not None for run in found)
