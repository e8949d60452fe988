"""How long rank 0 waits for the other ranks: by the time that ranks have needed so far."""

from __future__ import annotations

import os
from collections import defaultdict

from fedbench.errors import UserError

LEAST = "FEDBENCH_RANK_TIMEOUT"  # environment variable: seconds that rank 0 waits at least
DEFAULT_LEAST = 600.0
# Clients of the same size may differ this much, for example if only some of them optimize an attack
FACTOR = 30


class ReplyLimit:
    """Seconds that each rank may take for its share of a command.

    A share is what a rank does of a command, such as training its clients. Its time is assumed to
    grow with its work, at most by the slowest pace that any rank has had in such a share.
    """

    def __init__(self) -> None:
        self._least = _least()
        self._pace: dict[str, float] = defaultdict(float)  # share -> seconds per unit of work

    def note(self, share: str, seconds: float, work: int) -> None:
        """Note how long a rank took for a share."""
        if work:
            self._pace[share] = max(self._pace[share], seconds / work)

    def seconds(self, share: str, work: int) -> float:
        return max(self._least, FACTOR * self._pace[share] * work)


def _least() -> float:
    given = os.environ.get(LEAST, DEFAULT_LEAST)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0
    if not seconds > 0:
        raise UserError(f"{LEAST}={given}: must be a number of seconds above 0")
    return seconds
