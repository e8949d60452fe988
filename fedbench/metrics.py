"""MA, BA, TPR, TNR and AUC, as DESIGN and the BayBFed paper define them; all in 0..1 or None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.backdoors import Backdoor

BATCH = 1000


@dataclass(frozen=True)
class Probe:
    """Raw samples and the label each is compared with."""

    x: Tensor  # [n, ...]
    expected: Tensor  # [n]

    @classmethod
    def triggered(cls, x: Tensor, y: Tensor, backdoor: Backdoor) -> Probe:
        """The samples of other classes than the target, stamped: success is the target label.

        A sample of the target class would count as a success without any backdoor.
        """
        others = y != backdoor.target
        return cls(backdoor.stamp(x[others]), torch.full_like(y[others], backdoor.target))


@torch.no_grad()
def accuracy(module: nn.Module, probe: Probe, decode: Callable[[Tensor], Tensor]) -> float | None:
    """Share of samples that get the expected label; None without samples.

    Logits that are not finite predict nothing: a broken model is never counted as right.
    """
    module.eval()
    n_right = 0
    for x, expected in zip(probe.x.split(BATCH), probe.expected.split(BATCH), strict=True):
        logits = module(decode(x))  # [B, C]
        right = (logits.argmax(dim=-1) == expected) & logits.isfinite().all(dim=-1)
        n_right += int(right.sum())
    return n_right / len(probe.expected) if len(probe.expected) else None


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


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
