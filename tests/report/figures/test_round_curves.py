"""Curves over rounds: means, bands from the lowest to the highest seed, attacked rounds."""

from __future__ import annotations

import pytest
from figure_data import assert_nothing_is_cut_off, legend_texts, markers, report, rounds, run
from matplotlib.collections import PolyCollection

from fedbench.report.figures.round_curves import (
    MAX_SETTINGS,
    attacked_rounds,
    mean_curve,
    round_curves,
    round_drawings,
)


def test_mean_and_range_of_the_seeds_that_measured_a_round() -> None:
    first = rounds(BA=[0.1, None, 0.3])
    second = rounds(BA=[0.3, None, 0.5, 0.9])
    assert mean_curve([first, second], "BA") == [
        (0, *map(pytest.approx, (20, 10, 30))),
        (2, *map(pytest.approx, (40, 30, 50))),
        (3, *map(pytest.approx, (90, 90, 90))),
    ]
    assert mean_curve([first], "TPR") == []
    assert mean_curve([rounds(BA=[float("nan"), 0.5])], "BA") == [(1, 50, 50, 50)]


def test_attacked_rounds_are_stretches() -> None:
    one = rounds(n=7, attacked=[False, True, True, False, False, False, True])
    other = rounds(n=7, attacked=[False, False, True, True, False, False, False])
    assert attacked_rounds([one, other]) == [(1, 3), (6, 6)]
    assert attacked_rounds([rounds(n=2, attacked=[False, False])]) == []


def test_lines_bands_and_shades_are_drawn() -> None:
    data = report(
        run("krum", 0, rounds(BA=[0.1, 0.2], MA=[0.7, 0.8], attacked=[False, True]), BA=1),
        run("krum", 1, rounds(BA=[0.3, 0.6], MA=[0.7, 0.8], attacked=[False, True]), BA=1),
        run("krum", 2, rounds(BA=[1.0, 1.0], MA=[0.1, 0.1]), status="failed"),
        run("flame", 0, rounds(BA=[0.5], TPR=[1.0]), status="running"),
        run("afa", 0, None, BA=0.5),
    )
    figure = round_curves(data, data.rows)
    assert figure is not None
    ba, ma, tpr = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["BA (%)", "MA (%)", "TPR (%)"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"round"}
    krum, flame = data.styles["krum"], data.styles["flame"]
    assert markers(ba, krum.color, krum.marker) == [pytest.approx((0, 20)), pytest.approx((1, 40))]
    assert markers(ba, flame.color, flame.marker) == [(0, 50)]  # so far
    assert markers(tpr, krum.color, krum.marker) == []
    (band,) = (c for c in ba.collections if isinstance(c, PolyCollection))
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(0, 10), (0, 30), (1, 20), (1, 60)}
    assert not ma.collections  # both seeds are the same
    (shade, *_) = ba.patches
    box = shade.get_extents().transformed(ba.transData.inverted())
    assert (box.x0, box.x1) == pytest.approx((-0.5, 1.5))  # flame's only round was attacked
    assert legend_texts(figure) == ["krum", "flame", "attacked rounds"]
    assert_nothing_is_cut_off(figure)


def test_each_setting_has_a_figure_and_the_rest_is_named() -> None:
    values = [i / 10 for i in range(1, MAX_SETTINGS + 3)]
    data = report(*(run("krum", 0, rounds(BA=[p]), settings={"pmr": p}) for p in values))
    drawings = round_drawings(data)
    assert [d.name for d in drawings] == [f"rounds_pmr_{p}" for p in values[:MAX_SETTINGS]]
    assert "Not shown: pmr 0.7; pmr 0.8." in drawings[0].caption
    second = drawings[1].draw()
    assert second is not None
    krum = data.styles["krum"]
    assert markers(second.axes[0], krum.color, krum.marker) == [pytest.approx((0, 20))]


def test_nothing_measured_is_no_figure() -> None:
    data = report(
        run("krum", 0, None, BA=1), run("flame", 0, rounds(n=0)), run("afa", 0, rounds(n=3))
    )
    assert round_curves(data, data.rows) is None
    assert [d.name for d in round_drawings(data)] == ["rounds"]
