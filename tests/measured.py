"""Accuracy of a module on an evaluation set, measured in one process."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedbench import metrics
from fedbench.metrics import BATCH, EvaluationSet


def accuracy(
    module: nn.Module,
    samples: EvaluationSet,
    decode: Callable[[Tensor], Tensor],
    threshold: float | None = None,
    batch_size: int = BATCH,
) -> float | None:
    batches = range(0, len(samples.x), batch_size)
    n_correct = metrics.count_correct(module, samples, decode, threshold, batches, batch_size)
    return metrics.accuracy(samples, int(n_correct))
