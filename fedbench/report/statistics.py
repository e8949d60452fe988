"""Statistics over seeds: estimates with an interval, paired comparisons, Holm's correction.

A seed is the unit of replication. Defenses that were run with the same seed meet the same clients,
data and first updates, so they are compared seed by seed. docs/statistics.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import fmean, stdev
from typing import Any

Seed = str | int | float | None
Bounds = tuple[float, float]

LEVEL = 0.95  # confidence level of every interval
SUCCESS = 0.5  # a backdoor with a higher BA has succeeded
LEAST_SEEDS_FOR_STARS = 6  # with fewer, no p-value can be below 0.05
MAX_EXACT_SEEDS = 13  # each further seed doubles the number of sign flips and the time
N_RANDOM_FLIPS = 9999
DIGITS = 12  # differences are compared to this many digits of the largest value


@dataclass(frozen=True)
class Estimate:
    """One metric of one defense in one setting, over seeds."""

    values: Mapping[Seed, float]  # in order of seeds
    mean: float
    sd: float | None  # sample standard deviation; None for one seed
    low: float | None  # t-interval of the mean, cut to the possible range; None for one seed
    high: float | None

    @property
    def n(self) -> int:
        return len(self.values)

    def worst(self, lower_is_better: bool) -> tuple[Seed, float]:
        """Return the seed with the worst value, and the value; the first seed if several tie."""
        pick = max if lower_is_better else min
        return pick(self.values.items(), key=lambda item: item[1])

    def n_above(self, limit: float = SUCCESS) -> int:
        """Return the number of seeds with a value above `limit`."""
        return sum(value > limit for value in self.values.values())

    @property
    def is_split(self) -> bool:
        """Whether the backdoor succeeded for some seeds only, so that the mean BA describes none.

        Seeds on both sides of 50 % are the criterion. It has no meaning for metrics other than BA.
        """
        return 0 < self.n_above() < self.n


def estimate(
    values: Mapping[Seed, float | None], bounds: Bounds | None = (0.0, 1.0), level: float = LEVEL
) -> Estimate | None:
    """Return mean, deviation and interval over seeds; None if no seed has a value.

    Missing values (None, NaN, infinity) are left out. `bounds` is the possible range of the
    metric; pass None for metrics that are no rates. A value outside shows that the bounds do not
    apply, and the interval is then not cut.
    """
    present = _finite(values)
    if not present:
        return None
    numbers = list(present.values())
    sd = stdev(numbers) if len(numbers) > 1 else None
    return Estimate(present, fmean(numbers), sd, *_interval(numbers, bounds, level))


@dataclass(frozen=True)
class PairedComparison:
    """The difference a - b over the seeds that both were run with."""

    n: int  # shared seeds
    mean: float
    low: float | None  # t-interval of the mean difference; None for one seed
    high: float | None
    p: float  # two-sided sign-flip test
    smallest_p: float  # that this number of seeds can reach
    exact: bool = True  # False: random sign flips, since there are too many to try all

    @property
    def stars(self) -> str:
        """Return `*`, `**`, `***` for p below 0.05, 0.01, 0.001; none below six seeds."""
        if self.n < LEAST_SEEDS_FOR_STARS:
            return ""
        return "*" * sum(self.p < limit for limit in (0.05, 0.01, 0.001))


def compare_paired(
    a: Mapping[Seed, float | None], b: Mapping[Seed, float | None], bounds: Bounds | None = None
) -> PairedComparison | None:
    """Compare two defenses over their shared seeds; None if they share none.

    `bounds` is the possible range of a difference, (-1, 1) for rates, to which the interval is cut.
    """
    first, second = _finite(a), _finite(b)
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return None
    xs, ys = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    numbers = [x - y for x, y in zip(xs, ys, strict=True)]
    n = len(seeds)
    exact = n <= MAX_EXACT_SEEDS
    # scipy counts the observed sample among the random ones.
    smallest = max(smallest_p(n), 0.0 if exact else 2 / (N_RANDOM_FLIPS + 1))
    p = max(_sign_flip_p(whole_differences(xs, ys)), smallest)
    low, high = _interval(numbers, bounds, LEVEL)
    return PairedComparison(n, fmean(numbers), low, high, p, smallest, exact)


def smallest_p(n: int) -> float:
    """Return the smallest two-sided p-value of a sign-flip or signed-rank test on n pairs.

    All n differences have the same sign in 2 of the 2**n equally likely cases.
    """
    return 2.0 ** (1 - n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm 1979), in the order given.

    The i-th smallest of m p-values is multiplied by m - i + 1, and is at least its predecessor.
    statsmodels' `multipletests` returns the same but runs the garbage collector on every call,
    which is slow in a process that holds many runs.
    """
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


