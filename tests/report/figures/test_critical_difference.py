"""Critical-difference diagram: markers at the mean ranks, bars over the cliques."""

from __future__ import annotations

import pytest
from figure_data import STRANGE, assert_nothing_is_cut_off, markers, report, run
from matplotlib.figure import Figure

from fedbench.report.defense_styles import defense_styles
from fedbench.report.figures.critical_difference import (
    critical_difference,
    critical_difference_drawings,
    ranked,
)
from fedbench.report.plotting import BLACK
from fedbench.report.rank_test import RankComparison


def ranking(names: list[str], ranks: list[float], cliques: list[list[str]]) -> RankComparison:
    return RankComparison(
        names=tuple(names),
        mean_ranks=dict(zip(names, ranks, strict=True)),
        n_blocks=9,
        statistic=1.0,
        p=0.01,
        pair_p={},
        cliques=tuple(tuple(clique) for clique in cliques),
        dropped=(),
    )


def bars(figure: Figure) -> list[tuple[float, float, float]]:
    """Left end, right end and height of the thick bars."""
    lines = [line for line in figure.axes[0].lines if line.get_color() == BLACK]
    return [(*map(float, line.get_xdata()), float(line.get_ydata()[0])) for line in lines]  # type: ignore[arg-type, index, misc]


def test_ranks_names_and_bars_equal_the_comparison() -> None:
    names, ranks = ["a", "b", "c", "d"], [1.2, 1.8, 3.0, 4.0]
    styles = defense_styles(names)
    figure = critical_difference(ranking(names, ranks, [["a", "b"], ["b", "c"]]), styles)
    (axes,) = figure.axes
    for name, rank in zip(names, ranks, strict=True):
        assert markers(axes, styles[name].color, styles[name].marker) == [(rank, 0)]
    first, second = bars(figure)
    assert first[:2] == pytest.approx((1.2, 1.8), abs=0.06)
    assert second[:2] == pytest.approx((1.8, 3.0), abs=0.06)
    assert first[2] != second[2]  # bars do not hide each other
    texts = {text.get_text(): text.xy for text in axes.texts}  # type: ignore[attr-defined]
    assert [*texts] == names
    assert [texts[name][0] for name in names] == [1, 1, 4, 4]  # better half on the left
    assert texts["a"][1] < texts["b"][1]
    assert texts["d"][1] < texts["c"][1]  # y grows downwards: the worst is on top
    assert axes.get_xlim() == (1, 4)
    assert axes.get_xlabel() == "mean rank"
    assert_nothing_is_cut_off(figure)


@pytest.mark.parametrize("n", [3, 12, 25])
def test_any_number_of_defenses_fits(n: int) -> None:
    names = [*STRANGE, *(f"defense{i}" for i in range(n))][:n]
    ranks = [1 + i for i in range(n)]
    figure = critical_difference(
        ranking(names, [*map(float, ranks)], [names]), defense_styles(names)
    )
    assert_nothing_is_cut_off(figure)
    assert len(figure.axes[0].texts) == n
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_blocks_are_settings_and_values_are_means_over_seeds() -> None:
    """BA: a < b < c in both settings, from means; the failed run of c leaves its other seed."""
    values = {"a": 0.1, "b": 0.2, "c": 0.3}
    runs = [
        run(name, seed, BA=ba + 0.5 * seed, MA=1 - ba, settings={"pmr": p})
        for p in (0.1, 0.5)
        for name, ba in values.items()
        for seed in (0, 1)
    ]
    data = report(*runs)
    ranks = ranked(data, "BA")
    assert ranks is not None
    assert ranks.mean_ranks == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert ranks.n_blocks == 2
    assert ranked(data, "MA") == ranked(data, "MA")
    drawings = critical_difference_drawings(data)
    assert [d.name for d in drawings] == ["critical_difference_BA", "critical_difference_MA"]
    assert "over 2 settings" in drawings[0].caption
    assert all(drawing.draw() is not None for drawing in drawings)
    higher = ranked(data, "MA")
    assert higher is not None
    assert higher.mean_ranks == {"a": 1.0, "b": 2.0, "c": 3.0}  # a has the highest MA


def test_too_few_settings_have_no_diagram() -> None:
    assert critical_difference_drawings(report(*(run(n, BA=0.1, MA=0.5) for n in "abc"))) == []
