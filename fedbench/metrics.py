"""MA, BA, TPR, TNR and AUC, as DESIGN and the BayBFed paper define them; all in 0..1 or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 250  # samples at once, at most: the activations of more leave the cache
LOGITS = 2**24  # numbers in the predictions of a batch, at most: 64 MB
IGNORED = -100  # the label of a prediction that does not count, for the loss of torch too


@dataclass(frozen=True)
class EvaluationSet:
    """Raw samples and the label each is compared with, of each prediction if it has several."""

    x: Tensor  # [n, ...]
    expected: Tensor  # [n] or [n, T]


@torch.no_grad()
def count_right(
    module: nn.Module,
    probe: EvaluationSet,
    decode: Callable[[Tensor], Tensor],
    threshold: float | None,
    starts: Iterable[int],
    batch_size: int,
) -> Tensor:
    """How many predictions are right in the batches of a probe that start at these samples.

    Right is the expected label as the likeliest one, or, with a threshold, with at least that
    probability. Logits that are not finite predict nothing: a broken model is never right.
    """
    module.eval()
    n_right = torch.zeros((), dtype=torch.long, device=probe.expected.device)
    for start in starts:
        x, expected = (part[start : start + batch_size] for part in (probe.x, probe.expected))
        logits = module(decode(x))  # [B, C] or [B, T, C]
        counted = (expected != IGNORED) & logits.isfinite().all(dim=-1)
        n_right += _right(logits[counted], expected[counted], threshold).sum()
    return n_right


def accuracy(probe: EvaluationSet, n_right: int) -> float | None:
    """Share of a probe's predictions that are right; None if there are none."""
    n = int((probe.expected != IGNORED).sum())
    return n_right / n if n else None


def batch_size(probe: EvaluationSet, n_classes: int) -> int:
    """How many samples of a probe go through a network at once."""
    n_logits = n_classes * math.prod(probe.expected.shape[1:])
    return min(max(LOGITS // n_logits, 1), BATCH)


def _right(logits: Tensor, expected: Tensor, threshold: float | None) -> Tensor:
    """[k, C] and [k]: [k] bool."""
    if threshold is None:
        return logits.argmax(dim=-1) == expected
    return logits.softmax(dim=-1).gather(-1, expected[:, None].long())[:, 0] >= threshold


def auc(scores: Sequence[float], malicious: Sequence[bool]) -> float | None:
    """Chance that a malicious client scores above a benign one, a tie counting half."""
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
    None where no update was judged: the rule judges nobody, or there is no such client.
    """
    judged = [client for client in clients if client["accepted"] is not None]
    rejected = [not client["accepted"] for client in judged if client["malicious"]]
    kept = [client["accepted"] for client in judged if not client["malicious"]]
    return _share(rejected), _share(kept)


def stealth(clients: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """How much the poisoned updates of a round look like benign ones, of client records.

    `norm_ratio` is the mean length of the poisoned updates over that of the benign ones; `cosine`
    the mean cosine of a poisoned update with the mean benign one, `benign_cosine` that of a benign
    update with the mean of the others. None where there are none to compare.
    """
    seen = [client for client in clients if client["norm"] is not None]
    poisoned, benign = ([c for c in seen if c["malicious"] is kind] for kind in (True, False))
    lengths = [mean(client["norm"] for client in group) for group in (poisoned, benign)]
    return {
        "norm_ratio": lengths[0] / lengths[1] if lengths[0] is not None and lengths[1] else None,
        "cosine": mean(client["cosine"] for client in poisoned),
        "benign_cosine": mean(client["cosine"] for client in benign),
    }


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
