"""Bars: Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

https://openreview.net/forum?id=rkgyS0VFvr

Four bars in two rows of two, from the top left corner:

    ####  ####
                    length 4, gap 2

    ####  ####

The paper uses bars of 1 x 4 with gap 2 on MNIST (the defaults) and 1 x 6 with gap 3 on CIFAR-10.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.backdoor import BACKDOORS, PixelTrigger


@BACKDOORS.register("bars")
@dataclass(frozen=True)
class Bars(PixelTrigger):
    """Four bars, each one pixel high. Split into four parts, each part is one bar."""

    length: int = 4  # pixels per bar
    gap: int = 2  # pixels between bars, in both directions
    margin: int = 0  # pixels between the bars and the image border

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1 or self.gap < 0 or self.margin < 0:
            raise ValueError(
                f"length must be >= 1, gap and margin >= 0, "
                f"got {self.length}, {self.gap}, {self.margin}"
            )

    def pixels(self, height: int, width: int) -> list[tuple[int, int]]:
        return [
            (self.margin + row, self.margin + start + step)
            for row in (0, 1 + self.gap)
            for start in (0, self.length + self.gap)
            for step in range(self.length)
        ]
