"""The comparison of runs: `python -m fedbench.report runs/NAME` prints it, defenses by setting."""

from __future__ import annotations

import io
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbench.config import NO_EFFECT
from fedbench.report.console import percent
from fedbench.results.reader import METRICS, STEALTH, RunResult, Value

NO_SHARES = ("seconds", *STEALTH)  # all other numbers are shown in per cent
BOOKKEEPING = frozenset({*NO_EFFECT, "seed"})  # these never make two runs differ
# What a reader asks first of a setting; the caption names those that all runs share.
LEADING = (
    *("dataset", "model", "attack", "pmr", "pdr", "non_iid", "pretrain_non_iid", "n_clients"),
    "rounds",
)


@dataclass(frozen=True)
class Row:
    """The runs of one defense in one setting, one a seed."""

    setting: tuple[Value, ...]
    defense: str  # `krum`, or `krum m=5` where runs of krum differ in m
    runs: tuple[RunResult, ...]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.status == "finished"]

    def numbers(self, columns: Sequence[str]) -> list[str]:
        """Cells of the columns and of `seeds`; without a finished run, its status instead."""
        if not self.finished:
            statuses = {run.status for run in self.runs}
            worst = next(s for s in ("failed", "unreadable", "unfinished") if s in statuses)
            cells = [worst] + [""] * (len(columns) - 1)
        else:
            cells = [_mean(key, [run.metrics.get(key) for run in self.finished]) for key in columns]
        done, all_ = len(self.finished), len(self.runs)
        return [*cells, f"{done}" if done == all_ else f"{done} of {all_}"]


@dataclass(frozen=True)
class Comparison:
    """What every form of the table shows."""

    keys: list[str]  # of the config, that make the settings
    columns: list[str]  # numbers of a run, by default METRICS
    repeated: bool  # whether any row has more than one seed
    rows: list[Row]
    caption: str

    @property
    def headings(self) -> list[str]:
        return [*self.columns, "seeds"] if self.repeated else self.columns

    def cells(self, row: Row) -> list[str]:
        return row.numbers(self.columns)[: len(self.headings)]


def comparison(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> Table:
    """The table for a terminal; a setting is named once, in the first row of its section."""
    compared = compare(runs, columns)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = Text(compared.caption), "left"
    # On a narrow terminal cells take more lines; nothing is cut off.
    for name in (*compared.keys, "defense"):
        table.add_column(Text(name), overflow="fold")
    for name in compared.headings:
        table.add_column(name, overflow="fold", justify="right")
    previous: tuple[Value, ...] | None = None
    for row in compared.rows:
        if row.setting != previous:
            table.add_section()
        setting = ["" if row.setting == previous else show(value) for value in row.setting]
        line = [*setting, row.defense, *compared.cells(row)]
        table.add_row(*map(Text, line), style="" if row.finished else "yellow")
        previous = row.setting
    return table


def to_markdown(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> str:
    """The same table for a document; every row names its setting."""
    compared = compare(runs, columns)
    words, numbers = [*compared.keys, "defense"], compared.headings
    lines = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers)]
    for row in compared.rows:
        lines.append([*map(show, row.setting), row.defense, *compared.cells(row)])
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*table, "", compared.caption, ""])


def compare(runs: Sequence[RunResult], columns: Sequence[str] = METRICS) -> Comparison:
    """Sorts the runs into rows: by setting, then by defense in order of appearance.

    A run whose config cannot be read belongs to no setting; it comes last, under its folder's name.
    """
    read = [run for run in runs if run.config]
    varying = _varying_keys(read)
    keys = [key for key in varying if _group(key) != "defense"]
    names = list(dict.fromkeys(run.value("defense") for run in read))
    rows: dict[tuple[Any, ...], list[RunResult]] = {}
    for run in read:
        setting = [_natural(run.value(key)) for key in keys]
        variant = [_natural(run.value(key)) for key in varying if _group(key) == "defense"]
        place = (tuple(setting), names.index(run.value("defense")), tuple(variant))
        rows.setdefault(place, []).append(run)
    table = []
    for _, same in sorted(rows.items(), key=lambda item: item[0]):
        setting_values = tuple(_shown(same[0], key) for key in keys)
        table.append(Row(setting_values, _defense_label(same[0], read), _one_a_seed(same)))
    table += [Row(("?",) * len(keys), run.folder.name, (run,)) for run in runs if not run.config]
    repeated = any(len(row.runs) > 1 for row in table)
    return Comparison(keys, [*columns], repeated, table, _caption(read, keys, repeated, columns))


