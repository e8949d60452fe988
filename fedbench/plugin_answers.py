"""Check what plugins return. A wrong answer is a UserError that names plugin, method and value.

Numbers must be dense floating-point tensors. They are converted to the dtype and device of the
model. Nothing else is converted, because a cast would hide a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import Aggregate
from fedbench.errors import UserError

Dtypes = tuple[torch.dtype, ...]
FLOATS: Dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS: Dtypes = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BOOL: Dtypes = (torch.bool,)
KINDS = {
    FLOATS: "a floating-point tensor",
    BOOL: "a bool tensor",
    FLOATS + INTEGERS + BOOL: "a tensor of real numbers",
}
STATE_TYPES = (bool, int, float, str, type(None))


def described(value: object) -> str:
    """Describe a value in a few words, such as `a list of 3`."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if is_dense(value):
            return f"a tensor of {dtype} and shape {tuple(value.shape)}"
        kind = "meta" if _is_meta(value) else "nested" if value.is_nested else "sparse or quantized"
        return f"a {kind} tensor of {dtype}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


def checked_tensor(
    subject: str, value: object, shape: Sequence[int] | None = None, dtypes: Dtypes = FLOATS
) -> Tensor:
    """Return the value without its graph; UserError unless it is a dense tensor of this kind.

    `subject` begins the message: `attack dba: craft must return`.
    """
    fits = isinstance(value, Tensor) and is_dense(value) and value.dtype in dtypes
    if isinstance(value, Tensor) and fits and shape in (None, value.shape):
        return value.detach()
    kind = KINDS.get(dtypes) or f"a tensor of {str(dtypes[0]).removeprefix('torch.')}"
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    raise UserError(f"{subject} {kind}{of_shape}, got {described(value)}")


def checked_update(plugin: str, sent: object, update: Tensor) -> Tensor:
    """What `craft` returns instead of an update [P], converted like it."""
    return checked_tensor(f"{plugin}: craft must return", sent, update.shape).to(update)


def checked_rows(plugin: str, sent: object, updates: Tensor) -> list[Tensor]:
    """What `collude` returns instead of updates [M, P], converted like them: rows of any shape."""
    is_tensor = isinstance(sent, Tensor) and is_dense(sent) and sent.ndim > 0
    if not (is_tensor or isinstance(sent, list | tuple)) or len(sent) != len(updates):  # type: ignore[arg-type]
        raise UserError(
            f"{plugin}: collude must return a tensor of shape {tuple(updates.shape)} or a list of "
            f"its rows, got {described(sent)}"
        )
    subject = f"{plugin}: a row that collude returns must be"
    return [checked_tensor(subject, row).to(updates) for row in sent]  # type: ignore[attr-defined]


def checked_samples(plugin: str, poisoned: object, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What `poison` returns instead of samples and labels: the same shapes and dtypes."""
    if not isinstance(poisoned, tuple | list) or len(poisoned) != 2:
        raise UserError(f"{plugin}: poison must return (x, y), got {described(poisoned)}")
    subject = f"{plugin}: poison must return as"
    new_x = checked_tensor(f"{subject} x", poisoned[0], x.shape, (x.dtype,))
    return new_x.to(x), checked_tensor(f"{subject} y", poisoned[1], y.shape, (y.dtype,)).to(y)


def checked_objective(plugin: str, objective: object, loss: Tensor) -> Tensor:
    """What `objective` returns instead of a loss: a number that depends on the parameters."""
    checked_tensor(f"{plugin}: objective must return", objective, loss.shape)
    assert isinstance(objective, Tensor)
    if loss.requires_grad and not objective.requires_grad:
        raise UserError(
            f"{plugin}: objective must return a tensor with a gradient; compute it with torch from "
            "loss and params, without .item()"
        )
    return objective


def checked_aggregate(plugin: str, answer: object, updates: Tensor) -> tuple[Aggregate, Any]:
    """What `aggregate` returns for updates [N, P], converted like them, and the next state."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Aggregate)):
        got = described(answer)
        if isinstance(answer, tuple):
            got = f"({', '.join(type(part).__name__ for part in answer)})"
        raise UserError(f"{plugin}: aggregate must return (Aggregate, state), got {got}")
    aggregate, state = answer
    n, p = updates.shape
    checked = replace(
        aggregate,
        update=checked_tensor(f"{plugin}: update must be", aggregate.update, (p,)).to(updates),
        weights=_weights(plugin, aggregate.weights, n).to(updates),
        accepted=_per_client(plugin, "accepted", aggregate.accepted, updates, BOOL),
        scores=_per_client(plugin, "scores", aggregate.scores, updates, FLOATS),
        details=_details(plugin, aggregate.details, updates),
    )
    threshold = aggregate.threshold
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and math.isfinite(threshold)):
        raise UserError(f"{plugin}: threshold must be a finite number or None, got {threshold!r}")
    # If the update is not finite, the round is not applied and its state forgotten.
    check_state(plugin, state, finite=bool(checked.update.isfinite().all()))
    return checked, state


