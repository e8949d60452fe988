"""Defense: what a server does with the updates of a round. The contract of `defenses/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.registry import Registry


@dataclass(frozen=True)
class ServerView:
    """What an honest server knows. Ground truth (pmr, who is malicious, test data) is not in it."""

    index: int  # round
    client_ids: Tensor  # [N] stable across rounds
    global_params: Tensor  # [P]
    initial_params: Tensor  # [P] before round 0
    layers: Mapping[str, slice]  # parameter name -> its place in P
    rng: torch.Generator  # the only randomness a defense may use


@dataclass(frozen=True)
class Aggregate:
    """The outcome of a round."""

    update: Tensor  # [P] added to the global parameters, times server_lr
    weights: Tensor  # [N] each client's share in the update; rows of zero were rejected
    accepted: Tensor | None = None  # [N] bool; None if the rule judges no client
    scores: Tensor | None = None  # [N] higher is more suspicious


class Defense(ABC):
    """A rule from updates [N, P] to one update [P].

    Subclasses are frozen dataclasses: fields are hyper-parameters, checked in `__post_init__`.
    Memory is `state`, never `self`: tensors, numbers, strings, None, and dicts, lists and tuples of
    these, so that it can be checkpointed. What is remembered of a client is keyed by its id.
    """

    version: ClassVar[int] = 1  # raise it when the same input gives another output

    def check(self, n: int) -> None:
        """Raises ValueError, with the values, if the rule cannot work on n clients."""

    def init(self) -> Any:
        """The state before round 0."""
        return None

    @abstractmethod
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        """One round: `updates` [N, P], read and never written, and the state before and after."""


DEFENSES: Registry[Defense] = Registry("defense", home="fedbench.defenses")


def mean_of(updates: Tensor, accepted: Tensor, scores: Tensor | None = None) -> Aggregate:
    """The mean of the accepted rows; zero when there is none."""
    n_accepted = int(accepted.sum())
    accepted = accepted.to(updates.device)
    weights = accepted.to(updates.dtype) / max(n_accepted, 1)  # [N]
    rows = updates if n_accepted == len(updates) else updates[accepted]
    update = rows.mean(dim=0) if n_accepted else torch.zeros_like(updates[0])  # [P]
    return Aggregate(update, weights, accepted, scores)
