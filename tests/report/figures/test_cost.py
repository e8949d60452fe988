"""Cost: seconds per round by defense; runs of different work are not mixed."""

from __future__ import annotations

import pytest
from figure_data import STRANGE, assert_nothing_is_cut_off, markers, report, rounds, run

from fedbench.report.figures.cost import cost, cost_drawings, costly_keys


def test_seconds_are_per_round_by_run_and_on_average() -> None:
    """4 s in 2 rounds and 20 s in 4 rounds: 2 s and 5 s per round, 3.5 on average."""
    data = report(
        run("krum", 0, rounds(n=2, seconds={"aggregate": 4.0, "train": 8.0}), BA=0.1),
        run("krum", 1, rounds(n=4, seconds={"aggregate": 20.0, "train": 4.0}), BA=0.1),
        run("krum", 2, rounds(n=9, seconds={"aggregate": 900.0}), status="failed"),
        run("flame", 0, rounds(n=1, seconds={"aggregate": 1.0}), status="running"),
        run("afa", 0, None, BA=0.1),
    )
    figure = cost(data)
    assert figure is not None
    aggregate, train = figure.axes
    krum, flame = data.styles["krum"], data.styles["flame"]
    assert markers(aggregate, krum.color, ".") == [(2, 0), (5, 0)]
    assert markers(aggregate, krum.color, krum.marker) == [(3.5, 0)]
    assert markers(aggregate, flame.color, flame.marker) == [(1, 1)]
    assert markers(train, krum.color, krum.marker) == [(2.5, 0)]
    assert markers(train, flame.color, flame.marker) == []
    assert [label.get_text() for label in aggregate.get_yticklabels()] == ["krum", "flame"]
    assert aggregate.get_ylim()[0] > aggregate.get_ylim()[1]  # the first defense is on top
    assert aggregate.get_xlabel() == "aggregation (s per round)"
    assert train.get_xlabel() == "training (s per round)"
    assert aggregate.get_xlim()[0] == 0
    assert_nothing_is_cut_off(figure)


def test_very_different_costs_are_logarithmic() -> None:
    data = report(
        *(
            run(f"d{i}", 0, rounds(n=1, seconds={"aggregate": 10.0**i, "train": 1.0}))
            for i in range(4)
        )
    )
    figure = cost(data)
    assert figure is not None
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear"]
    figure.draw_without_rendering()
    texts = {label.get_text() for label in figure.axes[0].get_xticklabels()}
    assert {"1", "10", "100", "1000"} <= texts


def test_data_sets_are_panels_and_attacks_are_not() -> None:
    made = rounds(n=1)
    data = report(
        *(
            run("krum", 0, made, settings={"dataset": d, "attack": a, "pmr": p})
            for d in ("one", "two")
            for a in ("dba", "edge")
            for p in (0.1, 0.2)
        )
    )
    assert costly_keys(data) == ["dataset"]
    figure = cost(data)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one", "", "two", ""]
    assert len(markers(figure.axes[0], data.styles["krum"].color, ".")) == 4


def test_no_rounds_is_no_figure() -> None:
    (drawing,) = cost_drawings(report(run("krum", 0, None, BA=0.1)))
    assert drawing.draw() is None
    assert cost(report()) is None


def test_strange_names_fit() -> None:
    figure = cost(report(*(run(name, 0, rounds(n=1)) for name in STRANGE)))
    assert figure is not None
    assert_nothing_is_cut_off(figure)
    assert figure.axes[0].get_yticks() == pytest.approx([*range(len(STRANGE))])
