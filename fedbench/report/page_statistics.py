"""The statistics of the report page: paired comparisons, ranks, worst cases, published numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.critical_difference import critical_difference
from fedbench.report.figures.critical_difference import ranked as ranks_of
from fedbench.report.page_numbers import interval_entry, json_safe, rounded
from fedbench.report.plotting import METADATA, PAPER_STYLE, plot_style
from fedbench.report.report_data import ReportData
from fedbench.report.reported import ReportedMatch, match, read_reported
from fedbench.report.statistics import PairedComparison, compare_paired, holm
from fedbench.report.worst_case import WorstCase, worst_cases
from fedbench.results.settings import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = ("BA", "MA")
DIFFERENCE = (-1.0, 1.0)  # possible range of the difference of two rates


def paired_entries(data: ReportData) -> list[Any]:
    """Return all pairs of defenses in the same setting that share seeds, for BA and MA.

    Holm's correction is over the pairs of a setting, and stars are of the corrected p.
    """
    entries = []
    for setting, group in groupby(data.rows, lambda row: row.setting):
        rows = list(group)
        for metric in COMPARED:
            pairs = _pairs(rows, metric)
            corrected = holm([found.p for _, _, found in pairs])
            for (a, b, found), p in zip(pairs, corrected, strict=True):
                labels = {"a": data.defenses.index(a), "b": data.defenses.index(b)}
                entries.append(
                    {"setting": setting, "metric": metric, **labels, **_paired(found, p)}
                )
    return entries


def _pairs(rows: Sequence[TableRow], metric: str) -> list[tuple[str, str, PairedComparison]]:
    """Return the defenses of each pair of rows that shares seeds, and how they compare."""
    values = [{run.value("seed"): run.metrics.get(metric) for run in row.finished} for row in rows]
    return [
        (a.defense, b.defense, found)
        for (i, a), (j, b) in combinations(enumerate(rows), 2)
        if (found := compare_paired(values[i], values[j], DIFFERENCE)) is not None
    ]


def _paired(found: PairedComparison, corrected: float) -> dict[str, Any]:
    return {
        "n": found.n,
        **{key: rounded(getattr(found, key)) for key in ("mean", "low", "high")},
        "p": rounded(found.p),
        "p_holm": rounded(corrected),
        "smallest_p": rounded(found.smallest_p),
        "stars": replace(found, p=corrected).stars,
    }


def rank_entry(data: ReportData, metric: str) -> Any:
    """Return the ranks of the defenses over all settings; None if there are too few."""
    ranked = ranks_of(data, metric)
    if ranked is None:
        return None
    figure = critical_difference(ranked, data.styles)
    return {
        "names": list(ranked.names),
        "mean_ranks": {name: rounded(rank) for name, rank in ranked.mean_ranks.items()},
        "n_blocks": ranked.n_blocks,
        "p": rounded(ranked.p),
        "pairs": [[a, b, rounded(p)] for (a, b), p in ranked.pair_p.items()],
        "cliques": [list(clique) for clique in ranked.cliques],
        "dropped": list(ranked.dropped),
        "smallest_p": rounded(ranked.smallest_p),
        "blocks_needed": ranked.blocks_needed,
        "svg": svg_of(figure),
    }


@plot_style(PAPER_STYLE)
def svg_of(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata=METADATA["svg"])
    return file.getvalue().decode("utf-8")


def worst_entries(data: ReportData) -> list[Any]:
    known = {defense: i for i, defense in enumerate(data.defenses)}
    return [_worst(case, known[case.defense]) for case in worst_cases(data.comparison)]


def _worst(case: WorstCase, defense: int) -> dict[str, Any]:
    return {
        "defense": defense,
        "setting": list(case.setting.values()),
        "attack": case.attack,
        **interval_entry(case.BA),
        "worst_seed": [json_safe(case.peak_seed), rounded(case.peak)],
        "n_attacks": case.n_attacks,
        "adaptive": case.is_adaptive,
        "adaptive_tried": list(case.adaptive),
    }


def reported_entries(data: ReportData) -> list[Any]:
    """Return the published numbers of the rows."""
    return [_reported(data, entry) for entry in match(data.rows, read_reported())]


def _reported(data: ReportData, entry: ReportedMatch) -> dict[str, Any]:
    value = entry.reported
    # What tells rows apart, and what was changed without a word about it in the paper
    ours = dict(zip(data.comparison.keys, entry.row.setting, strict=True))
    ours |= {key: show(setting) for key, setting in entry.unstated.items()}
    ours = {key: label for key, label in ours.items() if key not in ("attack", "dataset")}
    settings = [f"{key} {show(setting)}" for key, setting in value.settings.items()]
    return {
        "source": value.source.citation,
        "where": value.where,
        "dataset": value.dataset,
        "attack": value.attack,
        "defense": entry.row.defense,
        "settings": ", ".join(settings),
        "metric": entry.metric,
        "paper": rounded(entry.paper),
        "ours": rounded(entry.ours.mean),
        "low": rounded(entry.ours.low),
        "high": rounded(entry.ours.high),
        "n": entry.ours.n,
        "difference": rounded(entry.difference),
        "stands_in": entry.stands_in,
        "our_settings": ", ".join(f"{key} {label}" for key, label in ours.items()),
        "note": value.note,
    }
