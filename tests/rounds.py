"""What the tests of single defenses share: a server's view, and plain lists of an outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbench.defense import Aggregate, ServerView

ONE_LAYER = {"fc.weight": slice(0, None)}


def view_of(
    ids: Sequence[int], updates: Tensor, index: int = 0, layers: Mapping[str, slice] = ONE_LAYER
) -> ServerView:
    """Of a global model of zeros."""
    zeros = torch.zeros(updates.shape[1], dtype=updates.dtype)
    return ServerView(index, torch.tensor(ids), zeros, zeros, layers, torch.Generator())


def accepted_by(outcome: Aggregate) -> list[bool]:
    assert outcome.accepted is not None
    return [bool(accepted) for accepted in outcome.accepted]


def scores_of(outcome: Aggregate) -> list[float]:
    assert outcome.scores is not None
    return [float(score) for score in outcome.scores]
