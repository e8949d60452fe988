"""No attack: every client is honest. BA is measured all the same: the clean model's mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedbench.attack import ATTACKS, Attack


@ATTACKS.register("none")
@dataclass(frozen=True)
class NoAttack(Attack):
    """The benign setting."""

    active: ClassVar[bool] = False

    backdoors: list[Any] | None = None  # to measure; None: the data set's own

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return default if self.backdoors is None else self.backdoors
