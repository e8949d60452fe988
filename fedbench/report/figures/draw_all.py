"""Draw every figure of a report for papers, in several formats, with a file of captions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbench.report.figures.ba_ma import ba_ma_drawings
from fedbench.report.figures.client_strip import client_drawings
from fedbench.report.figures.cost import cost_drawings
from fedbench.report.figures.critical_difference import critical_difference_drawings
from fedbench.report.figures.effect import effect_drawings
from fedbench.report.figures.heatmap import heatmap_drawings
from fedbench.report.figures.roc import roc_drawings
from fedbench.report.figures.round_curves import round_drawings
from fedbench.report.figures.score_panels import score_drawings
from fedbench.report.figures.selection import Drawing
from fedbench.report.figures.worst_case_chart import worst_case_drawings
from fedbench.report.parallel import Job, run_jobs
from fedbench.report.plotting import save_figure
from fedbench.report.report_data import ReportData
from fedbench.results.atomic_files import write_atomically

FORMATS = ("svg", "pdf", "png")
CAPTIONS_FILE = "captions.txt"


def draw_figures(
    data: ReportData,
    folder: Path,
    by: tuple[str, str] | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Write every figure that has something to show, and captions; return the files.

    `by` names rows and columns of the heat maps: ("defense", "attack") unless told otherwise.
    """
    drawings = all_drawings(data, by)
    written = run_jobs([drawing_job(drawing, folder, formats) for drawing in drawings])
    captions = write_captions(drawings, written, folder)
    return [*(path for paths in written for path in paths), captions]


def write_captions(
    drawings: Sequence[Drawing], written: Sequence[Sequence[Path]], folder: Path
) -> Path:
    """Write a caption for each figure that has files.

    Captions also say which settings are not shown, where there are too many for a figure.
    """
    captions = [
        f"{drawing.name}: {drawing.caption}\n"
        for drawing, paths in zip(drawings, written, strict=True)
        if paths
    ]
    path = folder / CAPTIONS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write("\n".join(captions).encode("utf-8", "replace")))
    return path


def all_drawings(data: ReportData, by: tuple[str, str] | None = None) -> list[Drawing]:
    """Return every figure, each with a name of its own."""
    found = [
        *heatmap_drawings(data, by),
        *worst_case_drawings(data),
        *ba_ma_drawings(data),
        *round_drawings(data),
        *effect_drawings(data),
        *critical_difference_drawings(data),
        *roc_drawings(data),
        *client_drawings(data),
        *score_drawings(data),
        *cost_drawings(data),
    ]
    named: dict[str, Drawing] = {}  # by name in lower case: some file systems ignore the case
    for drawing in found:
        name, number = drawing.name, 1
        while name.lower() in named:
            number += 1
            name = f"{drawing.name}_{number}"
        named[name.lower()] = Drawing(name, drawing.caption, drawing.draw)
    return [*named.values()]


def drawing_job(drawing: Drawing, folder: Path, formats: Sequence[str] = FORMATS) -> Job:
    """Return a job that draws a figure and writes it."""

    def draw() -> list[Path]:
        figure = drawing.draw()
        if figure is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        return save_figure(figure, folder, drawing.name, formats)

    return draw
