"""Scores of clients in the last attacked round: shape, fill, threshold or gap."""

from __future__ import annotations

from typing import Any

import pytest
from figure_data import assert_nothing_is_cut_off, legend_texts, report, rounds, run, verdicts
from matplotlib.axes import Axes

from fedbench.report.figures.score_panels import (
    BENIGN,
    GAP,
    MAX_PANELS,
    last_scored,
    score_dots,
    score_drawings,
    score_panels,
)
from fedbench.report.plotting import RED
from fedbench.results.run_rounds import Verdicts

TRUTH = [True, False, False, True]
SCORES = [0.9, 0.1, 0.6, 0.2]
ONE = verdicts(TRUTH, SCORES, [False, True, False, True], clients=[4, 8, 2, 6])


def drawn(verdict: Verdicts) -> Axes:
    data = report(run("krum", 0, rounds([verdict]), BA=0.1))
    figure = score_panels(data, data.rows)
    assert figure is not None
    assert_nothing_is_cut_off(figure)
    return figure.axes[0]


def dots(axes: Axes) -> dict[tuple[Any, ...], list[tuple[float, float]]]:
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for line in axes.lines:
        if line.get_marker() in ("o", "^"):
            points = zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
            look = line.get_marker(), line.get_color(), line.get_markerfacecolor() != "white"
            found[look] = [(float(x), float(y)) for x, y in points]
    return found


def test_benign_clients_come_first_each_in_order_of_ids() -> None:
    assert score_dots(ONE) == [
        (0, 0.6, False, False),
        (1, 0.1, False, True),
        (2, 0.9, True, False),
        (3, 0.2, True, True),
    ]


def test_clients_without_a_finite_score_are_left_out() -> None:
    one = verdicts([True, False, False], [None, float("inf"), 1.0])
    assert score_dots(one) == [(0, 1.0, False, None)]


def test_shape_is_truth_and_open_is_rejected() -> None:
    assert dots(drawn(ONE)) == {
        ("o", BENIGN, False): [(0, 0.6)],
        ("o", BENIGN, True): [(1, 0.1)],
        ("^", RED, False): [(2, 0.9)],
        ("^", RED, True): [(3, 0.2)],
    }


def test_the_gap_between_verdicts_is_shaded() -> None:
    """Accepted at most 0.2, rejected at least 0.6."""
    axes = drawn(ONE)
    (band,) = axes.patches
    box = band.get_extents().transformed(axes.transData.inverted())
    assert (box.y0, box.y1) == pytest.approx((0.2, 0.6))
    from matplotlib.colors import to_hex

    assert to_hex(band.get_facecolor()) == GAP


def test_a_threshold_is_a_dashed_line() -> None:
    one = verdicts(TRUTH, SCORES, [False, True, False, True], threshold=0.5)
    data = report(run("krum", 0, rounds([one]), BA=0.1))
    figure = score_panels(data, data.rows)
    assert figure is not None
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "None"]
    assert [[float(y) for y in line.get_ydata()] for line in lines] == [[0.5, 0.5]]  # type: ignore[union-attr]
    assert legend_texts(figure) == [
        "benign, accepted",
        "benign, rejected",
        "malicious, accepted",
        "malicious, rejected",
        "threshold",
    ]


def test_no_line_if_verdicts_do_not_follow_the_scores() -> None:
    axes = drawn(verdicts(TRUTH, SCORES, [True, False, False, True]))
    assert len(axes.patches) == 0
    assert {line.get_marker() for line in axes.lines} == {"o", "^"}


def test_scores_of_several_magnitudes_are_logarithmic() -> None:
    assert drawn(verdicts(TRUTH, [1e-4, 1.0, 2.0, 3.0])).get_yscale() == "log"
    assert drawn(verdicts(TRUTH, [0.0, 1.0, 2.0, 300.0])).get_yscale() == "linear"


def test_the_last_attacked_round_with_scores_is_shown() -> None:
    scored = [verdicts([True], [float(i)]) for i in range(3)]
    none = verdicts([True])
    assert last_scored(rounds(scored, attacked=[True, True, False])) == scored[1]
    assert last_scored(rounds([*scored, none])) == scored[2]
    assert last_scored(rounds(scored, attacked=[False] * 3)) == scored[2]
    assert last_scored(rounds([none])) is None


def test_settings_are_panels_side_by_side_and_the_rest_is_named() -> None:
    values = [i / 10 for i in range(1, MAX_PANELS + 2)]
    data = report(*(run("krum", 0, rounds([ONE]), settings={"pmr": p}) for p in values))
    (drawing,) = score_drawings(data)
    assert drawing.caption.endswith("Not shown: pmr 0.7.")
    figure = drawing.draw()
    assert figure is not None
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"pmr {p}" for p in values[:MAX_PANELS]]
    assert_nothing_is_cut_off(figure)


def test_a_defense_without_scores_has_no_figure() -> None:
    judged = rounds([verdicts([True], accepted=[False])])
    data = report(run("median", 0, judged, BA=0.1), run("krum", 0, None, BA=0.1))
    assert [drawing.draw() for drawing in score_drawings(data)] == [None, None]
