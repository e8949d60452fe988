"""FLAME with the weighted mean of the clients' batch-norm statistics, not the robust rule.

Updates are judged and combined as by `flame`. Only the statistics of the global model differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedbench.defense import DEFENSES
from fedbench.defenses.flame import Flame


@DEFENSES.register("flame_mean")
@dataclass(frozen=True)
class FlameMean(Flame):
    """FLAME, with averaged statistics."""

    averages_buffers: ClassVar[bool] = True
