"""Rank defenses over many settings: Friedman's test, then Wilcoxon tests with Holm's correction.

A block is one setting with one value per defense, the mean over seeds. docs/statistics.md has the
definitions and the reasons for these tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from statistics import fmean

from fedbench.report.statistics import DIGITS, holm, smallest_p, whole_differences

ALPHA = 0.05
LEAST_DEFENSES = 3
LEAST_BLOCKS = 2

Blocks = dict[str, dict[str, float]]  # setting -> defense -> value


@dataclass(frozen=True)
class RankComparison:
    """The ranks of several defenses over the settings in which all of them were run."""

    names: tuple[str, ...]  # best mean rank first
    mean_ranks: Mapping[str, float]  # 1 is best; ties share the mean of their ranks
    n_blocks: int
    statistic: float  # Friedman's chi-square, corrected for ties
    p: float
    pair_p: Mapping[tuple[str, str], float]  # Holm-corrected; the better rank comes first
    cliques: tuple[tuple[str, ...], ...]  # bars of the critical-difference diagram
    dropped: tuple[str, ...]  # what was left out and why, one sentence each

    def differ(self, a: str, b: str) -> bool:
        """Whether a and b are told apart: Friedman's test and the pair's are both below 0.05."""
        p = self.pair_p[(a, b) if (a, b) in self.pair_p else (b, a)]
        return self.p < ALPHA and p < ALPHA

    @property
    def smallest_p(self) -> float:
        """Return the smallest corrected p-value that a pair can reach with this many blocks."""
        return smallest_pair_p(len(self.names), self.n_blocks)

    @property
    def blocks_needed(self) -> int:
        """Return the least number of blocks with which a pair could be told apart at all."""
        return blocks_needed(len(self.names))


def smallest_pair_p(n_defenses: int, n_blocks: int) -> float:
    """Return the smallest Holm-corrected p-value: 2 / 2**n_blocks times the number of pairs."""
    return min(1.0, math.comb(n_defenses, 2) * smallest_p(n_blocks))


def blocks_needed(n_defenses: int) -> int:
    """Return the least number of blocks whose smallest corrected p-value is below 0.05."""
    return next(n for n in count(LEAST_BLOCKS) if smallest_pair_p(n_defenses, n) < ALPHA)


def compare_ranks(
    blocks: Mapping[str, Mapping[str, float | None]], lower_is_better: bool
) -> RankComparison | None:
    """Rank the defenses over the settings; None below 3 defenses or 2 complete settings."""
    table, names, dropped = _complete(blocks)
    if len(names) < LEAST_DEFENSES or len(table) < LEAST_BLOCKS:
        return None
    columns = {name: [row[name] for row in table.values()] for name in names}
    ranks = _mean_ranks(columns, lower_is_better)
    names = sorted(names, key=lambda name: (ranks[name], name))
    statistic, p = _friedman([columns[name] for name in names])
    pairs = list(combinations(names, 2))
    raw = [signed_rank_p(whole_differences(columns[a], columns[b])) for a, b in pairs]
    pair_p = dict(zip(pairs, holm(raw), strict=True))
    ranked = RankComparison(
        names=tuple(names),
        mean_ranks={name: ranks[name] for name in names},
        n_blocks=len(table),
        statistic=statistic,
        p=p,
        pair_p=pair_p,
        cliques=(),
        dropped=tuple(dropped),
    )
    return replace(ranked, cliques=_cliques(names, ranked.differ))


def signed_rank_p(differences: Sequence[float]) -> float:
    """Return the exact two-sided p-value of Wilcoxon's signed-rank test.

    Zero differences are left out; equal ones share the mean of their ranks. The distribution of
    the rank sum is built rank by rank, because scipy's exact distribution assumes that there are
    no ties, and there are many: defenses that all stop an attack have the same BA.
    """
    import numpy as np
    from scipy import stats  # type: ignore[import-untyped]

    values = np.array([d for d in differences if d != 0], dtype=float)
    if not len(values):
        return 1.0
    doubled = (2 * stats.rankdata(np.abs(values))).astype(int)  # whole: mean ranks end in .0 or .5
    share = np.zeros(doubled.sum() + 1)  # share[s]: of all sign flips, those with rank sum s / 2
    share[0] = 1.0
    for rank in doubled:
        share[rank:] = (share[rank:] + share[:-rank]) / 2
        share[:rank] /= 2
    positive = doubled[values > 0].sum()
    smaller = min(positive, doubled.sum() - positive)
    return min(1.0, 2 * float(share[: smaller + 1].sum()))


def _mean_ranks(columns: Mapping[str, Sequence[float]], lower_is_better: bool) -> dict[str, float]:
    import numpy as np
    from scipy import stats

    sign = 1 if lower_is_better else -1
    ranks = stats.rankdata(sign * np.array(list(columns.values())), axis=0)  # [defenses, blocks]
    return {name: fmean(row.tolist()) for name, row in zip(columns, ranks, strict=True)}


def _friedman(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return Friedman's chi-square and p-value; 0 and 1 if every block is one tie."""
    from scipy import stats

    if all(len(set(row)) == 1 for row in zip(*samples, strict=True)):
        return 0.0, 1.0
    result = stats.friedmanchisquare(*samples)
    return float(result.statistic), float(result.pvalue)


def _cliques(
    names: Sequence[str], differ: Callable[[str, str], bool]
) -> tuple[tuple[str, ...], ...]:
    """Return the longest runs of two or more neighbors in rank of which no pair is told apart."""
    cliques: list[tuple[str, ...]] = []
    last_end = 0
    for start in range(len(names)):
        end = start + 1
        while end < len(names) and not any(differ(a, names[end]) for a in names[start:end]):
            end += 1
        if end - start > 1 and end > last_end:
            cliques.append(tuple(names[start:end]))
            last_end = end
    return tuple(cliques)


def _complete(
    blocks: Mapping[str, Mapping[str, float | None]],
) -> tuple[Blocks, list[str], list[str]]:
    """Return the complete blocks, the defenses in them, and what was dropped, in words.

    Settings in which most defenses lack a value go first, then defenses that lack a value in most
    settings, then every setting that is still incomplete. So neither one failed run removes a
    defense nor one rarely run defense removes the settings.
    """
    # Rounding error of the mean over seeds must not break ties.
    table: Blocks = {
        setting: {
            name: round(value, DIGITS)
            for name, value in row.items()
            if value is not None and math.isfinite(value)
        }
        for setting, row in blocks.items()
    }
    every = list(dict.fromkeys(name for row in blocks.values() for name in row))
    names = [name for name in every if any(name in row for row in table.values())]
    dropped = [f"{name}: no value in any setting" for name in every if name not in names]

    few = [setting for setting, row in table.items() if 2 * len(row) < len(names)]
    for setting in few:
        dropped.append(f"{setting}: values of {len(table.pop(setting))} of {len(names)} defenses")

    found = {name: sum(name in row for row in table.values()) for name in names}
    rare = [name for name in names if 2 * found[name] < len(table)]
    dropped += [f"{name}: values in {found[name]} of {len(table)} settings" for name in rare]
    names = [name for name in names if name not in rare]

    for setting, row in list(table.items()):
        if missing := [name for name in names if name not in row]:
            dropped.append(f"{setting}: no value of {', '.join(missing)}")
            del table[setting]
    return table, names, dropped
