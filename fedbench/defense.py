"""Defense: what a server does with the updates of a round. The contract of `defenses/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    rng: torch.Generator  # the only randomness a defense may use; on the CPU, new in each round


@dataclass(frozen=True)
class Aggregate:
    """The outcome of a round."""

    update: Tensor  # [P] added to the global parameters, times server_lr
    weights: Tensor  # [N] each client's share in the update; rows of zero were rejected
    accepted: Tensor | None = None  # [N] bool; None if the rule judges no client
    scores: Tensor | None = None  # [N] higher is more suspicious
    details: Mapping[str, Tensor] = field(default_factory=dict)  # more [N], recorded as they are


class Defense(ABC):
    """A rule from updates [N, P] to one update [P].

    Subclasses are frozen dataclasses: fields are hyper-parameters, checked in `__post_init__`.
    Memory is `state`, never `self`: tensors, numbers, strings, None, and dicts, lists and tuples of
    these, so that it can be checkpointed. What is remembered of a client is keyed by its id.
    """

    version: ClassVar[int] = 1  # raise it when the same input gives another output

    def check(self, n: int) -> None:
        """Raises ValueError, with the values, if the rule cannot work on n clients."""

    def warning(self, n: int) -> str | None:
        """A line for the user if the paper promises nothing for n clients; None if it does."""
        return None

    def init(self) -> Any:
        """The state before round 0."""
        return None

    @abstractmethod
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        """One round: `updates` [N, P], read and never written, and the state before and after."""


DEFENSES: Registry[Defense] = Registry("defense", "fedbench.defenses")


def mean_of(updates: Tensor, accepted: Tensor, scores: Tensor | None = None) -> Aggregate:
    """The mean of the accepted rows; zero when there is none."""
    n_accepted = int(accepted.sum())
    accepted = accepted.to(updates.device)
    weights = accepted.to(updates.dtype) / max(n_accepted, 1)  # [N]
    update = updates.mean(dim=0) if n_accepted == len(updates) else weights @ updates  # [P]
    return Aggregate(update, weights, accepted, scores)


def weighted_mean(updates: Tensor, shares: Tensor, scores: Tensor) -> Aggregate:
    """sum_i s_i u_i / sum_i s_i, zero if no share is above 0; accepted are those above it."""
    total = shares.sum()
    weights = (shares / torch.where(total > 0, total, 1)).to(updates.dtype)  # [N]
    return Aggregate(weights @ updates, weights, shares > 0, scores)


def features(where: str, layers: Mapping[str, slice]) -> slice:
    """The part of P that a rule looks at: `all`, or `output`, the parameters of the last module."""
    names = list(layers)
    module = names[-1].rpartition(".")[0]
    first = next(name for name in names if name.rpartition(".")[0] == module)
    return slice(0 if where == "all" else layers[first].start, layers[names[-1]].stop)


def check_features(where: str) -> None:
    if where not in ("output", "all"):
        raise ValueError(f"layers must be output or all, got {where}")
