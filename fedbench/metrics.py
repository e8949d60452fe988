"""MA, BA, TPR, TNR and AUC as the BayBFed paper defines them; all in 0..1 or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 250  # most samples at once; the activations of larger batches leave the cache
LOGITS = 2**24  # most logits at once: 64 MB
IGNORED = -100  # label of predictions that do not count, as in torch's cross-entropy


@dataclass(frozen=True)
class EvaluationSet:
    """Raw samples, and the label expected for each prediction."""

    x: Tensor  # [n, ...]
    expected: Tensor  # [n] or [n, T]


@torch.no_grad()
def count_correct(
    module: nn.Module,
    probe: EvaluationSet,
    decode: Callable[[Tensor], Tensor],
    threshold: float | None,
    starts: Iterable[int],
    batch_size: int,
) -> Tensor:
    """Number of correct predictions in the batches that begin at `starts`.

    A prediction is correct if the expected label is the likeliest one or, with a threshold, has at
    least that probability. Logits that are not finite are never correct: the model is broken.
    """
    module.eval()
    n_correct = torch.zeros((), dtype=torch.long, device=probe.expected.device)
    for start in starts:
        x, expected = (part[start : start + batch_size] for part in (probe.x, probe.expected))
        logits = module(decode(x))  # [B, C] or [B, T, C]
        counted = (expected != IGNORED) & logits.isfinite().all(dim=-1)
        n_correct += _correct(logits[counted], expected[counted], threshold).sum()
    return n_correct


def accuracy(probe: EvaluationSet, n_correct: int) -> float | None:
    """Share of correct predictions; None if the set has none to make."""
    n = int((probe.expected != IGNORED).sum())
    return n_correct / n if n else None


def batch_size(probe: EvaluationSet, n_classes: int) -> int:
    """Number of samples to evaluate at once."""
    n_logits = n_classes * math.prod(probe.expected.shape[1:])
    return min(max(LOGITS // n_logits, 1), BATCH)


def _correct(logits: Tensor, expected: Tensor, threshold: float | None) -> Tensor:
    """Correctness [k] of logits [k, C]."""
    if threshold is None:
        return logits.argmax(dim=-1) == expected
    return logits.softmax(dim=-1).gather(-1, expected[:, None].long())[:, 0] >= threshold


def auc(scores: Sequence[float], malicious: Sequence[bool]) -> float | None:
    """Probability that a malicious client scores above a benign one; ties count half."""
    values = torch.tensor(scores, dtype=torch.float64)
    poisoned = torch.tensor(malicious, dtype=torch.bool)
    positives, negatives = values[poisoned], values[~poisoned]
    if not len(positives) or not len(negatives):
        return None
    above = (positives[:, None] > negatives).double() + 0.5 * (positives[:, None] == negatives)
    return float(above.mean())


def rates(clients: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """(TPR, TNR) of client records with `malicious` and `accepted`.

    TPR = TP / (TP + FN) over poisoned updates, TNR = TN / (TN + FP) over benign ones. A rate is
    None if no such update was judged: the rule judges nobody, or there is no such client.
    """
    judged = [client for client in clients if client["accepted"] is not None]
    rejected = [not client["accepted"] for client in judged if client["malicious"]]
    kept = [client["accepted"] for client in judged if not client["malicious"]]
    return _fraction(rejected), _fraction(kept)


def stealth(clients: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """How similar poisoned updates are to benign ones, from the client records of a round.

    `norm_ratio` is the mean norm of poisoned updates over that of benign ones, `cosine` the mean
    cosine of a poisoned update with the mean benign one, `benign_cosine` that of a benign update
    with the mean of the other benign ones. None if there is nothing to compare.
    """
    seen = [client for client in clients if client["norm"] is not None]
    poisoned, benign = ([c for c in seen if c["malicious"] is kind] for kind in (True, False))
    norms = [mean(client["norm"] for client in group) for group in (poisoned, benign)]
    return {
        "norm_ratio": norms[0] / norms[1] if norms[0] is not None and norms[1] else None,
        "cosine": mean(client["cosine"] for client in poisoned),
        "benign_cosine": mean(client["cosine"] for client in benign),
    }


def _fraction(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
