"""The contract of a defense: how a server turns the updates of a round into one update.

A plugin is one file in `defenses/`: a frozen dataclass that subclasses `Defense`, registered under
the name of its file. Shapes: N clients in the round, P parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbench.digests import Plugin
from fedbench.registry import Registry


@dataclass(frozen=True)
class ServerView:
    """What an honest server knows in a round.

    It contains no ground truth: not pmr, not which clients are malicious, no test data.
    """

    index: int  # round, from 0
    client_ids: Tensor  # [N] stable across rounds
    global_params: Tensor  # [P] sent to the clients of this round
    initial_params: Tensor  # [P] before round 0
    layers: Mapping[str, slice]  # parameter name -> its slice of P
    rng: torch.Generator  # the only randomness a defense may use; on the CPU, new in each round


@dataclass(frozen=True)
class Aggregate:
    """The result of a round."""

    update: Tensor  # [P] the server adds server_lr times this to the global parameters
    weights: Tensor  # [N] each client's share of the update; 0 for rejected clients
    accepted: Tensor | None = None  # [N] bool; None if the defense does not judge clients
    scores: Tensor | None = None  # [N] higher is more suspicious
    threshold: float | None = None  # if the rule has one: no accepted client scores above it
    details: Mapping[str, Tensor] = field(default_factory=dict)  # more [N] to record, by name


class Defense(Plugin, ABC):
    """A rule that maps updates [N, P] to one update [P].

    Subclasses are frozen dataclasses whose fields are hyperparameters, validated in
    `__post_init__`. Memory is passed as `state` and never stored in `self`. A state consists of
    tensors, numbers, strings, None, and dicts, lists and tuples of these, so that it can be
    checkpointed. Key what it remembers about a client by client id, never by row.

    A defense does no logging, I/O or seeding and chooses no device; the harness does.
    """

    version: ClassVar[int] = 1  # increase when the same input gives a different output
    # Batch-norm statistics and other float buffers: their mean with `weights`, or, if False, what
    # a minority of hostile clients cannot move; see `fedbench.buffer_aggregation`.
    averages_buffers: ClassVar[bool] = False

    @property
    def exemptions(self) -> Mapping[str, str]:
        """Checks of `fedbench.testing` that the rule fails by definition, each with the reason.

        A class attribute can replace this property, unless the exemptions depend on settings.
        """
        return {}

    def check(self, n: int) -> None:
        """Raise ValueError, naming the values, if the rule cannot work with n clients."""

    def warning(self, n: int) -> str | None:
        """Return a one-line warning if the paper guarantees nothing for n clients, else None."""
        return None

    def check_memory(self, n_clients: int, layers: Mapping[str, slice]) -> None:
        """Raise UserError if the state would take too much memory once all clients took part.

        `n_clients` is the most that can take part in the run; `layers` are those of `ServerView`.
        """

    def init(self) -> Any:
        """Return the state before round 0."""
        return None

    @abstractmethod
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        """Aggregate one round; return the result and the next state.

        Row i of `updates` [N, P] is client i's model minus the global model. Do not modify it.
        """


DEFENSES: Registry[Defense] = Registry("defense", "fedbench.defenses")


def mean_of(
    updates: Tensor, accepted: Tensor, scores: Tensor | None = None, threshold: float | None = None
) -> Aggregate:
    """Average the accepted rows; the update is zero if there are none."""
    n_accepted = int(accepted.sum())
    accepted = accepted.to(updates.device)
    weights = accepted.to(updates.dtype) / max(n_accepted, 1)  # [N]
    update = updates.mean(dim=0) if n_accepted == len(updates) else weights @ updates  # [P]
    return Aggregate(update, weights, accepted, scores, threshold)


def weighted_mean(updates: Tensor, shares: Tensor, scores: Tensor) -> Aggregate:
    """Average with nonnegative shares s_i: sum_i s_i u_i / sum_i s_i, or zero if all are 0.

    Clients with a share above 0 are accepted.
    """
    total = shares.sum()
    weights = (shares / torch.where(total > 0, total, 1)).to(updates.dtype)  # [N]
    return Aggregate(weights @ updates, weights, shares > 0, scores)


def features(where: str, layers: Mapping[str, slice]) -> slice:
    """Slice of P that a rule inspects: `all`, or `output` for the parameters of the last module."""
    names = list(layers)
    module = names[-1].rpartition(".")[0]
    first = next(name for name in names if name.rpartition(".")[0] == module)
    return slice(0 if where == "all" else layers[first].start, layers[names[-1]].stop)


def check_features(where: str) -> None:
    """Raise ValueError if `where` is not a value that `features` accepts."""
    if where not in ("output", "all"):
        raise ValueError(f"layers must be output or all, got {where}")