def notes(runs: Sequence[RunResult]) -> list[str]:
    """A line for each run that is not in the averages: which, where, why."""
    counted = {run.folder for row in compare(runs).rows for run in row.runs}
    lines = []
    for run in runs:
        if run.status != "finished":
            lines.append(f"{run.status}: {run.folder}" + (f": {run.reason}" if run.reason else ""))
        elif run.folder not in counted:
            lines.append(f"not counted: {run.folder}: a newer run has its settings and seed")
    return lines


def _shown(run: RunResult, key: str) -> Value:
    """A setting's value; an attack that knows what honest clients send is marked."""
    value = run.value(key)
    knows_all = key == "attack" and run.config.get("attack.omniscient") is True
    return f"{value} (omniscient)" if knows_all else value


def show(value: Value) -> str:
    """A config value as one would write it on the command line."""
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _varying_keys(runs: Sequence[RunResult]) -> list[str]:
    """Keys with more than one value: LEADING ones first, then in the configs' order.

    A group's parameters are compared among the runs with the same choice in that group only: dba
    has parameters that other attacks lack, which says no more than `attack` itself.
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


def _one_a_seed(runs: Sequence[RunResult]) -> tuple[RunResult, ...]:
    """Without repetitions of a seed, which would pass for more evidence.

    Finished runs go first, and of these the newest: its plugins may be of a later version.
    """
    by_seed: dict[Value, RunResult] = {}
    for run in runs:
        if run.status == "finished" or run.value("seed") not in by_seed:
            by_seed[run.value("seed")] = run
    return tuple(by_seed.values())


def _natural(value: Value) -> tuple[Any, ...]:
    """Sorts 0.2 before 0.3 before 1e1, `cnn9` before `cnn10`, and numbers before words."""
    if value is None:
        return (0,)
    try:
        return (1, float(value))
    except ValueError:
        parts = re.split(r"(\d+)", str(value))
        return (2, tuple(int(part) if part.isdecimal() else part for part in parts), value)


def _mean(key: str, values: Sequence[float | None]) -> str:
    """`84.1 ± 0.3`: mean and sample standard deviation of what was measured."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    write = percent if key not in NO_SHARES else ("{:.1f}" if key == "seconds" else "{:.2f}").format
    mean = write(statistics.fmean(present))
    return f"{mean} ± {write(statistics.stdev(present))}" if len(present) > 1 else mean


def _leading(config: Mapping[str, Value]) -> list[str]:
    """LEADING without what has no effect; how samples are split in place of `non_iid`."""
    by_class = config.get("partition", "main_class") == "main_class"
    leading = [key if by_class or key != "non_iid" else "partition" for key in LEADING]
    trained = config.get("pretrain_rounds") and config.get("pretrained") is None
    if not trained or config.get("partition") == "natural":
        leading.remove("pretrain_non_iid")
    return leading


def _caption(
    runs: Sequence[RunResult], keys: Sequence[str], repeated: bool, columns: Sequence[str]
) -> str:
    """What all the runs share, the seeds, and how to read the numbers."""
    first = runs[0].config if runs else {}
    shared = [key for key in _leading(first) if key not in keys and first.get(key) is not None]
    parts = [", ".join(f"{key} {show(_shown(runs[0], key))}" for key in shared)] if shared else []
    seeds = sorted({run.config["seed"] for run in runs if "seed" in run.config}, key=_natural)
    if seeds:
        parts.append(("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(show, seeds)))
    spread = ", mean ± sample standard deviation over seeds" if repeated else ""
    shares = [column for column in columns if column not in NO_SHARES]
    units = f"{', '.join(shares)} in %" if shares else ""
    return "; ".join(filter(None, [*parts, (units + spread).removeprefix(", ")]))


def print_runs(
    runs: Sequence[RunResult], markdown: bool = False, columns: Sequence[str] = METRICS
) -> None:
    """The table on stdout, and below it on stderr what is not in its averages."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without ± is no reason to stop
    console = Console()
    if not console.file.isatty():
        console.width = 1000  # a file or pipe has no width to keep to
    if markdown:
        console.print(
            to_markdown(runs, columns), end="", markup=False, highlight=False, soft_wrap=True
        )
    else:
        console.print(comparison(runs, columns))
    for line in notes(runs):
        print(line, file=sys.stderr)
