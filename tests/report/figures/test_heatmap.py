"""Heat maps: cells equal the means of the runs, in order, with labels; strange names and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from figure_data import STRANGE, all_texts, assert_nothing_is_cut_off, report, run
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from fedbench.errors import UserError
from fedbench.report.figures.heatmap import (
    BAD,
    GOOD,
    MAX_COLUMNS,
    MAX_PANELS,
    crossing,
    heatmap,
    heatmap_drawings,
    number_format,
)
from fedbench.report.figures.layout import DOUBLE, SINGLE, text_width
from fedbench.report.plotting import BLACK
from fedbench.report.report_data import ReportData


def meshes(figure: Figure) -> list[list[list[float | None]]]:
    """The numbers behind the colors, by panel; None where there is none."""
    found = []
    for axes in figure.axes:
        (mesh,) = (artist for artist in axes.collections if isinstance(artist, QuadMesh))
        array = np.ma.masked_invalid(mesh.get_array())
        found.append([[None if v is None else round(v, 6) for v in row] for row in array.tolist()])
    return found


def numbers(figure: Figure) -> list[list[str]]:
    return [[text.get_text() for text in axes.texts] for axes in figure.axes]


def two_by_two() -> ReportData:
    return report(
        run("krum", 0, BA=0.1, MA=0.8, TPR=1.0, settings={"attack": "dba"}),
        run("krum", 1, BA=0.3, MA=0.9, TPR=0.5, settings={"attack": "dba"}),
        run("krum", 0, BA=0.5, MA=0.7, settings={"attack": "edge"}),
        run("flame", 0, BA=0.0, MA=0.6, TPR=1.0, TNR=0.25, settings={"attack": "dba"}),
        run("flame", 0, status="failed", settings={"attack": "edge"}),
    )


def test_cells_are_means_over_seeds_in_order_of_the_table() -> None:
    """krum on dba: (0.1 + 0.3) / 2; the failed run has no cell; krum judges nobody on edge."""
    figure = heatmap(two_by_two(), ("BA", "MA", "TPR", "TNR"))
    assert figure is not None
    assert meshes(figure) == [
        [[20.0, 50.0], [0.0, None]],
        [[85.0, 70.0], [60.0, None]],
        [[75.0, None], [100.0, None]],
        [[None, None], [25.0, None]],
    ]
    assert numbers(figure)[0] == ["20.0", "50.0", "0.0", "–"]
    assert [axes.get_title() for axes in figure.axes] == [
        f"{m} (%)" for m in ("BA", "MA", "TPR", "TNR")
    ]
    first, second = figure.axes[:2]
    assert [label.get_text() for label in first.get_yticklabels()] == ["krum", "flame"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["dba", "edge"]
    figure.draw_without_rendering()
    assert not any(label.get_visible() for label in second.get_yticklabels() if label.get_text())


def test_rows_and_columns_can_be_chosen() -> None:
    data = report(
        *(
            run(d, BA=b, settings={"pmr": p})
            for d, p, b in [
                ("krum", 0.1, 0.1),
                ("krum", 0.5, 0.2),
                ("flame", 0.1, 0.3),
                ("flame", 0.5, 0.4),
            ]
        )
    )
    default, swapped = heatmap(data, ("BA",)), heatmap(data, ("BA",), ("pmr", "defense"))
    assert default is not None
    assert swapped is not None
    assert meshes(default) == [[[10.0, 20.0], [30.0, 40.0]]]
    assert meshes(swapped) == [[[10.0, 30.0], [20.0, 40.0]]]


def test_an_unknown_setting_is_an_error_in_one_line() -> None:
    with pytest.raises(
        UserError, match="no setting 'pm' differs between the runs, only defense, attack"
    ):
        crossing(two_by_two(), ("defense", "pm"))


def test_further_settings_are_panels_and_the_rest_is_named() -> None:
    values = [round(0.01 * i, 2) for i in range(1, MAX_PANELS + 3)]
    data = report(
        *(
            run("krum", BA=p, settings={"pmr": p, "attack": a})
            for p in values
            for a in ("dba", "edge")
        )
    )
    figure = heatmap(data, ("BA",))
    assert figure is not None
    assert meshes(figure) == [[[round(100 * p, 6)] * 2] for p in values[:MAX_PANELS]]
    assert [axes.get_title() for axes in figure.axes] == [f"pmr {p}" for p in values[:MAX_PANELS]]
    assert "BA (%)" in [text.get_text() for text in figure.texts]
    assert_nothing_is_cut_off(figure)
    (caption,) = {d.caption for d in heatmap_drawings(data) if d.name == "heatmap_BA"}
    assert f"Not shown: pmr {values[-2]}; pmr {values[-1]}." in caption
    assert "heatmap" not in {drawing.name for drawing in heatmap_drawings(data)}


def test_all_metrics_share_a_figure_if_nothing_else_differs() -> None:
    names = [drawing.name for drawing in heatmap_drawings(two_by_two())]
    assert names == ["heatmap", "heatmap_BA", "heatmap_MA", "heatmap_TPR", "heatmap_TNR"]


def test_nothing_to_cross_is_no_figure() -> None:
    one = report(run("krum", BA=0.1), run("flame", BA=0.2))
    assert heatmap(one) is None
    assert heatmap_drawings(one) == []
    nothing = report(*(run("krum", status="failed", settings={"attack": a}) for a in ("a", "b")))
    assert heatmap(nothing) is None
    assert heatmap(two_by_two(), ("AUC",)) is None


def luminance(color: str) -> float:
    """Relative luminance (WCAG)."""
    from matplotlib.colors import to_rgb

    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


@pytest.mark.parametrize("metric", ["BA", "MA"])
def test_numbers_stand_out_from_their_cells(metric: str) -> None:
    """A contrast of at least 3.5 to 1 at every percent; darker is higher."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    shades = LinearSegmentedColormap.from_list("x", BAD if metric == "BA" else GOOD)
    cells = report(
        *(run("krum", **{metric: i / 100}, settings={"pmr": i / 1000}) for i in range(0, 101, 6))
    )
    figure = heatmap(cells, (metric,))
    assert figure is not None
    levels = []
    for text in figure.axes[0].texts:
        cell = luminance(to_hex(shades(float(text.get_text()) / 100)))
        ink = luminance(str(text.get_color()))
        assert (max(cell, ink) + 0.05) / (min(cell, ink) + 0.05) > 3.5, text
        levels.append(cell)
    assert levels == sorted(levels, reverse=True)
    assert {str(text.get_color()) for text in figure.axes[0].texts} == {BLACK, "white"}


