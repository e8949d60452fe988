"""ROC of the scores: averaged vertically over the attacked rounds of a run, then over seeds.

Clients of different rounds are never pooled: a score means something within its round only, and
the same client appears in many rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Margins,
    balanced,
    fixed_grid,
    inches,
    label_x,
    label_y,
    look,
    panel_title,
    short_names,
    text_width,
    widest,
)
from fedbench.report.figures.selection import (
    Drawing,
    by_setting,
    drawn_runs,
    left_out,
    swept_names,
    title_of,
)
from fedbench.report.plotting import GRAY, PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds, Verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy import ndarray

MAX_PANELS = 6
GRID = 201  # points of an averaged curve
LEFT, NUMBERS = 0.42, 0.26  # inches left of the page's panels, and of the others
SMALLEST, LARGEST = 1.15, 1.9  # inches: sides of a square panel
ENTRY = 0.138  # inches: height of an entry of the legend


@dataclass(frozen=True)
class RocCurve:
    """Share of poisoned updates above a threshold against the share of benign ones."""

    false_positives: ndarray  # [n], from 0 to 1
    true_positives: ndarray  # [n]
    auc: float  # mean over rounds and seeds, as in the table


def roc_drawings(data: ReportData) -> list[Drawing]:
    keys = swept_names(data)
    titles = [title_of(keys, setting) for setting in by_setting(data, keys)]
    caption = (
        "ROC of the scores: vertical average over the attacked rounds of a run, then over seeds; "
        "the numbers are the AUC, averaged likewise."
    )
    return [Drawing("roc", caption + left_out(titles, MAX_PANELS), lambda: roc(data))]


@plot_style(PAPER_STYLE)
def roc(data: ReportData) -> Figure | None:
    """Draw one panel per setting; None if no defense has scores."""
    keys = swept_names(data)
    shown: list[tuple[str, dict[str, RocCurve]]] = []
    for setting, rows in by_setting(data, keys).items():
        if len(shown) < MAX_PANELS and (curves := roc_curves(data, rows)):
            shown.append((title_of(keys, setting), curves))
    if not shown:
        return None
    names = short_names(data.defenses)
    used = [names[name] for _, curves in shown for name in curves]
    legend = 0.38 + widest(used) + text_width(" 1.00")
    figure, panels, n_across = _page(len(shown), legend, max(len(c) for _, c in shown), bool(keys))
    for i, (axes, (name, curves)) in enumerate(zip(panels, shown, strict=True)):
        _draw_curves(axes, data, curves, names)
        label_x(axes, "false positive rate (%)")
        if i % n_across == 0:
            label_y(axes, "true positive rate (%)", 0.27)
        if name:
            panel_title(axes, name, inches(axes)[0] + legend)
    return figure


def _page(
    n: int, legend: float, n_entries: int, has_titles: bool
) -> tuple[Figure, list[Axes], int]:
    """Return the page, its panels with room for a legend on the right, and panels per row."""
    n_across = next(
        k for k in (3, 2, 1) if k == 1 or (DOUBLE - LEFT) / k - legend - NUMBERS >= SMALLEST
    )
    n_across = balanced(n, n_across)
    width = SINGLE if n_across == 1 else DOUBLE
    room = (width - LEFT) / n_across
    panel = max(min(room - legend - (NUMBERS if n_across > 1 else 0), LARGEST), SMALLEST)
    too_long = max(0.0, n_entries * ENTRY - panel - 0.3)
    title = LINE + 0.04 if has_titles else 0
    margins = Margins(
        left=LEFT,
        bottom=0.36 + too_long,
        top=title + 0.06,
        right=0,
        between=room - panel,
        below=title + 0.42 + too_long,
    )
    width = max(width, LEFT + panel + legend)
    figure, panels = fixed_grid(n, n_across, width, (panel, panel), margins)
    return figure, panels, n_across


def roc_curves(data: ReportData, rows: Sequence[TableRow]) -> dict[str, RocCurve]:
    """Return the curve of each defense with scores."""
    found = {}
    for row in rows:
        runs = [curve for run in drawn_runs(data, row) if (curve := run_roc(run)) is not None]
        if runs:
            found[row.defense] = _mean_curve(runs)
    return found


def run_roc(run: RunRounds) -> RocCurve | None:
    """Average the curves of the attacked rounds; None if no round has scores of both kinds."""
    rounds = [
        curve
        for attacked, verdicts in zip(run.attacked, run.verdicts, strict=True)
        if attacked and (curve := round_roc(verdicts)) is not None
    ]
    return _mean_curve(rounds) if rounds else None


def round_roc(verdicts: Verdicts) -> RocCurve | None:
    """Return the curve of one round; None without scores of malicious and of benign clients."""
    import numpy as np

    pairs = [
        (score, malicious)
        for score, malicious in zip(verdicts.scores, verdicts.malicious, strict=True)
        if score is not None and math.isfinite(score)
    ]
    n_malicious = sum(malicious for _, malicious in pairs)
    if not 0 < n_malicious < len(pairs):
        return None
    scores, truth = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # ties move at once
    hits = np.cumsum(truth[order])[ends]
    true = np.concatenate([[0.0], hits / n_malicious])
    false = np.concatenate([[0.0], (ends + 1 - hits) / (len(pairs) - n_malicious)])
    area = float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2))
    return RocCurve(false, true, area)


def _mean_curve(curves: Sequence[RocCurve]) -> RocCurve:
    """Average true-positive rates at the same false-positive rates."""
    import numpy as np

    at = np.linspace(0, 1, GRID)
    rows = [np.interp(at, curve.false_positives, curve.true_positives) for curve in curves]
    return RocCurve(at, np.mean(rows, axis=0), fmean(curve.auc for curve in curves))


def _draw_curves(
    axes: Axes, data: ReportData, curves: dict[str, RocCurve], names: dict[str, str]
) -> None:
    import numpy as np

    axes.plot([0, 100], [0, 100], color=GRAY, linewidth=0.5, linestyle=(0, (1, 2)))
    for i, (name, curve) in enumerate(curves.items()):
        xs = 100 * np.concatenate([[0.0], curve.false_positives])
        ys = 100 * np.concatenate([[0.0], curve.true_positives])  # curves start in the corner
        label = f"{names[name]} {curve.auc:.2f}"
        every = (10 + 7 * i % 40, 50)
        axes.plot(xs, ys, label=label, markevery=every, clip_on=False, **look(data.styles[name]))
    axes.set(xlim=(0, 100), ylim=(0, 100), xticks=[0, 50, 100], yticks=[0, 50, 100])
    axes.grid()
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.04, 1.02),
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.25,
        handlelength=2,
    )
