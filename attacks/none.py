"""No attack: every client is honest. BA is measured all the same: the clean model's mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedbench.attack import ATTACKS, Attack


@ATTACKS.register("none")
@dataclass(frozen=True)
class NoAttack(Attack):
    """The benign setting."""

    active: ClassVar[bool] = False
