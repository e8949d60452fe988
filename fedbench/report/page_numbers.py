"""Numbers of the report page: short, and never NaN or infinity, which JSON lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fedbench.report.statistics import Estimate

DIGITS = 6  # significant


def rounded(value: float | None) -> float | None:
    """Return a number with DIGITS significant digits; None if it is undefined."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def rounded_all(values: Iterable[float | None]) -> list[float | None]:
    return [rounded(value) for value in values]


def json_safe(value: Any) -> Any:
    """Return a setting as JSON can hold it: `nan` and `inf` become text."""
    unsafe = isinstance(value, float) and not math.isfinite(value)
    return str(value) if unsafe else value


def estimate_entry(found: Estimate | None, metric: str, lower_is_better: bool) -> Any:
    """Return an estimate as the page shows it; None if there is none."""
    if found is None:
        return None
    seed, value = found.worst(lower_is_better)
    return {
        **interval_entry(found),
        "sd": rounded(found.sd),
        "worst": [json_safe(seed), rounded(value)],
        "above": found.n_above(),
        "split": metric == "BA" and found.is_split,
        "values": [[json_safe(seed), rounded(number)] for seed, number in found.values.items()],
    }


def interval_entry(found: Estimate) -> dict[str, Any]:
    """Return mean, interval and number of seeds."""
    return {
        "mean": rounded(found.mean),
        "low": rounded(found.low),
        "high": rounded(found.high),
        "n": found.n,
    }
