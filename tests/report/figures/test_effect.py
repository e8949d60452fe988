"""Effect of a setting: means, t-intervals and seeds at the values; places of values."""

from __future__ import annotations

import math

import pytest
from figure_data import STRANGE, assert_nothing_is_cut_off, legend_texts, markers, report, run
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from scipy import stats  # type: ignore[import-untyped]

from fedbench.report.figures.effect import MAX_SETTINGS, ValueAxis, effect, effect_drawings
from fedbench.report.report_data import SweptKey


def intervals(axes: Axes) -> list[tuple[float, float, float]]:
    """x, low and high of the vertical bars."""
    lines = [c for c in axes.collections if isinstance(c, LineCollection)]
    segments = [segment for c in lines for segment in c.get_segments()]
    return [(float(a[0]), float(a[1]), float(b[1])) for a, b in segments]


def test_means_intervals_and_seeds_equal_the_runs() -> None:
    values = {0.1: [0.2, 0.3, 0.7], 0.5: [0.5, 0.6, 0.55]}
    data = report(
        *(
            run("krum", s, BA=v, settings={"pmr": p})
            for p, vs in values.items()
            for s, v in enumerate(vs)
        ),
        run("krum", 3, status="failed", settings={"pmr": 0.5}),
        run("flame", 0, BA=0.9, MA=0.5, settings={"pmr": 0.1}),
    )
    figure = effect(data, data.swept[0])
    assert figure is not None
    ba, ma = figure.axes
    assert (ba.get_ylabel(), ma.get_ylabel(), ba.get_xlabel()) == ("BA (%)", "MA (%)", "pmr")
    krum = data.styles["krum"]
    points = markers(ba, krum.color, krum.marker)
    assert [y for _, y in points] == pytest.approx([40, 55])
    assert [x for x, _ in points] == pytest.approx([0.1, 0.5], abs=0.06)
    assert [y for _, y in markers(ba, krum.color, ".")] == pytest.approx([20, 30, 70, 50, 60, 55])
    found = intervals(ba)
    for (_, low, high), seeds in zip(found, values.values(), strict=False):
        mean, error = sum(seeds) / 3, float(stats.sem(seeds))
        ends = stats.t.interval(0.95, 2, loc=mean, scale=error)
        assert (low, high) == pytest.approx([100 * min(max(end, 0), 1) for end in ends])
    assert found[2][1:] == pytest.approx((90, 90))  # one seed has no interval
    assert legend_texts(figure) == ["krum", "flame"]
    assert_nothing_is_cut_off(figure)


def test_other_settings_are_rows_of_panels_and_the_rest_is_named() -> None:
    attacks = [f"attack{i}" for i in range(MAX_SETTINGS + 1)]
    data = report(
        *(run("krum", BA=p, settings={"pmr": p, "attack": a}) for a in attacks for p in (0.1, 0.2)),
        run("krum", BA=0.5, settings={"pmr": 0.1, "attack": "only_once"}),
    )
    pmr = next(key for key in data.swept if key.name == "pmr")
    figure = effect(data, pmr)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == attacks[:MAX_SETTINGS]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "", "pmr"]
    assert_nothing_is_cut_off(figure)
    captions = {drawing.name: drawing.caption for drawing in effect_drawings(data)}
    assert {*captions} == {"effect_of_attack", "effect_of_pmr"}
    assert captions["effect_of_pmr"].endswith(f"Not shown: {attacks[-1]}.")


def test_names_are_places_side_by_side_without_lines() -> None:
    data = report(*(run("krum", BA=0.5, settings={"attack": a}) for a in ["dba", *STRANGE]))
    figure = effect(data, data.swept[0])
    assert figure is not None
    (axes,) = figure.axes
    line = next(line for line in axes.lines if line.get_marker() == data.styles["krum"].marker)
    assert line.get_linestyle() == "None"
    places = sorted(
        round(x) for x, _ in markers(axes, data.styles["krum"].color, line.get_marker())
    )
    assert places == [*range(7)]
    labels = {label.get_text().replace("\n", "") for label in axes.get_xticklabels()}
    assert {"dba", "$x^2$"} <= labels
    assert_nothing_is_cut_off(figure)


def test_values_of_several_magnitudes_are_logarithmic() -> None:
    """Defenses are spread evenly on the axis as it is seen: 0.001, 0.01, 0.1 times one factor."""
    key = SweptKey("noise", ["0.001", "0.01", "0.1"], [0.001, 0.01, 0.1])
    axis = ValueAxis.of(key)
    assert axis.is_logarithmic
    factors = {round(axis.shifted(label, 0.5) / float(label), 9) for label in key.labels}
    assert len(factors) == 1
    assert 1 < factors.pop() < math.sqrt(10)
    assert not ValueAxis.of(SweptKey("pmr", ["0.0", "0.5"], [0.0, 0.5])).is_logarithmic


def test_no_finished_run_is_no_figure() -> None:
    data = report(*(run("krum", status="running", settings={"pmr": p}) for p in (0.1, 0.2)))
    assert effect(data, data.swept[0]) is None
    assert effect_drawings(report(run("krum", BA=0.1))) == []
