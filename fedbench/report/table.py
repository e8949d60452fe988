"""The table of `python -m fedbench.report`: one row per setting and defense, seeds averaged."""

from __future__ import annotations

import io
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbench.config import NO_EFFECT
from fedbench.report.console import percent
from fedbench.results.run_reader import METRICS, STEALTH, RunResult, Value

NOT_PERCENT = ("seconds", "seeds", *STEALTH)  # columns that are not in percent
BOOKKEEPING = frozenset({*NO_EFFECT, "seed"})  # settings that never start a new row
# Settings in the order of interest: the first columns of the table. The caption lists those that
# all runs have in common.
LEADING = (
    *("dataset", "model", "attack", "pmr", "pdr", "non_iid", "pretrain_non_iid", "n_clients"),
    "rounds",
)


@dataclass(frozen=True)
class TableRow:
    """The runs of one defense in one setting, one run per seed."""

    setting: list[str]
    defense: str  # `krum`, or `krum m=5` if the runs of krum differ in m
    runs: list[RunResult]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.status == "finished"]

    def cells(self, headings: Sequence[str]) -> list[str]:
        """Return the cells below `headings`; the first is the status if no run has finished."""
        done, n = self.finished, len(self.runs)
        cells = {key: _mean(key, [run.metrics.get(key) for run in done]) for key in headings}
        if not done:
            statuses = {run.status for run in self.runs}
            worst = next(s for s in ("failed", "unreadable", "unfinished") if s in statuses)
            cells = dict.fromkeys(headings, "") | {headings[0]: worst}
        cells["seeds"] = str(n) if len(done) == n else f"{len(done)} of {n}"
        return [cells[key] for key in headings]


@dataclass(frozen=True)
class Comparison:
    """The contents of the table, for any format."""

    keys: list[str]  # settings that differ between the runs, apart from the defense
    headings: list[str]  # metrics, and `seeds` if any row has more than one
    rows: list[TableRow]
    caption: str


def to_terminal(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> Table:
    """Return the table for a terminal; only the first row of a setting names it."""
    compared = compare(runs, columns)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = Text(compared.caption), "left"
    # On a narrow terminal, cells wrap instead of being cut off.
    for name in (*compared.keys, "defense"):
        table.add_column(Text(name), overflow="fold")
    for name in compared.headings:
        table.add_column(name, overflow="fold", justify="right")
    for setting, rows in groupby(compared.rows, lambda row: row.setting):
        table.add_section()
        for i, row in enumerate(rows):
            named = [""] * len(setting) if i else setting
            line = [*named, row.defense, *row.cells(compared.headings)]
            table.add_row(*map(Text, line), style="" if row.finished else "yellow")
    return table


def to_markdown(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> str:
    """Return the table as markdown; every row names its setting."""
    compared = compare(runs, columns)
    words, numbers = [*compared.keys, "defense"], compared.headings
    lines = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers)]
    lines += [[*row.setting, row.defense, *row.cells(numbers)] for row in compared.rows]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", compared.caption, ""])