def check_state(plugin: str, state: object, finite: bool = True) -> None:
    """Raise a UserError unless the state consists of what a checkpoint may contain."""
    seen: set[int] = set()  # a list may contain itself
    parts: list[Any] = [state]
    while parts:
        part = parts.pop()
        if type(part) not in (dict, list, tuple):
            _check_leaf(plugin, part, finite)
        elif id(part) not in seen:
            seen.add(id(part))
            parts += part.values() if type(part) is dict else part
            for key in part if type(part) is dict else ():
                if type(key) not in (int, str):
                    raise UserError(f"{plugin}: keys of a state must be int or str, got {key!r}")


def _check_leaf(plugin: str, value: object, finite: bool) -> None:
    if not (isinstance(value, Tensor) and is_dense(value)) and type(value) not in STATE_TYPES:
        raise UserError(
            f"{plugin}: a state must consist of dense tensors, numbers, strings, None, and dicts, "
            f"lists and tuples of these, got {described(value)}"
        )
    if finite and not _is_finite(value):
        raise UserError(f"{plugin}: a state must be finite, got NaN or infinity")


def _is_finite(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dtype not in FLOATS or bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _weights(plugin: str, weights: object, n: int) -> Tensor:
    found = checked_tensor(f"{plugin}: weights must be", weights, (n,))
    if not bool((found.isfinite() & (found >= 0)).all()):
        raise UserError(f"{plugin}: weights must be finite and at least 0, got {found.tolist()}")
    return found


def _per_client(
    plugin: str, name: str, values: object, updates: Tensor, dtypes: Dtypes
) -> Tensor | None:
    """One value per client, [N] on the device of the updates; None stays None."""
    if values is None:
        return None
    found = checked_tensor(f"{plugin}: {name} must be", values, (len(updates),), dtypes)
    if bool(found.isnan().any()):
        raise UserError(f"{plugin}: {name} must not be NaN, got {found.tolist()}")
    return found.to(updates.device)


def _details(plugin: str, details: object, updates: Tensor) -> dict[str, Tensor]:
    if not isinstance(details, Mapping) or not all(isinstance(name, str) for name in details):
        raise UserError(f"{plugin}: details must map names to tensors, got {described(details)}")
    subject, shape = f"{plugin}: details", (len(updates),)
    found = {}
    for name, values in details.items():
        what = f"[{name!r}]"
        checked_tensor(f"{subject}{what} must be", values, shape, FLOATS + INTEGERS + BOOL)
        column = _per_client(plugin, f"details{what}", values, updates, FLOATS + INTEGERS + BOOL)
        assert column is not None
        found[name] = column
    return found


def _is_meta(value: Tensor) -> bool:
    return value.device.type == "meta"


def is_dense(value: Tensor) -> bool:
    """Whether the tensor has its numbers in memory, one per position."""
    stored = not (value.is_nested or _is_meta(value) or value.is_quantized)
    return stored and value.layout is torch.strided
