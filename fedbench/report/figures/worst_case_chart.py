"""Worst case: the highest mean BA over all attacks, by defense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Legend,
    Margins,
    grid,
    is_lowest,
    label_x,
    look,
    panel_title,
    short_names,
    shorten,
    widest,
)
from fedbench.report.figures.selection import CHOICES, Drawing, left_out
from fedbench.report.plotting import BLACK, GRAY, PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData
from fedbench.report.worst_case import WorstCase, worst_cases

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 6
ROW = 0.16  # inches per defense


def worst_case_drawings(data: ReportData) -> list[Drawing]:
    caption = (
        "Highest mean BA over all attacks, with its attack, 95 % t-interval and seeds. A star "
        "marks an attack that is adaptive to the defense; where none was tried, the name of the "
        "attack is gray, and the value is a lower bound."
    )
    caption += left_out([*by_panel(data)], MAX_PANELS)
    return [Drawing("worst_case", caption, lambda: worst_case_chart(data))]


def by_panel(data: ReportData) -> dict[str, list[WorstCase]]:
    """Group the worst cases by the settings besides the attack."""
    swept = {key.name for key in data.swept}
    groups: dict[str, list[WorstCase]] = {}
    for case in worst_cases(data.comparison):
        words = [
            value if key in CHOICES else f"{key} {value}"
            for key, value in case.setting.items()
            if key in swept
        ]
        groups.setdefault(", ".join(words), []).append(case)
    return groups


@plot_style(PAPER_STYLE)
def worst_case_chart(data: ReportData) -> Figure | None:
    """Draw one panel per setting; None if no run has a BA under an attack."""
    shown = [*by_panel(data).items()][:MAX_PANELS]
    if not shown:
        return None
    used = {case.defense for _, cases in shown for case in cases}
    names = short_names(name for name in data.defenses if name in used)
    width = SINGLE if len(shown) == 1 else DOUBLE
    left = widest(names.values()) + 0.12
    attacks = widest(attack_words(case) for _, cases in shown for case in cases) + 0.1
    n_across = min(2, len(shown))
    title = LINE if shown[0][0] else 0
    handles = _handles()
    legend = Legend(handles, width)
    margins = Margins(
        left=left,
        bottom=0.36,
        top=legend.height + title + 0.05,
        right=attacks,
        between=attacks + 0.1,
        below=title + 0.12 + (0.3 if len(shown) % n_across else 0),
    )
    figure, panels = grid(len(shown), n_across, width, ROW * len(names) + 0.08, margins)
    for i, (axes, (name, cases)) in enumerate(zip(panels, shown, strict=True)):
        _draw_cases(axes, data, cases, names)
        lowest = is_lowest(i, len(shown), n_across)
        axes.tick_params(labelleft=i % n_across == 0, labelbottom=lowest)
        if lowest:
            label_x(axes, "highest BA over attacks (%)")
        if name:
            panel_title(axes, name)
    legend.draw(figure)
    return figure


def attack_words(case: WorstCase) -> str:
    """Name the worst attack and mark adaptive ones."""
    return shorten(case.attack, 24) + (" *" if case.is_adaptive else "")


def _draw_cases(
    axes: Axes, data: ReportData, cases: list[WorstCase], names: dict[str, str]
) -> None:
    places = {name: i for i, name in enumerate(names)}
    for case in cases:
        y, style, mean = places[case.defense], data.styles[case.defense], 100 * case.BA.mean
        seeds = [100 * value for value in case.BA.values.values()]
        axes.barh([y], [mean], height=0.62, color=style.color, alpha=0.22, linewidth=0)
        if case.BA.low is not None and case.BA.high is not None:
            axes.hlines(
                [y], 100 * case.BA.low, 100 * case.BA.high, color=style.color, linewidth=0.8
            )
        dots: dict[str, Any] = {
            "color": BLACK,
            "markersize": 2.4,
            "markeredgewidth": 0,
            "alpha": 0.6,
        }
        axes.plot(seeds, [y + 0.24] * len(seeds), ".", **dots)
        axes.plot([mean], [y], **look(style, line=False))
        axes.annotate(
            attack_words(case),
            (1, y),
            xytext=(5, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color=BLACK if case.adaptive else GRAY,
            annotation_clip=False,
        )
    axes.set(xlim=(-2, 103), ylim=(len(names) - 0.4, -0.6), xticks=[0, 25, 50, 75, 100])
    axes.set_yticks(range(len(names)), [*names.values()])
    axes.grid(axis="x")


def _handles() -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot: dict[str, Any] = {
        "marker": ".",
        "markersize": 4,
        "markeredgewidth": 0,
        "linestyle": "none",
    }
    return [
        Patch(color=GRAY, alpha=0.3, label="mean"),
        Line2D([], [], color=GRAY, linewidth=0.8, label="95 % interval"),
        Line2D([], [], color=BLACK, label="seeds", **dot),
    ]