def whole_differences(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Return x - y as whole numbers of a unit at the 12th digit of the largest value.

    Rounding error would otherwise break ties: 0.9 - 0.8 is not 0.3 - 0.2 in floating point.
    """
    largest = max((abs(value) for value in (*xs, *ys)), default=0.0)
    if largest == 0:
        return [0] * len(xs)
    # A power of ten above 1e300 would overflow; values that small are zero in effect.
    scale = 10.0 ** min(DIGITS - math.ceil(math.log10(largest)), 300)
    return [round((x - y) * scale) for x, y in zip(xs, ys, strict=True)]


def _finite(values: Mapping[Seed, float | None]) -> dict[Seed, float]:
    """Return the values that are finite numbers, in order of seeds."""

    def place(seed: Seed) -> tuple[int, float, str]:
        if isinstance(seed, str):
            return (2, 0.0, seed)
        return (0, 0.0, "") if seed is None else (1, seed, "")

    present = {seed: v for seed, v in values.items() if v is not None and math.isfinite(v)}
    return {seed: present[seed] for seed in sorted(present, key=place)}


def _interval(
    numbers: Sequence[float], bounds: Bounds | None, level: float
) -> tuple[float, float] | tuple[None, None]:
    """Return mean -+ t * sd / sqrt(n), cut to `bounds`: the true mean is within them anyway."""
    n = len(numbers)
    if n < 2:
        return None, None
    mean = fmean(numbers)
    half = _t_quantile((1 + level) / 2, n - 1) * stdev(numbers) / math.sqrt(n)
    low, high = mean - half, mean + half
    if bounds is not None and bounds[0] <= min(numbers) and max(numbers) <= bounds[1]:
        return max(low, bounds[0]), min(high, bounds[1])
    return low, high


@lru_cache(maxsize=256)
def _t_quantile(probability: float, degrees: int) -> float:
    from scipy import stats  # type: ignore[import-untyped]

    return float(stats.t.ppf(probability, degrees))


def _sign_flip_p(differences: Sequence[int]) -> float:
    """Return the share of sign flips whose sum is at least as far from zero as the observed one.

    More than MAX_EXACT_SEEDS differences are tested with random flips from a fixed seed.
    """
    if len(differences) < 2 or not any(differences):
        return 1.0
    if len(differences) > MAX_EXACT_SEEDS:
        return _random_flip_p(differences)
    import numpy as np

    sums = _sign_flips(len(differences)) @ np.array(differences, dtype=np.int64)
    return float((abs(sums) >= abs(sum(differences))).mean())


@cache
def _sign_flips(n: int) -> Any:
    """All sign flips of n numbers, one of each opposite pair: [2^(n-1), n].

    scipy's permutation_test builds them anew for each pair of defenses. In a report of many pairs
    that takes seconds.
    """
    import numpy as np

    bits = np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
    return 1 - 2 * bits


def _random_flip_p(differences: Sequence[int]) -> float:
    import numpy as np
    from scipy import stats

    def total(sample: Any, axis: int) -> Any:
        return sample.sum(axis=axis)

    result = stats.permutation_test(
        (np.array(differences, dtype=float),),
        total,
        permutation_type="samples",  # with one sample: flip signs
        vectorized=True,
        n_resamples=N_RANDOM_FLIPS,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)
