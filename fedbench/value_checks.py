"""Checks that hold for the value of any setting, whatever it means."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from fedbench.errors import UserError

LARGEST_WHOLE = 2**32 - 1  # also the largest seed of numpy's generators
LARGEST = 1e30  # float32 ends at 3e38
LONGEST = 4096  # characters, as of a path on Linux
DEEPEST = 8  # lists and dicts in each other


def check_values(settings: Mapping[str, Any], except_in: Collection[str] = ()) -> None:
    """Raise a UserError for a value that no setting can have; `except_in` are keys to leave out."""
    for key, value in settings.items():
        _check(str(key), value, except_in, depth=0)


def _check(key: str, value: Any, except_in: Collection[str], depth: int) -> None:
    if key in except_in:
        return
    if depth > DEEPEST:
        raise UserError(f"{key}: must not have more than {DEEPEST} lists and dicts in each other")
    if isinstance(value, Mapping):
        for inner, item in value.items():
            _require(f"{key}.{inner}", inner, _is_plain(str(inner)), "a name in plain characters")
            _check(f"{key}.{inner}", item, except_in, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(key, item, except_in, depth + 1)
    elif isinstance(value, str):
        _require(key, value, len(value) <= LONGEST, f"text of at most {LONGEST} characters")
        _require(key, value, _is_plain(value), "text without control characters")
    elif isinstance(value, int):
        rule = f"a whole number from -{LARGEST_WHOLE} to {LARGEST_WHOLE}"
        _require(key, value, abs(value) <= LARGEST_WHOLE, rule)
    elif isinstance(value, float):
        rule = f"a finite number from -{LARGEST:g} to {LARGEST:g}"
        _require(key, value, math.isfinite(value) and abs(value) <= LARGEST, rule)


def _is_plain(text: str) -> bool:
    """Whether a text has no control characters, and can be written as UTF-8."""
    return not any(c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in text)


def _require(key: str, value: Any, valid: bool, rule: str) -> None:
    if not valid:
        raise UserError(f"{key}={shown(value)}: must be {rule}")


def shown(value: Any) -> Any:
    """Return a value as it is written in YAML: null, true, [1, 2]."""
    plain = value is not None and not isinstance(value, bool | list)
    return value if plain else json.dumps(value)
