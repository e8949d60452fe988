"""Helpers for tests of single defenses: server views, random rounds, results as lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedbench.defense import Aggregate, ServerView

ONE_LAYER = {"fc.weight": slice(0, None)}


def view_of(
    ids: Sequence[int], updates: Tensor, index: int = 0, layers: Mapping[str, slice] = ONE_LAYER
) -> ServerView:
    """Return the server's view of a round whose global model is all zeros."""
    zeros = torch.zeros(updates.shape[1], dtype=updates.dtype)
    return ServerView(index, torch.tensor(ids), zeros, zeros, layers, torch.Generator())


def accepted_by(outcome: Aggregate) -> list[bool]:
    assert outcome.accepted is not None
    return [bool(accepted) for accepted in outcome.accepted]


def scores_of(outcome: Aggregate) -> list[float]:
    assert outcome.scores is not None
    return [float(score) for score in outcome.scores]


@st.composite
def runs(
    draw: st.DrawFn, elements: st.SearchStrategy[float], max_rounds: int
) -> list[tuple[list[int], np.ndarray]]:
    """Draw up to `max_rounds` rounds, each with 1 to 8 of ten clients in any order."""
    p = draw(st.integers(1, 4))
    participants = st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)
    rounds = []
    for ids in draw(st.lists(participants, min_size=1, max_size=max_rounds)):
        rounds.append((ids, draw(hnp.arrays(np.float64, (len(ids), p), elements=elements))))
    return rounds
