"""Checks of what a defense returns, for ordinary, unusual and huge updates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from fedbench.defense import Aggregate, Defense
from fedbench.testing.compare import Unchanged
from fedbench.testing.contract import check
from fedbench.testing.rounds import HUGE, UNUSUAL, UPDATES, honest, view_of
from fedbench.testing.verify import value_error, verify_class, verify_result, verify_state

DTYPES = (torch.float32, torch.float64)


def run_rounds(defense: Defense, rounds: Sequence[Tensor]) -> Iterator[Aggregate]:
    """Aggregate several rounds of the same clients."""
    state = defense.init()
    for index, updates in enumerate(rounds):
        outcome, state = defense.aggregate(updates, state, view_of(updates, index=index))
        verify_state(state)
        yield outcome


def verify_rounds(defense: Defense, rounds: Sequence[Tensor]) -> None:
    for outcome, updates in zip(run_rounds(defense, rounds), rounds, strict=True):
        verify_result(outcome, updates)


def supports(defense: Defense, n: int) -> bool:
    try:
        defense.check(n)
    except ValueError:
        return False
    return True


def applies(defense: Defense, rows: str) -> bool:
    return rows not in HUGE or "huge_rows" not in defense.exemptions


@check()
def plugin_class(defense: Defense) -> None:
    """The class is a frozen dataclass and derives from Defense."""
    verify_class(defense, Defense)


@check("plugin_class", cases=product((1, 2, 3, 10, 30)))
def warning(defense: Defense, n: int) -> None:
    """`warning(n)` returns one line or None."""
    line = defense.warning(n)
    valid = line is None or (isinstance(line, str) and line and "\n" not in line)
    assert valid, f"warning({n}) must return one line or None, got {line!r}"


@check("plugin_class", cases=product(DTYPES))
def result(defense: Defense, dtype: torch.dtype) -> None:
    """Ordinary updates give a result of the right shapes, dtypes and ranges."""
    updates = honest(10).to(dtype)
    returned = defense.aggregate(updates, defense.init(), view_of(updates))
    pair = isinstance(returned, tuple) and len(returned) == 2
    assert pair, f"aggregate must return (Aggregate, state), got {type(returned).__name__}"
    verify_result(returned[0], updates)


@check("result", cases=product(UPDATES, DTYPES))
def inputs(defense: Defense, rows: str, dtype: torch.dtype) -> None:
    """`updates` and the tensors of `view` stay unchanged."""
    updates = UPDATES[rows](10).to(dtype)
    view = view_of(updates)
    unchanged = Unchanged(
        updates=updates,
        client_ids=view.client_ids,
        global_params=view.global_params,
        initial_params=view.initial_params,
    )
    defense.aggregate(updates, defense.init(), view)
    unchanged.verify("aggregate")


@check("state", cases=product(UNUSUAL, DTYPES))
def unusual_rows(defense: Defense, rows: str, dtype: torch.dtype) -> None:
    """Zero, equal, tiny and opposed updates give a valid result."""
    verify_rounds(defense, [UPDATES[rows](10).to(dtype)])


@check("state", cases=product(HUGE, DTYPES), optional=True)
def huge_rows(defense: Defense, rows: str, dtype: torch.dtype) -> None:
    """Updates of up to 3e38, which any client can send, give a finite result."""
    try:
        verify_rounds(defense, [UPDATES[rows](10).to(dtype)])
    except AssertionError as error:
        hint = "norms and products overflow in float32: use fedbench.ops, or float64"
        raise AssertionError(f"{error}; {hint}") from error


@check("unusual_rows", "huge_rows", cases=product(UPDATES))
def later_rounds(defense: Defense, rows: str) -> None:
    """Two rounds of unusual or huge updates do not break the rounds after them."""
    if applies(defense, rows):
        hostile = UPDATES[rows](10).float()  # twice: sums over rounds may overflow
        verify_rounds(defense, [hostile, hostile, *(honest(10, seed=s).float() for s in range(2))])


@check("later_rounds", cases=product(UPDATES, (1, 2, 3), DTYPES))
def few_clients(defense: Defense, rows: str, n: int, dtype: torch.dtype) -> None:
    """1, 2 and 3 clients give a valid result, or `check` and `aggregate` raise ValueError."""
    updates = UPDATES[rows](n).to(dtype)
    if supports(defense, n):
        if applies(defense, rows):
            verify_rounds(defense, [updates] * 3)
        return
    for method, call in (
        ("check", lambda: defense.check(n)),
        ("aggregate", lambda: defense.aggregate(updates, defense.init(), view_of(updates))),
    ):
        line = value_error(call)
        assert line is not None, f"check({n}) raises ValueError, so {method} must raise it, too"
        named = re.search(rf"\b{n}\b", line)
        assert named, f"the error of {method} must name the number of clients, got: {line}"
