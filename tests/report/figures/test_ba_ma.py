"""BA against MA: dots are seeds, markers are means, the front is the Pareto front."""

from __future__ import annotations

import random

import pytest
from figure_data import STRANGE, assert_nothing_is_cut_off, legend_texts, markers, report, run
from matplotlib.axes import Axes

from fedbench.report.figures.ba_ma import MAX_PANELS, ba_ma, ba_ma_drawings, pareto_front
from fedbench.report.plotting import GRAY


def front(axes: Axes) -> list[tuple[float, float]]:
    return markers(axes, GRAY, "o")


@pytest.mark.parametrize("seed", range(20))
def test_the_front_has_every_point_that_none_beats(seed: int) -> None:
    """By brute force on a coarse grid, with ties: higher MA and lower BA are better."""
    rng = random.Random(seed)
    points = {str(i): (rng.randrange(6) / 1.0, rng.randrange(6) / 1.0) for i in range(12)}
    expected = set()
    for ma, ba in points.values():
        beaten = False
        for other_ma, other_ba in points.values():
            as_good = other_ma >= ma and other_ba <= ba
            better = other_ma > ma or other_ba < ba
            beaten = beaten or (as_good and better)
        if not beaten:
            expected.add((ma, ba))
    found = pareto_front(points)
    assert {*found} == expected
    assert found == sorted(found)


def test_seeds_are_dots_and_means_are_markers() -> None:
    data = report(
        run("krum", 0, BA=0.1, MA=0.8),
        run("krum", 1, BA=0.3, MA=0.9),
        run("krum", 2, status="unfinished"),
        run("flame", 0, BA=0.5, MA=0.95),
        run("afa", 0, BA=0.6, MA=0.9),
        run("dp", 0, MA=0.9),
    )
    figure = ba_ma(data)
    assert figure is not None
    (axes,) = figure.axes
    krum = data.styles["krum"]
    assert markers(axes, krum.color, ".") == [
        pytest.approx((80, 10)),
        pytest.approx((90, 30)),
    ]
    assert markers(axes, krum.color, krum.marker) == [pytest.approx((85, 20))]
    assert front(axes) == [pytest.approx((85, 20)), pytest.approx((95, 50))]
    assert legend_texts(figure) == ["krum", "flame", "afa", "Pareto front"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("MA (%)", "BA (%)")
    assert axes.get_ylim() == (-4, 104)
    low, high = axes.get_xlim()
    assert low < 80
    assert high > 95
    assert_nothing_is_cut_off(figure)


def test_each_setting_is_a_panel_and_the_rest_is_named() -> None:
    values = [i / 100 for i in range(1, MAX_PANELS + 3)]
    data = report(*(run("krum", BA=p, MA=0.8, settings={"pmr": p}) for p in values))
    figure = ba_ma(data)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"pmr {p}" for p in values[:MAX_PANELS]
    ]
    assert [front(axes)[0][1] for axes in figure.axes] == pytest.approx(
        [100 * p for p in values[:MAX_PANELS]]
    )
    assert ba_ma_drawings(data)[0].caption.endswith("Not shown: pmr 0.09; pmr 0.1.")
    assert_nothing_is_cut_off(figure)


def test_no_finished_run_is_no_figure() -> None:
    assert ba_ma(report(run("krum", status="failed"), run("flame", MA=0.5))) is None
    assert ba_ma(report()) is None


def test_many_defenses_with_strange_names_fit() -> None:
    names = STRANGE + [f"defense{i}" for i in range(19)]
    figure = ba_ma(report(*(run(name, BA=0.5, MA=0.5) for name in names)))
    assert figure is not None
    assert "$x^2$" in legend_texts(figure)
    assert_nothing_is_cut_off(figure)
