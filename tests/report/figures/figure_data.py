"""Made-up reports: runs with chosen numbers and rounds, without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedbench.report.comparison import compare
from fedbench.report.plotting import PAPER_DPI
from fedbench.report.report_data import ReportData
from fedbench.results.run_reader import RunResult
from fedbench.results.run_rounds import RATES, RunRounds, Verdicts

STRANGE = ["$x^2$", "<b>'q'\"", "a_b c%", "世界😀", "\\frac", "W" * 70]


def verdicts(
    malicious: Sequence[bool],
    scores: Sequence[float | None] | None = None,
    accepted: Sequence[bool | None] | None = None,
    refused: Sequence[bool] | None = None,
    threshold: float | None = None,
    clients: Sequence[int] | None = None,
) -> Verdicts:
    n = len(malicious)
    return Verdicts(
        [*range(n)] if clients is None else [*clients],
        [*malicious],
        [None] * n if accepted is None else [*accepted],
        [False] * n if refused is None else [*refused],
        [None] * n if scores is None else [*scores],
        threshold,
    )


def rounds(
    one: Sequence[Verdicts] = (),
    attacked: Sequence[bool] | None = None,
    seconds: Mapping[str, float] | None = None,
    n: int | None = None,
    **rates: Sequence[float | None],
) -> RunRounds:
    """Rounds of a run; rates that are not given are not measured."""
    n = n if n is not None else max([len(one), *map(len, rates.values())])
    return RunRounds(
        index=[*range(n)],
        attacked=[True] * n if attacked is None else [*attacked],
        rates={rate: [*rates.get(rate, [None] * n)] for rate in RATES},
        seconds={"train": 2.0 * n, "aggregate": 0.5 * n} if seconds is None else seconds,
        verdicts=[*one] if one else [verdicts([])] * n,
    )


def run(
    defense: str,
    seed: int = 0,
    made: RunRounds | None = None,
    status: str = "finished",
    settings: Mapping[str, Any] | None = None,
    **metrics: float | None,
) -> tuple[RunResult, RunRounds | None]:
    config = {"dataset": "d", "model": "m", "attack": "dba", "pmr": 0.2, "defense": defense}
    config |= {"seed": seed, **(settings or {})}
    values = {key: metrics.get(key) for key in ("BA", "MA", "TPR", "TNR", "AUC", "seconds")}
    found = values if status == "finished" else {}
    summary = {"adaptive_to": ["baybfed"] if config["attack"] == "adaptive" else []}
    return RunResult(Path("?"), status, config, found, summary=summary), made


def report(*runs: tuple[RunResult, RunRounds | None]) -> ReportData:
    """A report of the runs, in this order."""
    results, by_folder = [], {}
    for i, (result, made) in enumerate(runs):
        folder = Path(f"runs/run{i}")
        config, metrics = result.config, result.metrics
        results.append(RunResult(folder, result.status, config, metrics, summary=result.summary))
        if made is not None:
            by_folder[folder] = made
    return ReportData([Path("runs")], results, compare(results), by_folder, [])


def legend_texts(holder: Figure | Axes) -> list[str]:
    """Entries of the legend, along rows."""
    legends = holder.legends if isinstance(holder, Figure) else [holder.get_legend()]
    texts = [text for legend in legends if legend for text in legend.get_texts()]
    figure: Any = holder if isinstance(holder, Figure) else holder.figure
    figure.draw_without_rendering()
    places = {text: text.get_window_extent() for text in texts}
    texts.sort(key=lambda text: (-round(places[text].y0 / 5), places[text].x0))
    return [text.get_text() for text in texts]


def markers(axes: Axes, color: str, marker: str) -> list[tuple[float, float]]:
    """Points of all lines with this color and marker."""
    return [
        (float(x), float(y))
        for line in axes.lines
        if isinstance(line, Line2D) and line.get_color() == color and line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
    ]


def all_texts(figure: Figure) -> list[str]:
    """Every text that is drawn."""
    return [text.get_text() for text in drawn_texts(figure)]


def drawn_texts(figure: Figure) -> list[Any]:
    """Text that is visible; numbers of an axis only where the axis reaches."""
    figure.dpi = PAPER_DPI
    figure.draw_without_rendering()
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        labels = [axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]  # type: ignore[attr-defined]
        found += [*axes.texts, *labels]
        if (legend := axes.get_legend()) is not None:
            found += legend.get_texts()
        for axis in (axes.xaxis, axes.yaxis):
            for tick in axis._update_ticks():  # type: ignore[attr-defined]
                found += [tick.label1, tick.label2]
    return [text for text in found if text.get_text() and text.get_visible()]


def assert_nothing_is_cut_off(figure: Figure) -> None:
    """Every text lies on the page, and no text lies on another."""
    texts = drawn_texts(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 > -1, text
        assert box.y0 > -1, text
        assert box.x1 < width + 1, text
        assert box.y1 < height + 1, text
    upright = [text.get_window_extent() for text in texts if text.get_rotation() == 0]
    words = [text.get_text() for text in texts if text.get_rotation() == 0]
    for i, box in enumerate(upright):
        for j, other in enumerate(upright[:i]):
            width = min(box.x1, other.x1) - max(box.x0, other.x0)
            height = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(width, height) < 4, (words[i], words[j])  # pixels of 1/300 inch
