"""Write the files of a report: the page, tables for papers, CSV and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedbench.errors import UserError
from fedbench.report.parallel import Job, run_jobs
from fedbench.report.pivot_table import PAPER_METRICS
from fedbench.report.report_data import ReportData
from fedbench.results.atomic_files import write_atomically

FORMATS = ("html", "latex", "csv", "markdown", "figures")
PAGE = "index.html"

By = tuple[str, str] | None  # rows and columns; None: chosen from the runs


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows."""

    formats: Sequence[str] = FORMATS
    metrics: Sequence[str] = PAPER_METRICS  # of tables with intervals
    by: By = None
    command: str = ""  # that made the report
    refresh: int | None = None  # seconds after which an open page reloads itself


def write_report(data: ReportData, folder: Path, options: ReportOptions) -> list[Path]:
    """Write the chosen formats into the folder; return the files, the page first."""
    jobs: list[Job] = [
        partial(writer, data, folder, options)
        for name, writer in WRITERS.items()
        if name in options.formats
    ]
    drawings, figures = [], folder / "figures"
    if "figures" in options.formats:
        from fedbench.report.figures.draw_all import all_drawings, drawing_job, write_captions

        drawings = all_drawings(data, options.by)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = run_jobs([*jobs, *(drawing_job(drawing, figures) for drawing in drawings)])
        if drawings:
            written.append([write_captions(drawings, written[len(jobs) :], figures)])
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    return [path for paths in written for path in paths]


def _html(data: ReportData, folder: Path, options: ReportOptions) -> list[Path]:
    from fedbench.report.page import page
    from fedbench.report.page_data import PageOptions

    rows, columns = options.by or ("defense", "")
    shown = PageOptions(folder, options.command, rows, columns, refresh=options.refresh)
    return [_write(folder / PAGE, page(data, shown))]


def _latex(data: ReportData, folder: Path, options: ReportOptions) -> list[Path]:
    from fedbench.report.latex_table import to_latex, to_latex_document

    table = to_latex(data, options.metrics, options.by)
    document = to_latex_document(data, options.metrics, options.by)
    return [
        _write(folder / "table.tex", table),
        _write(folder / "table_standalone.tex", document),
    ]


def _csv(data: ReportData, folder: Path, options: ReportOptions) -> list[Path]:
    from fedbench.report.csv_tables import runs_csv, table_csv

    return [
        _write(folder / "runs.csv", runs_csv(data)),
        _write(folder / "table.csv", table_csv(data)),
    ]


def _markdown(data: ReportData, folder: Path, options: ReportOptions) -> list[Path]:
    from fedbench.report.markdown_report import to_markdown_report

    return [_write(folder / "table.md", to_markdown_report(data, options.metrics, options.by))]


def _write(path: Path, text: str) -> Path:
    # Names of files and error messages may contain lone surrogates.
    write_atomically(path, lambda file: file.write(text.encode("utf-8", "replace")))
    return path


WRITERS = {"html": _html, "latex": _latex, "csv": _csv, "markdown": _markdown}
