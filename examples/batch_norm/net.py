"""A small network with batch norm: two hidden layers."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Net(nn.Module):
    """Linear layers of 64 and 32 units, each followed by batch norm and ReLU."""

    def __init__(self, sample_shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(sample_shape), 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, n_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
