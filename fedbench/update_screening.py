"""Screening: the server refuses clients whose model is malformed.

A client sends one model: an update [P] and float buffers [Q]. If either is malformed, the server
trusts neither, and both are refused.

Only what no training yields is refused: NaN, infinity, a wrong size, a negative variance, buffers
a thousand times larger than usual. Judging clients within these limits is up to the defense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedbench.engine.flat_parameters import ParameterLayout, is_variance

LIMIT = 1000  # largest absolute value of a buffer, relative to the usual one


@dataclass(frozen=True)
class Screened:
    """The updates of a round after screening."""

    updates: Tensor  # [N, P]; refused rows are zero
    buffers: Tensor  # [N, Q]
    refused: Mapping[int, str]  # row -> reason, such as `not finite`

    @property
    def passed(self) -> list[int]:
        """Rows that were not refused."""
        return [i for i in range(len(self.updates)) if i not in self.refused]


def screen(
    updates: Tensor,
    buffers: Tensor,
    wrong_size: Mapping[int, str],
    layout: ParameterLayout,
    global_buffers: Tensor,
) -> Screened:
    """Refuse malformed rows of updates [N, P] and buffers [N, Q]; zeroes them in place."""
    refused = dict(wrong_size)
    for i in range(len(updates)):
        if i not in refused and not (is_finite(updates[i]) and is_finite(buffers[i])):
            refused[i] = "not finite"
    rows = [i for i in range(len(updates)) if i not in refused]
    for name, place in layout.buffers.items():
        for i, reason in _malformed(buffers[rows, place], global_buffers[place], name).items():
            refused.setdefault(rows[i], reason)
    for i in refused:
        updates[i] = 0
        buffers[i] = 0
    return Screened(updates, buffers, refused)


def _malformed(values: Tensor, global_values: Tensor, name: str) -> dict[int, str]:
    """Rows of one buffer [n, k] that are negative, if it is a variance, or far above the usual.

    The usual value is the largest of the global model's or, if larger, the median over the clients.
    It counts as at least 1: a buffer may be zero until now.
    """
    if not values.numel():
        return {}
    largest = values.abs().amax(dim=1)  # [n]
    usual = max(float(largest.median()), float(global_values.abs().max()), 1.0)
    huge = (largest > LIMIT * usual).nonzero().flatten().tolist()
    reasons = {i: f"{name} has {float(largest[i]):.2g}, usual are {usual:.2g}" for i in huge}
    if is_variance(name):
        negative = (values < 0).any(dim=1).nonzero().flatten().tolist()
        reasons |= dict.fromkeys(negative, f"{name} has a negative variance")
    return reasons


def is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
