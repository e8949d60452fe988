"""No attack: every client is honest. BA is still measured, as the error rate of a clean model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedbench.attack import ATTACKS, Attack


@ATTACKS.register("none")
@dataclass(frozen=True)
class NoAttack(Attack):
    """The benign baseline."""

    active: ClassVar[bool] = False

    backdoors: list[Any] | None = None  # to measure BA on; None: the dataset's default

    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return default if self.backdoors is None else self.backdoors
