"""Mistakes a user can mend: told in one line, without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


class UserError(Exception):
    """Raised where the user can act; the message names the value and what would be right."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean krum? (known: fedavg, krum, median)`: the tail of an error about a name."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"; {hint}(known: {', '.join(options) or 'none'})"


def one_line(error: BaseException) -> str | None:
    """What the user did wrong, in one line; None if the error is not a user's mistake."""
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        message = f"{group}={name}: no such {group}{nearest(name, error.options)}"
    elif isinstance(cause, ConfigAttributeError | ConfigKeyError):
        known = map(str, cause.parent_node or {})
        message = f"{cause.full_key}: no such setting{nearest(str(cause.key), known)}"
    elif isinstance(cause, OmegaConfBaseException):
        override = re.search(r"override (\S+)", str(error))
        message = f"{override[1] if override else cause.full_key}: {first_line(cause)}"
    elif isinstance(error, UserError | HydraException | OSError):
        message = str(error)
    else:
        return None
    return f"fedbench: {' '.join(message.split())}"


def first_line(error: BaseException) -> str:
    """OmegaConf puts the reason on the first line, and its own bookkeeping below."""
    return str(error).partition("\n")[0]
