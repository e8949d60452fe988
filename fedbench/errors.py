"""User errors: printed in one line, without a traceback."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

PREFIX = "fedbench: "  # of user errors on the command line
WARNING = f"{PREFIX}warning: "


class UserError(Exception):
    """An error the user can fix; the message names the value and what is allowed.

    Examples:
        >>> fedbench.run(pmr=1.5)
        Traceback (most recent call last):
        fedbench.errors.UserError: pmr=1.5: must be between 0 and 1
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about a name: `; did you mean krum? (known: fedavg, krum)`."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint} (known: {', '.join(options) or 'none'})"


def one_line(error: BaseException) -> str | None:
    """Return the message of a user error in one line, None for any other error."""
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        message = f"{group}={name}: no such {group}{nearest(name, error.options)}"
    elif isinstance(cause, ConfigAttributeError | ConfigKeyError):
        known = map(str, cause.parent_node or {})
        message = f"{cause.full_key}: no such setting{nearest(str(cause.key), known)}"
    elif isinstance(cause, OmegaConfBaseException):
        override = re.search(r"override (.+)", str(error))
        message = f"{override[1] if override else cause.full_key}: {first_line(cause)}"
    elif isinstance(error, UserError | HydraException | OSError | MarkedYAMLError):
        message = str(error)
    else:
        return None
    return PREFIX + " ".join(message.split())


def print_error(error: BaseException) -> None:
    """Print a user error in one line, any other error with its traceback.

    FEDBENCH_TRACEBACK=1 shows the traceback of both.
    """
    line = one_line(error)
    if line is None or os.environ.get("FEDBENCH_TRACEBACK") == "1":
        traceback.print_exception(error)
    else:
        print(line, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line: OmegaConf puts the reason there and its internals below."""
    return str(error).partition("\n")[0]
