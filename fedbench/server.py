"""Call a defense on your own updates [N, P], without the harness."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import DEFENSES, Aggregate, Defense, ServerView
from fedbench.errors import UserError
from fedbench.plugin_answers import check_state, checked_aggregate
from fedbench.rng import generator

Params = Tensor | Mapping[str, Tensor]


class Server:
    """A server that aggregates round after round with one defense.

    It keeps what a defense needs between rounds: the global model, the state and the round.

    Args:
        defense: a defense, or the name of one with its default settings.
        params: the global model before round 0, [P] or `dict(model.named_parameters())`, which
            also names the layers. Zeros if left out.
        server_lr: the global model moves by `server_lr` times the update.
        seed: for defenses that draw random numbers.

    Attributes:
        params: the global model [P]; None before the first round if it was left out.
        state: what the defense remembers.
        index: the next round, from 0.

    Examples:
        >>> server = fedbench.Server("foolsgold")
        >>> for _ in range(3):
        ...     result = server.aggregate(torch.randn(10, 500), client_ids=range(10))
        >>> server.index, server.params.shape
        (3, torch.Size([500]))
    """

    def __init__(
        self,
        defense: Defense | str,
        params: Params | None = None,
        *,
        server_lr: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.defense = _built(defense)
        self.server_lr, self.seed = server_lr, seed
        self.params = None if params is None else _flat(params)
        self.layers = _slices(params) if isinstance(params, Mapping) else None
        self.state: Any = self.defense.init()
        check_state(DEFENSES.label(self.defense), self.state)
        self.index = 0
        self._initial_params = self.params

    def aggregate(self, updates: Any, client_ids: Any = None) -> Aggregate:
        """Aggregate one round and move the global model.

        Args:
            updates: [N, P], a tensor or an array; row i is client i's model minus the global one.
            client_ids: [N] integers, the same for a client in every round; 0, ..., N - 1 if left
                out. Defenses with a memory depend on them.
        """
        rows = self._rows(updates)
        if self.params is None:
            self.params = self._initial_params = torch.zeros_like(rows[0])
        assert self._initial_params is not None
        view = ServerView(
            index=self.index,
            client_ids=_client_ids(client_ids, rows),
            global_params=self.params,
            initial_params=self._initial_params,
            layers=self.layers or {"params": slice(0, rows.shape[1])},
            rng=generator(self.seed, "defense", self.index),
        )
        answer = self.defense.aggregate(rows, self.state, view)
        result, self.state = checked_aggregate(DEFENSES.label(self.defense), answer, rows)
        self.params = self.params + self.server_lr * result.update
        self.index += 1
        return result

    def _rows(self, updates: Any) -> Tensor:
        """Convert the updates to a tensor [N, P] that the defense accepts."""
        rows = _tensor("updates", updates, "[N, P]").detach()
        if self.params is not None:
            rows = rows.to(self.params)
        elif not rows.is_floating_point():
            rows = rows.float()
        if rows.ndim != 2 or not rows.numel():
            raise UserError(f"updates: must be of shape [N, P], got {tuple(rows.shape)}")
        if self.params is not None and rows.shape[1] != len(self.params):
            raise UserError(f"updates: must have P={len(self.params)} columns, got {rows.shape[1]}")
        if (broken := (~rows.isfinite().all(dim=1)).nonzero().flatten().tolist()) != []:
            raise UserError(f"updates: must be finite, rows {broken} are not; leave them out")
        try:
            self.defense.check(len(rows))
        except ValueError as error:
            raise UserError(f"updates: {error}") from error
        return rows


def aggregate(
    defense: Defense | str,
    updates: Any,
    *,
    client_ids: Any = None,
    params: Params | None = None,
    seed: int = 0,
) -> Aggregate:
    """Aggregate the updates of one round. For several rounds, use `Server`.

    Args:
        defense: a defense, or the name of one with its default settings.
        updates: [N, P], a tensor or an array; row i is client i's model minus the global one.
        client_ids: [N] integers; 0, ..., N - 1 if left out.
        params: the global model, [P] or `dict(model.named_parameters())`. Zeros if left out.
        seed: for defenses that draw random numbers.

    Examples:
        >>> from fedbench.defenses.krum import Krum
        >>> updates = torch.randn(10, 500)
        >>> updates[:3] += 5  # three clients pull in one direction
        >>> result = fedbench.aggregate(Krum(m="auto"), updates)
        >>> result.accepted[:3].tolist(), result.update.shape
        ([False, False, False], torch.Size([500]))
    """
    return Server(defense, params, seed=seed).aggregate(updates, client_ids)


def _built(defense: Defense | str) -> Defense:
    if isinstance(defense, str):
        return DEFENSES.build({"name": defense})
    if not isinstance(defense, Defense):
        raise UserError(f"defense: must be a defense or the name of one, got {_kind(defense)}")
    return defense


def _tensor(name: str, value: Any, shape: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: must be numbers of shape {shape} ({reason})") from error


def _flat(params: Params) -> Tensor:
    tensors = [*params.values()] if isinstance(params, Mapping) else [params]
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        got = next((_kind(t) for t in tensors if not isinstance(t, Tensor)), "an empty dict")
        raise UserError(
            f"params: must be a tensor [P] or dict(model.named_parameters()), got {got}"
        )
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])  # [P]


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _slices(params: Mapping[str, Tensor]) -> dict[str, slice]:
    ends = [0, *accumulate(tensor.numel() for tensor in params.values())]
    return {name: slice(*ends[i : i + 2]) for i, name in enumerate(params)}


def _client_ids(given: Any, rows: Tensor) -> Tensor:
    n = len(rows)
    ids = torch.arange(n) if given is None else _tensor("client_ids", list(given), "[N]")
    if ids.shape != (n,) or ids.is_floating_point() or len(ids.unique()) < n:
        raise UserError(f"client_ids: must be {n} different integers, got {ids.tolist()}")
    return ids.to(rows.device)