def compare(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> Comparison:
    """Group the runs into rows: by setting, then by defense in order of appearance.

    Runs without a readable config come last, under the name of their folder.
    """
    read = [run for run in runs if run.config]
    varying = _varying_keys(read)
    keys = [key for key in varying if _group(key) != "defense"]
    parameters = [key for key in varying if _group(key) == "defense"]
    names = list(dict.fromkeys(run.value("defense") for run in read))

    def place(run: RunResult) -> tuple[Any, ...]:
        setting, variant = ([_natural(run.value(k)) for k in ks] for ks in (keys, parameters))
        return setting, names.index(run.value("defense")), variant

    rows = []
    for _, group in groupby(sorted(read, key=place), place):
        same = list(group)
        setting = [_shown(same[0], key) for key in keys]
        rows.append(TableRow(setting, _defense_label(same[0], read), _one_per_seed(same)))
    unread = [run for run in runs if not run.config]
    rows += [TableRow(["?"] * len(keys), run.folder.name, [run]) for run in unread]
    headings = [*columns, "seeds"] if any(len(row.runs) > 1 for row in rows) else [*columns]
    return Comparison(keys, headings, rows, _caption(read, keys, headings))


def notes(runs: Sequence[RunResult]) -> list[str]:
    """Return one line for each run that the averages leave out: its folder and the reason."""
    counted = {run.folder for row in compare(runs).rows for run in row.runs}
    lines = []
    for run in runs:
        if run.status != "finished":
            lines.append(f"{run.status}: {run.folder}" + (f": {run.reason}" if run.reason else ""))
        elif run.folder not in counted:
            lines.append(f"not counted: {run.folder}: a newer run has the same settings and seed")
    return lines


def _shown(run: RunResult, key: str) -> str:
    """Format the value of a setting; attacks that see the honest updates are marked."""
    marked = key == "attack" and run.config.get("attack.omniscient") is True
    return show(run.value(key)) + (" (omniscient)" if marked else "")


def show(value: Value) -> str:
    """Format a setting as on the command line."""
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _varying_keys(runs: Sequence[RunResult]) -> list[str]:
    """Return the keys with more than one value: LEADING first, then in the configs' order.

    Parameters of a group are compared only between runs with the same choice in that group. dba
    has parameters that other attacks lack, but `attack` already tells these runs apart.
    """
    varying = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        steps = key.split(".")
        groups = [".".join(steps[:depth]) for depth in range(1, len(steps))]
        seen: dict[tuple[Value, ...], set[Value]] = {}
        for run in runs:
            seen.setdefault(tuple(map(run.value, groups)), set()).add(run.value(key))
        counts = BOOKKEEPING.isdisjoint([*groups, key])
        if counts and any(len(values) > 1 for values in seen.values()):
            varying.append(key)
    rank = {key: place for place, key in enumerate(LEADING)}
    return sorted(varying, key=lambda key: rank.get(_group(key), len(rank)))


def _group(key: str) -> str:
    return key.partition(".")[0]


def _defense_label(run: RunResult, runs: Sequence[RunResult]) -> str:
    namesakes = [other for other in runs if other.value("defense") == run.value("defense")]
    varying = [key for key in _varying_keys(namesakes) if _group(key) == "defense"]
    parameters = [f"{key.removeprefix('defense.')}={show(run.value(key))}" for key in varying]
    return " ".join([show(run.value("defense")), *parameters])


def _one_per_seed(runs: Sequence[RunResult]) -> list[RunResult]:
    """Keep one run per seed: repeating a seed is no further evidence.

    Prefer finished runs, then the newest, whose plugins may be of a later version.
    """
    by_seed: dict[Value, RunResult] = {}
    for run in runs:
        if run.status == "finished" or run.value("seed") not in by_seed:
            by_seed[run.value("seed")] = run
    return list(by_seed.values())


def _natural(value: Value) -> tuple[Any, ...]:
    """Sort key: 0.2 before 0.3 before 1e1, `cnn9` before `cnn10`, numbers before words."""
    if value is None:
        return (0,)
    try:
        return (1, float(value))
    except ValueError:
        parts = re.split(r"(\d+)", str(value))
        return (2, tuple(int(part) if part.isdecimal() else part for part in parts), value)


def _mean(key: str, values: Sequence[float | None]) -> str:
    """Return mean and sample standard deviation of the measured values: `84.1 ± 0.3`."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    decimals = "{:.1f}" if key == "seconds" else "{:.2f}"
    text = decimals.format if key in NOT_PERCENT else percent
    mean = text(statistics.fmean(present))
    return f"{mean} ± {text(statistics.stdev(present))}" if len(present) > 1 else mean


def _leading(config: Mapping[str, Value]) -> list[str]:
    """Return LEADING without settings that have no effect; `partition` may replace `non_iid`."""
    by_class = config.get("partition", "main_class") == "main_class"
    leading = [key if by_class or key != "non_iid" else "partition" for key in LEADING]
    trained = config.get("pretrain_rounds") and config.get("pretrained") is None
    if not trained or config.get("partition") == "natural":
        leading.remove("pretrain_non_iid")
    return leading


def _caption(runs: Sequence[RunResult], keys: Sequence[str], headings: Sequence[str]) -> str:
    """Return the settings that all runs share, the seeds and the units."""
    first = runs[0].config if runs else {}
    shared = [key for key in _leading(first) if key not in keys and first.get(key) is not None]
    parts = [", ".join(f"{key} {_shown(runs[0], key)}" for key in shared)] if shared else []
    seeds = sorted({run.config["seed"] for run in runs if "seed" in run.config}, key=_natural)
    if seeds:
        parts.append(("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(show, seeds)))
    spread = ", mean ± sample standard deviation over seeds" if "seeds" in headings else ""
    percents = [column for column in headings if column not in NOT_PERCENT]
    units = f"{', '.join(percents)} in %" if percents else ""
    return "; ".join(filter(None, [*parts, (units + spread).removeprefix(", ")]))


def print_runs(
    runs: Sequence[RunResult], markdown: bool = False, columns: Sequence[str] = METRICS
) -> None:
    """Print the table to stdout, and to stderr the runs that it leaves out."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for encodings without ±
    console = Console()
    if not console.file.isatty():
        console.width = 1000  # files and pipes have no width limit
    if markdown:
        console.out(to_markdown(runs, columns), end="", highlight=False)
    else:
        console.print(to_terminal(runs, columns))
    for line in notes(runs):
        print(line, file=sys.stderr)
