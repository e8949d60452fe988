"""Accuracy of a module on a probe, as one process measures it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedbench import metrics
from fedbench.metrics import BATCH, EvaluationSet


def accuracy(
    module: nn.Module,
    probe: EvaluationSet,
    decode: Callable[[Tensor], Tensor],
    threshold: float | None = None,
    batch_size: int = BATCH,
) -> float | None:
    batches = range(0, len(probe.x), batch_size)
    n_correct = metrics.count_correct(module, probe, decode, threshold, batches, batch_size)
    return metrics.accuracy(probe, int(n_correct))
