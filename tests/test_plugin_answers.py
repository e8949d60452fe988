"""Answers of plugins: wrong ones are one line that names the plugin, floats are converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.attack import ATTACKS
from fedbench.defense import DEFENSES, Aggregate
from fedbench.errors import UserError
from fedbench.plugin_answers import (
    check_state,
    checked_aggregate,
    checked_objective,
    checked_rows,
    checked_samples,
    checked_update,
)

UPDATE = torch.ones(4)
UPDATES = torch.ones(3, 4)
WANTED = "a floating-point tensor of shape (4,), got "
WRONG: list[tuple[Any, str]] = [
    (None, "None"),
    ([1.0] * 4, "a list of 4"),
    (np.ones(4), "ndarray"),
    (Tensor, "the class Tensor"),
    (torch.ones(5), "a tensor of float32 and shape (5,)"),
    (torch.ones(4, dtype=torch.long), "a tensor of int64 and shape (4,)"),
    (torch.ones(4, dtype=torch.bool), "a tensor of bool and shape (4,)"),
    (torch.ones(4, dtype=torch.complex64), "a tensor of complex64 and shape (4,)"),
    (torch.ones(4).to_sparse(), "a sparse or quantized tensor of float32"),
    (torch.ones(4, device="meta"), "a meta tensor of float32"),
]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("wrong", "got"), WRONG)
def test_an_update_must_be_a_dense_float_tensor(wrong: Any, got: str) -> None:
    line = refused(lambda: checked_update("attack mine", wrong, UPDATE))
    assert line == f"attack mine: craft must return {WANTED}{got}"
    result = Aggregate(wrong, torch.ones(3))
    line = refused(lambda: checked_aggregate("defense mine", (result, None), UPDATES))
    assert line == f"defense mine: update must be {WANTED}{got}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_are_converted_and_lose_their_graph(dtype: torch.dtype) -> None:
    given = torch.ones(4, dtype=dtype, requires_grad=True) * 2
    for found in (
        checked_update("attack mine", given, UPDATE),
        checked_rows("attack mine", [given], UPDATES[:1])[0],
        checked_aggregate("d", (Aggregate(given, torch.ones(3)), None), UPDATES)[0].update,
    ):
        assert found.dtype == torch.float32
        assert not found.requires_grad
        assert found.tolist() == [2.0] * 4


@pytest.mark.parametrize("wrong", [None, "abc", 3, torch.ones(2, 4), torch.tensor(1.0), {0: 1}])
def test_collude_must_return_a_row_per_client(wrong: Any) -> None:
    line = refused(lambda: checked_rows("attack mine", wrong, UPDATES))
    expected = (
        "attack mine: collude must return a tensor of shape (3, 4) or a list of its rows, got "
    )
    assert line.startswith(expected)


def test_rows_of_collude_may_have_another_size_but_no_other_type() -> None:
    assert checked_rows("a", [torch.ones(9)] * 3, UPDATES)[0].shape == (9,)
    line = refused(lambda: checked_rows("attack mine", [UPDATE, UPDATE.long(), UPDATE], UPDATES))
    assert line.startswith(
        "attack mine: a row that collude returns must be a floating-point tensor"
    )


ANSWERS: list[tuple[Any, str]] = [
    (Aggregate(UPDATE, torch.ones(3)), "aggregate must return (Aggregate, state), got Aggregate"),
    ((1, 2, 3), "aggregate must return (Aggregate, state), got (int, int, int)"),
    ((Aggregate(UPDATE, torch.ones(2)), None), "weights must be a floating-point tensor of shape"),
    ((Aggregate(UPDATE, -torch.ones(3)), None), "weights must be finite and at least 0"),
    ((Aggregate(UPDATE, torch.ones(3), torch.ones(3)), None), "accepted must be a bool tensor"),
    ((Aggregate(UPDATE, torch.ones(3), scores=torch.ones(3).int()), None), "scores must be a fl"),
    ((Aggregate(UPDATE, torch.ones(3), threshold=True), None), "threshold must be a finite number"),
    ((Aggregate(UPDATE, torch.ones(3), details={"a": [1, 2, 3]}), None), "details['a'] must be a "),
    ((Aggregate(UPDATE, torch.ones(3), details={3: UPDATE}), None), "details must map names to t"),
    ((Aggregate(UPDATE, torch.ones(3)), {(1, 2): 3}), "keys of a state must be int or str, got (1"),
    ((Aggregate(UPDATE, torch.ones(3)), [np.ones(2)]), "a state must consist of dense tensors"),
    ((Aggregate(UPDATE, torch.ones(3)), [torch.tensor(torch.nan)]), "a state must be finite"),
]


@pytest.mark.parametrize(("answer", "reason"), ANSWERS)
def test_parts_of_an_aggregate_are_checked(answer: Any, reason: str) -> None:
    line = refused(lambda: checked_aggregate("defense mine", answer, UPDATES))
    assert re.match(rf"defense mine: {re.escape(reason)}", line)


def test_the_state_of_a_round_that_overflows_may_be_infinite() -> None:
    """The server does not apply such a round, and forgets the state."""
    overflow = Aggregate(UPDATE * torch.inf, torch.ones(3))
    checked_aggregate("defense mine", (overflow, [torch.inf]), UPDATES)


def test_a_state_may_contain_itself() -> None:
    state: list[Any] = [1]
    state.append(state)
    check_state("defense mine", state)


def test_poisoned_samples_keep_shape_and_dtype() -> None:
    x, y = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    checked_samples("attack mine", [x, y], x, y)
    line = refused(lambda: checked_samples("attack mine", None, x, y))
    assert line == "attack mine: poison must return (x, y), got None"
    line = refused(lambda: checked_samples("attack mine", (x.float(), y), x, y))
    assert line == (
        "attack mine: poison must return as x a tensor of uint8 of shape (2, 3), "
        "got a tensor of float32 and shape (2, 3)"
    )


def test_an_objective_needs_a_gradient() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert checked_objective("attack mine", loss * 2, loss) == 4
    line = refused(lambda: checked_objective("attack mine", loss.detach(), loss))
    assert line.startswith("attack mine: objective must return a tensor with a gradient")
    line = refused(lambda: checked_objective("attack mine", 2.0, loss))
    assert line.endswith("objective must return a floating-point tensor of shape (), got float")


def test_plugins_are_named_as_registered() -> None:
    assert DEFENSES.label(DEFENSES.build({"name": "krum"})) == "defense krum"
    assert ATTACKS.label(ATTACKS.build({"name": "sign_flip"})) == "attack sign_flip"
