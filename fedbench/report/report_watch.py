"""`--watch`: write the page again and again while runs are in progress."""

from __future__ import annotations

import gc
import sys
import time
import webbrowser
from collections import Counter
from dataclasses import replace
from pathlib import Path

from fedbench.errors import UserError
from fedbench.report.report_data import ReportData, read_report_data
from fedbench.report.report_files import ReportOptions, write_report

WATCH_INTERVAL = 10  # seconds
PATIENCE = 60.0  # seconds without any run in progress, after which the sweep counts as stopped


def watch(
    data: ReportData, folder: Path, options: ReportOptions, interval: int, open_page: bool
) -> ReportData:
    """Write the page every `interval` seconds until no run is in progress; return the last data."""
    if interval < 1:
        raise UserError(f"--watch {interval}: must be at least 1 second")
    live = replace(options, formats=("html",), refresh=interval)
    last_seen = time.monotonic()
    while True:
        counts = Counter(run.status for run in data.missing)
        if counts["running"]:
            last_seen = time.monotonic()
        (page,) = write_report(data, folder, live)
        print(f"{_progress(data, counts)}; {page}", file=sys.stderr, flush=True)
        if open_page:
            webbrowser.open(page.resolve().as_uri())
            open_page = False
        idle = time.monotonic() - last_seen
        if not counts["running"] and (not counts["not started"] or idle > PATIENCE):
            return data
        gc.collect()  # the command pauses the collector
        time.sleep(interval)
        data = read_report_data(data.folders).with_columns(data.comparison.metrics)


def _progress(data: ReportData, counts: Counter[str]) -> str:
    """Return `12 finished, 2 running, 4 not started`."""
    n_finished = sum(run.status == "finished" for run in data.runs)
    names = ("running", "failed", "unfinished", "not started")
    return ", ".join([f"{n_finished} finished", *(f"{counts[n]} {n}" for n in names if counts[n])])
