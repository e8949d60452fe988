"""What one try of a soak test found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One try: what happened, and what was wrong about it."""

    kind: str  # counted by the command, such as `refused in one line`
    failure: str | None = None  # enough to repeat the try by hand; None: all as it should be
