"""Caption and footnotes of the LaTeX table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedbench.report.comparison import LOWER_BOUND, unit_of
from fedbench.report.latex_text import escape
from fedbench.report.pivot_table import PivotTable, is_backdoor_accuracy
from fedbench.report.report_data import ReportData
from fedbench.report.statistics import Estimate
from fedbench.results.settings import Value, show

METRIC_WORDS = {
    "BA": "backdoor accuracy (BA)",
    "MA": "main-task accuracy (MA)",
    "TPR": "share of poisoned updates that were rejected (TPR)",
    "TNR": "share of benign updates that were accepted (TNR)",
    "AUC": "area under the ROC curve of the scores (AUC)",
    "BA_cumulative": r"mean BA since the first attacked round (BA\_cumulative)",
    "MA_lost": r"points of MA lost against the benign run of the same seed (MA\_lost)",
    "lifespan_50": r"rounds from the attack's end until BA is below 50\,\% (lifespan\_50)",
    "lifespan_10": r"rounds from the attack's end until BA is below 10\,\% (lifespan\_10)",
    "recovery": "rounds from the attack's end until MA is within a point of the benign run's "
    "(recovery)",
}
AT_LEAST = r"$\geq$"
SETTING_WORDS = {
    "dataset": "data set {}",
    "pmr": "share of malicious clients {}",
    "pdr": "share of poisoned samples {}",
    "non_iid": "degree of non-IID data {}",
    "n_clients": "{} clients per round",
    "rounds": "{} rounds",
}
SPLIT_NOTE = (
    r"\textsuperscript{\dag$k$/$n$}\,BA is above 50\,\% in $k$ of $n$ seeds; "
    "the mean describes none of them."
)


def caption(data: ReportData, table: PivotTable) -> str:
    """Return what was measured, the settings that all runs share, the seeds and the marks."""
    sentences = [_metrics(table.metrics), _shared(data), _seeds(data, table), *_marks(table)]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def label(data: ReportData) -> str:
    """Return `tab:NAME` for runs/NAME."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", data.folders[0].resolve().name).strip("-")
    return f"tab:{name or 'report'}"


def marks_of(metric: str, estimate: Estimate, n_seeds: int) -> list[str]:
    """Return the note marks of a value: dagger for a split BA, double dagger for fewer seeds."""
    split = is_backdoor_accuracy(metric) and estimate.is_split
    return [
        *[rf"\dag{estimate.n_above()}/{estimate.n}"] * split,
        *[rf"\ddag{estimate.n}"] * (estimate.n < n_seeds),
    ]


def footnotes(table: PivotTable) -> list[str]:
    """Return the lines below the tabular that explain the marks in it."""
    found = [mark for metric, e in _values(table) for mark in marks_of(metric, e, table.n_seeds())]
    notes = [SPLIT_NOTE] * any(mark.startswith(r"\dag") for mark in found)
    if any(mark.startswith(r"\ddag") for mark in found):
        notes.append(
            rf"\textsuperscript{{\ddag$n$}}\,From $n$ seeds only, others from {table.n_seeds()}."
        )
    text = r"\quad ".join(notes)
    return [rf"\par\smallskip{{\footnotesize {text}\par}}"] if notes else []


def _values(table: PivotTable) -> list[tuple[str, Estimate]]:
    found = [item for cell in table.cells() for item in cell.estimates.items()]
    return [(metric, estimate) for metric, estimate in found if estimate is not None]


def _metrics(metrics: Sequence[str]) -> str:
    words = {key: METRIC_WORDS.get(key, escape(key)) for key in metrics}
    rates = [word for key, word in words.items() if unit_of(key) == "%"]
    others = [word for key, word in words.items() if unit_of(key) != "%"]
    return ", ".join([*[_listed(rates) + r" in \%"] * bool(rates), *others])


def _shared(data: ReportData) -> str:
    shared = dict(data.comparison.shared)
    if len(data.defenses) == 1:
        shared = {"defense": data.defenses[0], **shared}
    words = []
    for key, value in shared.items():
        span = re.fullmatch(r"\[(\d+), (\d+)\]", value)
        text = f"{span[1]} to {span[2]}" if span and key == "n_clients" else value
        words.append(escape(SETTING_WORDS.get(key, f"{key} {{}}").replace("{}", text)))
    return ", ".join(words)


def _seeds(data: ReportData, table: PivotTable) -> str:
    seeds = data.comparison.seeds
    if not seeds:
        return ""
    named = f"seeds {_listed_seeds(seeds)}" if len(seeds) > 1 else f"seed {_listed_seeds(seeds)}"
    if table.n_seeds() < 2:
        return f"{named}; one run per value, so no intervals and no ties"
    return rf"mean $\pm$ half-width of the 95\,\% t-interval over {named}"


def _listed_seeds(seeds: Sequence[Value]) -> str:
    """Return `0 and 1`, or `0 to 5`."""
    whole = [seed for seed in seeds if type(seed) is int]
    if len(whole) == len(seeds) > 2 and whole == list(range(whole[0], whole[0] + len(whole))):
        return f"{whole[0]} to {whole[-1]}"
    return _listed([escape(show(seed)) for seed in seeds])


def _marks(table: PivotTable) -> list[str]:
    found = {mark for cell in table.cells() for mark in cell.marks.values()}
    censored = any(c.row.censored_seeds(key) for c in table.cells() for key in table.metrics)
    unmeasured = any(e is None for cell in table.cells() for e in cell.estimates.values())
    return [
        *["bold: best defense in the same setting"] * ("best" in found),
        *[r"underlined: the 95\,\% interval overlaps that of the best"] * ("tie" in found),
        *[f"{AT_LEAST}: {LOWER_BOUND}"] * censored,
        *["a dash: not defined, or no finished run"] * (unmeasured or _has_gaps(table)),
    ]


def _has_gaps(table: PivotTable) -> bool:
    """Whether a row lacks a column in its section."""
    return any(
        len(section) < len({row for row, _ in section}) * len(table.columns)
        for section in table.sections.values()
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
