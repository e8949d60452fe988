"""Scores of the clients in the last attacked round, with the threshold of the defense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Legend,
    Margins,
    balanced,
    grid,
    is_lowest,
    label_x,
    label_y,
    panel_title,
    plain_numbers,
)
from fedbench.report.figures.selection import (
    Drawing,
    file_name,
    first_run,
    left_out,
    row_title,
)
from fedbench.report.plotting import BLACK, PAPER_STYLE, RED, plot_style
from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds, Verdicts

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 6
LOGARITHMIC = 100  # largest over smallest score from which the axis is logarithmic
BENIGN = "#0072B2"
GAP = "#dcdcdc"  # between accepted and rejected clients

Dot = tuple[int, float, bool, bool | None]  # place; score; malicious; accepted


def score_drawings(data: ReportData) -> list[Drawing]:
    """Return one figure per defense."""
    drawings = []
    for defense in data.defenses:
        rows = [row for row in data.rows if row.defense == defense]
        titles = [row_title(data, row) for row in rows]
        caption = (
            f"{defense}: score of each client in the last attacked round, first seed; benign "
            "clients are on the left. Higher is more suspicious; open markers were rejected."
        )
        caption += left_out(titles, MAX_PANELS)
        name = file_name("scores", defense)
        drawings.append(Drawing(name, caption, partial(score_panels, data, rows)))
    return drawings


def score_panels(data: ReportData, rows: Sequence[TableRow]) -> Figure | None:
    """Draw one panel per row; None if the defense has no scores."""
    found = []
    for row in rows:
        run = first_run(data, row)
        verdicts = None if run is None else last_scored(run)
        if verdicts is not None:
            name = row_title(data, row)
            found.append((name, verdicts))
    found = found[:MAX_PANELS]
    return draw_panels(found, balanced(len(found), 4)) if found else None


@plot_style(PAPER_STYLE)
def draw_panels(found: Sequence[tuple[str, Verdicts]], n_across: int) -> Figure:
    """Draw the scores of rounds, one panel each, under their titles."""
    width = SINGLE if len(found) == 1 else DOUBLE
    legend = Legend(_handles([verdicts for _, verdicts in found]), width)
    title = LINE if any(name for name, _ in found) else 0
    margins = Margins(
        left=0.64,
        bottom=0.2,
        top=legend.height + title + 0.05,
        between=0.46,
        below=title + 0.12 + (0.14 if len(found) % n_across else 0),
    )
    figure, panels = grid(len(found), n_across, width, 1.2, margins)
    for i, (axes, (name, verdicts)) in enumerate(zip(panels, found, strict=True)):
        _draw_scores(axes, verdicts)
        if i % n_across == 0:
            label_y(axes, "score", 0.51)
        if is_lowest(i, len(found), n_across):
            label_x(axes, "clients", 0.06)
        if name:
            panel_title(axes, name)
    legend.draw(figure)
    return figure


def last_scored(run: RunRounds) -> Verdicts | None:
    """Return the last attacked round with scores, or the last one with scores."""
    scored = [
        (attacked, one)
        for attacked, one in zip(run.attacked, run.verdicts, strict=True)
        if score_dots(one)
    ]
    attacked = [one for is_attacked, one in scored if is_attacked]
    return attacked[-1] if attacked else scored[-1][1] if scored else None


def score_dots(verdicts: Verdicts) -> list[Dot]:
    """Return the clients with a score, benign ones first, each in order of ids."""
    columns = zip(
        verdicts.malicious, verdicts.clients, verdicts.scores, verdicts.accepted, strict=True
    )
    scored = [
        (malicious, client, score, accepted)
        for malicious, client, score, accepted in columns
        if score is not None and math.isfinite(score)
    ]
    scored.sort(key=lambda one: one[:2])
    return [(i, score, mal, accepted) for i, (mal, _, score, accepted) in enumerate(scored)]


def _draw_scores(axes: Axes, verdicts: Verdicts) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    dots = score_dots(verdicts)
    for kind in {dot[2:] for dot in dots}:
        xs, ys, *_ = zip(*(dot for dot in dots if dot[2:] == kind), strict=True)
        axes.plot(xs, ys, **_marker(*kind))
    cut = verdicts.cut
    if cut is not None:
        axes.axhspan(*cut, color=GAP, linewidth=0, zorder=0)
        if cut[0] == cut[1]:
            axes.axhline(cut[0], color=BLACK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    axes.set_xlim(-1, len(dots))
    axes.set_xticks([])
    scores = [score for _, score, _, _ in dots]
    if min(scores) > 0 and max(scores) / min(scores) > LOGARITHMIC:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.margins(y=0.12)
    axes.grid(axis="y")
    plain_numbers(axes.yaxis)


def _marker(malicious: bool, accepted: bool | None) -> dict[str, Any]:
    """Shape and color say who the client is; filled markers were not rejected."""
    color = RED if malicious else BENIGN
    return {
        "marker": "^" if malicious else "o",
        "color": color,
        "linestyle": "none",
        "markersize": 3.6,
        "markeredgewidth": 0.7,
        "markerfacecolor": "white" if accepted is False else color,
    }


def _handles(panels: Sequence[Verdicts]) -> list[Artist]:
    """Return entries for the kinds of clients and lines that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {(mal, accepted) for one in panels for _, _, mal, accepted in score_dots(one)}
    words = {True: "accepted", False: "rejected", None: "not judged"}
    handles: list[Any] = [
        Line2D([], [], label=f"{who}, {words[accepted]}", **_marker(malicious, accepted))
        for malicious, who in ((False, "benign"), (True, "malicious"))
        for accepted in (True, False, None)
        if (malicious, accepted) in kinds
    ]
    cuts = [one.cut for one in panels if one.cut is not None]
    if any(low == high for low, high in cuts):
        dashed = (0, (4, 2))
        handles.append(Line2D([], [], color=BLACK, lw=0.8, ls=dashed, label="threshold"))
    if any(low < high for low, high in cuts):
        handles.append(Patch(color=GAP, label="between accepted and rejected"))
    return handles
