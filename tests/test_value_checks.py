"""Values that no setting can have are refused in one line, whatever the setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedbench.config import RunConfig
from fedbench.errors import UserError, one_line
from fedbench.registry import Registry
from fedbench.value_checks import check_values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {"b": float("nan")}}, "a.b=nan: must be a finite number"),
        ({"a": [1.0, float("inf")]}, "a=inf: must be a finite number"),
        ({"a": 1e31}, "a=1e.31: must be a finite number"),
        ({"a": 2**63}, "a=9223372036854775808: must be a whole number from -"),
        ({"a": "x\0y"}, "a=.*: must be text without control characters"),
        ({"a": "x\ny"}, "a=x\ny: must be text without control characters"),
        ({"a": "\udc80"}, "a=.*: must be text without control characters"),
        ({"a": "x" * 5000}, "a=.*: must be text of at most 4096 characters"),
        ({"a": {"x\n": 1}}, "a.x\n=x\n: must be a name in plain characters"),
        ({"a": [[[[[[[[[[1]]]]]]]]]]}, "a: must not have more than 8 lists and dicts"),
    ],
)
def test_values_that_no_setting_can_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_values(settings)
    line = one_line(caught.value)
    assert line is not None
    assert line.isprintable()
    assert len(line) < 1100


def test_other_values_and_arguments_of_the_users_code_pass() -> None:
    plain = {"a": [None, True, -1, 2**32 - 1, 1e30, "naïve 😀", {"b": [[]]}]}
    check_values(plain | {"model": {"arguments": {"limit": float("inf")}}}, ["model.arguments"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, 2**31) for key in ("rounds", "pretrain_rounds", "n_clients", "pool", "batch_size")],
        *[("local_epochs", 20_000), ("seed", 2**32), ("seed", -1), ("momentum", 1.5)],
        *[("name", "x" * 300), ("name", "é" * 101), ("out", ""), ("n_clients", [1, 20_000])],
        *[("defense", [1]), ("attack", 1), ("lr", float("nan"))],
    ],
)
def test_values_beyond_what_any_run_needs(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{key}=.*: must be "):
        replace(RunConfig(), **{key: value}).check()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("executor", {"name": "auto", "threads": 5000}),
        ("executor", {"name": "auto", "devices": 2**31}),
        ("tracker", {"name": "wandb", "init_timeout": 1e18}),
        ("model", {"name": "gru", "n_layers": 10**6}),
        ("attack", {"name": "constrain_and_scale", "epochs": 10**9}),
    ],
)
def test_bounds_of_plugins(kind: str, settings: dict[str, Any]) -> None:
    from fedbench.attack import ATTACKS
    from fedbench.engine.executors import EXECUTORS
    from fedbench.models import MODELS
    from fedbench.tracking.trackers import TRACKERS

    registries: dict[str, Registry[Any]] = {
        "executor": EXECUTORS,
        "tracker": TRACKERS,
        "model": MODELS,
        "attack": ATTACKS,
    }
    with pytest.raises(UserError, match=rf"{kind} \w+: \w+ must be .* at most|from 1 to"):
        registries[kind].build(settings)
