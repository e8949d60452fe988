"""Layout: measured text, shortened names, places of panels, legends."""

from __future__ import annotations

import pytest
from figure_data import legend_texts
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedbench.report.figures.layout import (
    Legend,
    Margins,
    balanced,
    fit,
    fixed_grid,
    inches,
    is_lowest,
    plain_number,
    short_names,
    shorten,
    text_width,
    wrap,
)
from fedbench.report.plotting import PAPER_STYLE, plot_style


@pytest.mark.parametrize("text", ["x", "constrain_and_scale alpha=0.5", "100.0", "$x^2$"])
@pytest.mark.parametrize("size", [5.0, 7.0])
def test_measured_text_is_as_wide_as_drawn(text: str, size: float) -> None:
    with plot_style(PAPER_STYLE):
        figure = Figure((5, 1), dpi=300)
        drawn = figure.text(0, 0, text, size=size)
        figure.draw_without_rendering()
        assert text_width(text, size) == pytest.approx(
            drawn.get_window_extent().width / 300, rel=0.1, abs=0.02
        )


def test_names_are_cut_in_the_middle_and_stay_different() -> None:
    assert shorten("krum m=5", 8) == "krum m=5"
    assert shorten("abcdefghijkl", 7) == "abc…jkl"
    long = ["a" * 40 + str(i) + "b" * 40 for i in range(12)]
    short = short_names(["krum", *long], 10)
    assert short["krum"] == "krum"
    assert len({*short.values()}) == 13
    assert max(map(len, short.values())) <= 10


def test_text_is_cut_to_a_width() -> None:
    text = "constrain_and_scale, pmr 0.5"
    assert fit(text, 9) == text
    for width in (0.3, 0.7, 1.2):
        assert text_width(fit(text, width), 7.5) <= width
        assert fit(text, width).endswith("5")


def test_text_is_wrapped_after_spaces_and_underscores() -> None:
    assert wrap("dba", 1) == "dba"
    assert wrap("constrain_and_scale", text_width("constrain_x")) == "constrain_\nand_scale"
    assert wrap("constrain_and_scale", 0.1) is None
    assert wrap("a a", text_width("a")) == "a\na"


def test_panels_have_their_size_and_place() -> None:
    margins = Margins(left=0.5, bottom=0.4, top=0.3, right=0.1, between=0.2, below=0.6)
    figure, panels = fixed_grid(3, 2, 5.0, (1.5, 1.0), margins)
    assert [*figure.get_size_inches()] == pytest.approx([5.0, 0.4 + 2 * 1.0 + 0.6 + 0.3])
    assert [inches(axes) for axes in panels] == [pytest.approx((1.5, 1.0))] * 3
    boxes = [axes.get_position() for axes in panels]
    height = figure.get_size_inches()[1]
    corners = [(5 * box.x0, height * box.y0) for box in boxes]
    assert corners == [pytest.approx(c) for c in [(0.5, 2.0), (2.2, 2.0), (0.5, 0.4)]]
    assert [is_lowest(i, 3, 2) for i in range(3)] == [False, True, True]


def test_rows_of_panels_are_about_as_long() -> None:
    assert [balanced(n, 4) for n in range(1, 9)] == [1, 2, 3, 4, 3, 3, 4, 4]


@pytest.mark.parametrize("n", [1, 5, 30])
def test_a_legend_fits_its_width_and_height_and_reads_along_rows(n: int) -> None:
    with plot_style(PAPER_STYLE):
        names = [f"defense {'x' * (i % 7)}{i}" for i in range(n)]
        legend = Legend([Line2D([], [], label=name) for name in names], 3.5)
        figure = Figure((3.5, 4))
        legend.draw(figure)
        assert legend_texts(figure) == names
        box = figure.legends[0].get_window_extent()
        assert box.width / figure.dpi <= 3.5
        assert box.height / figure.dpi <= legend.height
    assert Legend([], 3.5).height == 0


def test_numbers_are_short() -> None:
    values = {
        0.0: "0",
        0.5: "0.5",
        0.0001: "0.0001",
        1500.0: "1500",
        2e-5: "2e-05",
        1.25e6: "1.2e+06",
    }
    assert {value: plain_number(value) for value in values} == values
