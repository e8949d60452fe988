"""What the tests of single defenses share: a view, made-up rounds, plain lists of an outcome."""

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
    """Of a global model of zeros."""
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
    draw: st.DrawFn, elements: st.SearchStrategy[float], most: int
) -> list[tuple[list[int], np.ndarray]]:
    """Rounds, `most` at most, of 1 to 8 of ten clients, who come and go and change their place."""
    p = draw(st.integers(1, 4))
    places = st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)
    rounds = []
    for ids in draw(st.lists(places, min_size=1, max_size=most)):
        rounds.append((ids, draw(hnp.arrays(np.float64, (len(ids), p), elements=elements))))
    return rounds
