"""Screening: the server refuses malformed updates (NaN, infinity, wrong size)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Screened:
    """The updates of a round after screening."""

    updates: Tensor  # [N, P]; refused rows are zero
    buffers: Tensor  # [N, Q]
    refused: Mapping[int, str]  # row -> reason

    @property
    def passed(self) -> list[int]:
        """Rows that were not refused."""
        return [i for i in range(len(self.updates)) if i not in self.refused]


def screen(updates: Tensor, buffers: Tensor, wrong_size: Mapping[int, str]) -> Screened:
    """Refuse rows of the wrong size and rows that are not finite; zeroes them in place."""
    refused = dict(wrong_size)
    for i in range(len(updates)):
        if i not in refused and not (is_finite(updates[i]) and is_finite(buffers[i])):
            refused[i] = "not finite"
    for i in refused:
        updates[i] = 0
        buffers[i] = 0
    return Screened(updates, buffers, refused)


def is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
