"""Patch: Gu et al., BadNets: Identifying Vulnerabilities in the ML Supply Chain, 2017.

https://arxiv.org/abs/1708.06733

A bright square in a corner of the image.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.backdoor import BACKDOORS, PixelTrigger

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")


@BACKDOORS.register("patch")
@dataclass(frozen=True)
class Patch(PixelTrigger):
    """A square of `size` x `size` pixels in a corner."""

    size: int = 4  # pixels per side
    corner: str = "bottom_right"
    margin: int = 0  # pixels between the square and the image border

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1 or self.margin < 0:
            raise ValueError(f"size must be >= 1, margin >= 0, got {self.size}, {self.margin}")
        if self.corner not in CORNERS:
            raise ValueError(f"corner must be one of {', '.join(CORNERS)}, got {self.corner!r}")

    def pixels(self, height: int, width: int) -> list[tuple[int, int]]:
        near, far = self.margin, self.margin + self.size
        rows = range(near, far) if "top" in self.corner else range(height - far, height - near)
        columns = range(near, far) if "left" in self.corner else range(width - far, width - near)
        return [(row, column) for row in rows for column in columns]