@pytest.mark.parametrize(("n", "n_columns"), [(1, 8), (25, 2), (3, MAX_COLUMNS + 3)])
def test_any_size_is_legible(n: int, n_columns: int) -> None:
    data = report(
        *(
            run(f"defense{i}", BA=1.0, MA=0.5, settings={"attack": f"an_attack_{j}"})
            for i in range(n)
            for j in range(n_columns)
        )
    )
    figure = heatmap(data, ("BA", "MA"))
    assert figure is not None
    assert figure.get_size_inches()[0] <= DOUBLE + 1e-9
    assert_nothing_is_cut_off(figure)
    shown = min(n_columns, MAX_COLUMNS)
    assert np.shape(meshes(figure)[0]) == (n, shown)
    for axes in figure.axes:
        cell = axes.get_window_extent().width / shown
        assert max(text.get_window_extent().width for text in axes.texts) < cell
        assert min(float(text.get_fontsize()) for text in axes.texts) >= 4


def test_a_narrow_cell_has_no_decimals() -> None:
    assert number_format(0.5) == (1, 6.5)
    decimals, size = number_format(0.23)
    assert decimals == 0
    assert text_width("100", size) < 0.23
    assert math.isclose(SINGLE, 3.5)


def test_strange_names_are_literal() -> None:
    data = report(*(run(d, BA=0.5, settings={"attack": a}) for d in STRANGE for a in STRANGE))
    figure = heatmap(data, ("BA",))
    assert figure is not None
    assert_nothing_is_cut_off(figure)
    texts = " ".join(all_texts(figure))
    for name in ("$x^2$", "<b>'q'\"", "\\u4e16\\u754c\\U0001f600", "\\frac", "WWW…WWW"):
        assert name in texts.replace("\n", "")
