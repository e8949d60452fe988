"""metrics: MA, BA, TPR, TNR and AUC against values by hand and slow definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import accuracy
from torch import Tensor, nn

from fedbench.backdoor import BACKDOORS
from fedbench.metrics import IGNORED, EvaluationSet, auc, batch_size, mean, rates


class SamplesAsLogits(nn.Module):
    """Returns the samples as logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_accuracy_is_the_share_of_correct_predictions() -> None:
    logits = torch.tensor([[2.0, 1], [0, 1], [3, 0], [0, 5]])
    assert (
        accuracy(
            SamplesAsLogits(), EvaluationSet(logits, torch.tensor([0, 1, 1, 1])), nn.Identity()
        )
        == 0.75
    )
    empty = EvaluationSet(logits[:0], torch.zeros(0, dtype=torch.long))
    assert accuracy(SamplesAsLogits(), empty, nn.Identity()) is None


def test_accuracy_of_several_batches() -> None:
    logits = torch.randn(2500, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.arange(2500) % 4
    by_hand = int((logits.argmax(dim=1) == expected).sum()) / 2500
    assert accuracy(SamplesAsLogits(), EvaluationSet(logits, expected), nn.Identity()) == by_hand


def test_logits_that_are_not_finite_are_never_correct() -> None:
    logits = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [1.0, 0.0]])
    expected = torch.tensor([0, 0, 0])
    assert accuracy(SamplesAsLogits(), EvaluationSet(logits, expected), nn.Identity()) == 1 / 3


def test_ba_excludes_samples_of_the_target_class() -> None:
    x = torch.zeros(5, 1, 6, 6, dtype=torch.uint8)
    y = torch.tensor([0, 1, 2, 1, 0])
    backdoor = BACKDOORS.build({"name": "patch", "target": 1, "size": 2})
    triggered = backdoor.evaluation_set(x, y)  # type: ignore[attr-defined]
    assert triggered.expected.tolist() == [1, 1, 1]
    assert triggered.x.shape == (3, 1, 6, 6)
    assert triggered.x.view(3, -1).sum(dim=1).tolist() == [4 * 255] * 3
    assert x.sum() == 0


def client(malicious: bool, accepted: bool | None) -> dict[str, bool | None]:
    return {"malicious": malicious, "accepted": accepted}


def test_rates_by_hand() -> None:
    # 3 poisoned updates, 2 of them rejected; 4 benign ones, 3 of them accepted.
    clients = [client(True, False)] * 2 + [client(True, True)]
    clients += [client(False, True)] * 3 + [client(False, False)]
    assert rates(clients) == (2 / 3, 3 / 4)


def test_rates_are_none_if_nothing_was_judged() -> None:
    assert rates([client(True, None), client(False, None)]) == (None, None)
    assert rates([client(False, True)]) == (None, 1.0)
    assert rates([client(True, True)]) == (0.0, None)
    assert rates([]) == (None, None)


def test_auc_by_hand() -> None:
    # Pairs (malicious, benign): 3>1, 3>2, 2>1, 2=2: (1 + 1 + 1 + 0.5) / 4.
    assert auc([1, 2, 3, 2], [False, False, True, True]) == 0.875
    assert auc([1, 2], [True, True]) is None
    assert auc([], []) is None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=20))
def test_auc_is_the_area_under_the_roc_curve(clients: list[tuple[int, bool]]) -> None:
    scores = [float(score) for score, _ in clients]
    malicious = [bad for _, bad in clients]
    n_bad, n_good = sum(malicious), len(clients) - sum(malicious)
    area = auc(scores, malicious)
    if not n_bad or not n_good:
        assert area is None
        return
    # Trapezoid rule on the points (false positive rate, true positive rate) of all thresholds.
    points = [(0.0, 0.0)]
    for threshold in sorted(set(scores), reverse=True):
        flagged = [bad for score, bad in zip(scores, malicious, strict=True) if score >= threshold]
        points.append(((len(flagged) - sum(flagged)) / n_good, sum(flagged) / n_bad))
    by_hand = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert abs(area - by_hand) < 1e-12


def test_mean_ignores_none() -> None:
    assert mean([1.0, None, 3.0]) == 2.0
    assert mean([None]) is None


def test_batch_size_bounds_the_number_of_logits() -> None:
    """64 predictions among 50,000 words: 3.2 million logits per sample, 16 million for 5."""
    words = EvaluationSet(torch.zeros(100, 64), torch.zeros(100, 64))
    assert batch_size(words, 50_000) == 5
    assert batch_size(words, 10**9) == 1
    images = EvaluationSet(torch.zeros(100, 1, 28, 28), torch.zeros(100))
    assert batch_size(images, 10) == 250


@pytest.mark.parametrize("size", [1, 3, 7, 250])
def test_accuracy_does_not_depend_on_the_batch_size(size: int) -> None:
    logits = torch.randn(7, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.randint(0, 5, (7, 4), generator=torch.Generator().manual_seed(1))
    expected[2, 1:] = IGNORED
    by_hand = [
        bool(logits[i, t].argmax() == expected[i, t])
        for i in range(7)
        for t in range(4)
        if expected[i, t] != IGNORED
    ]
    got = accuracy(
        SamplesAsLogits(), EvaluationSet(logits, expected), nn.Identity(), batch_size=size
    )
    assert got == sum(by_hand) / 25
