"""Worst case: bars are the highest mean BA over attacks; adaptive attacks are marked."""

from __future__ import annotations

import pytest
from figure_data import STRANGE, assert_nothing_is_cut_off, markers, report, run

from fedbench.report.figures.worst_case_chart import (
    MAX_PANELS,
    worst_case_chart,
    worst_case_drawings,
)
from fedbench.report.plotting import BLACK, GRAY


def test_bars_are_the_highest_means_and_name_their_attack() -> None:
    data = report(
        run("krum", 0, BA=0.1, settings={"attack": "dba"}),
        run("krum", 1, BA=0.5, settings={"attack": "dba"}),
        run("krum", 0, BA=0.2, settings={"attack": "edge"}),
        run("baybfed", 0, BA=0.1, settings={"attack": "dba"}),
        run("baybfed", 0, BA=0.9, settings={"attack": "adaptive"}),
        run("baybfed", 1, status="failed", settings={"attack": "adaptive"}),
        run("flame", 0, status="failed", settings={"attack": "dba"}),
    )
    figure = worst_case_chart(data)
    assert figure is not None
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(names) == ["baybfed", "krum"]
    widths = {names[round(bar.get_y() + 0.31)]: bar.get_width() for bar in axes.patches}  # type: ignore[attr-defined]
    assert widths == {"krum": pytest.approx(30), "baybfed": pytest.approx(90)}
    krum = data.styles["krum"]
    assert markers(axes, krum.color, krum.marker) == [pytest.approx((30, names.index("krum")))]
    seeds = sorted(x for x, _ in markers(axes, BLACK, "."))
    assert seeds == pytest.approx([10, 50, 90])
    attacks = {text.get_text(): text.get_color() for text in axes.texts}
    assert attacks == {"dba": GRAY, "adaptive *": BLACK}
    assert axes.get_xlabel() == "highest BA over attacks (%)"
    assert_nothing_is_cut_off(figure)


def test_other_settings_are_panels_and_the_rest_is_named() -> None:
    values = [i / 10 for i in range(1, MAX_PANELS + 2)]
    data = report(
        *(
            run(name, BA=p, settings={"pmr": p, "attack": attack})
            for p in values
            for name in STRANGE
            for attack in ("dba", "an_attack_with_a_name_too_long_to_write alpha=0.5")
        )
    )
    figure = worst_case_chart(data)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"pmr {p}" for p in values[:MAX_PANELS]
    ]
    assert_nothing_is_cut_off(figure)
    assert worst_case_drawings(data)[0].caption.endswith(f"Not shown: pmr {values[-1]}.")


def test_no_attack_is_no_figure() -> None:
    data = report(run("krum", MA=0.9, settings={"attack": "none"}), run("flame", status="failed"))
    assert worst_case_chart(data) is None
