"""What every result and every state of a defense must be like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedbench.defense import Aggregate
from fedbench.errors import UserError
from fedbench.plugin_answers import check_state, described, is_dense


def verify_result(outcome: Aggregate, updates: Tensor) -> None:
    """Fail unless the result has the right types, shapes and ranges for updates [N, P]."""
    n, p = updates.shape
    assert isinstance(outcome, Aggregate), f"aggregate must return an Aggregate, got {outcome!r}"
    verify_tensor("update", outcome.update, (p,), updates.dtype)
    verify_tensor("weights", outcome.weights, (n,), updates.dtype)
    lowest, total = float(outcome.weights.min()), float(outcome.weights.double().sum())
    assert lowest >= 0, f"weights must be 0 or more, got {lowest}"
    assert total == 0 or abs(total - 1) <= 1e-5, f"weights must sum to 1, or all be 0, got {total}"
    if outcome.accepted is not None:
        verify_tensor("accepted", outcome.accepted, (n,), torch.bool)
        same = torch.equal(outcome.weights > 0, outcome.accepted)
        assert same, (
            "accepted must be true exactly where weights are above 0, "
            f"got {outcome.accepted.tolist()} and {outcome.weights.tolist()}"
        )
    if outcome.scores is not None:
        verify_tensor("scores", outcome.scores, (n,))
        floating = outcome.scores.is_floating_point()
        assert floating, f"scores must be floating point, got {outcome.scores.dtype}"
    if outcome.threshold is not None:
        verify_threshold(outcome)
    mapping = isinstance(outcome.details, Mapping)
    assert mapping, f"details must map names to tensors [N], got {outcome.details!r}"
    for name, values in outcome.details.items():
        assert isinstance(name, str), f"names in details must be strings, got {name!r}"
        verify_tensor(f"details[{name!r}]", values, (n,))


def verify_threshold(outcome: Aggregate) -> None:
    """Fail unless the threshold is a finite number that no accepted client exceeds."""
    scores, accepted = outcome.scores, outcome.accepted
    number = type(outcome.threshold) in (int, float)
    threshold = float(outcome.threshold) if number and outcome.threshold is not None else math.nan
    finite = math.isfinite(threshold)
    assert finite, f"threshold must be a finite number or None, got {outcome.threshold!r}"
    assert scores is not None, "a threshold needs scores"
    assert accepted is not None, "a threshold needs accepted"
    above = scores[accepted.to(scores.device) & (scores > threshold)].tolist()
    assert not above, f"no accepted client may score above threshold {threshold}, got {above[:1]}"


def verify_tensor(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Fail unless the value is a finite tensor of this shape and, if given, dtype."""
    assert isinstance(value, Tensor), f"{name} must be a tensor, got {value!r}"
    assert is_dense(value), f"{name} must be a dense tensor, got {described(value)}"
    assert value.shape == shape, f"{name} must have shape {shape}, got {tuple(value.shape)}"
    assert dtype in (None, value.dtype), f"{name} must have dtype {dtype}, got {value.dtype}"
    wrong = value[~value.isfinite()].tolist()
    assert not wrong, (
        f"{name} must be finite, got {wrong[0]} at {len(wrong)} of {value.numel()} positions"
    )


def verify_state(state: Any) -> None:
    """Fail unless the state consists of what a checkpoint may contain, all of it finite."""
    try:
        check_state("defense", state)
    except UserError as error:
        raise AssertionError(str(error)) from error


def verify_class(plugin: Any, base: type) -> None:
    """Fail unless the plugin is a frozen dataclass that derives from `base`."""
    cls = type(plugin)
    assert issubclass(cls, base), f"{cls.__name__} must be a subclass of {base.__name__}"
    params = cls.__dict__.get("__dataclass_params__")
    assert params is not None and params.frozen, (  # noqa: PT018
        f"{cls.__name__} must be a frozen dataclass: put @dataclass(frozen=True) above the class"
    )
    version = plugin.version
    assert type(version) is int and version >= 1, (  # noqa: PT018
        f"version must be an int, at least 1, got {version!r}"
    )


def value_error(call: Callable[[], object]) -> str | None:
    """Return the message of the ValueError that the call raises, None if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
