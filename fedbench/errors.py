"""User errors: printed in one line, without a traceback."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

PREFIX = "fedbench: "  # of user errors on the command line
WARNING = f"{PREFIX}warning: "
FEDBENCH, STDLIB = Path(__file__).parent, Path(os.__file__).parent
# What OmegaConf says of a wrong type, and what it means
KINDS = {
    "converted to Float": "a number",
    "converted to Integer": "a whole number",
    "not a valid bool": "true or false",
}
LESS_MEMORY = "a smaller model, n_clients or batch_size needs less"
LONGEST_LINE = 1000  # characters of a message
INSTALLED = {"site-packages", "dist-packages"}  # names of the folders of libraries


class UserError(Exception):
    """An error the user can fix; the message names the value and what is allowed.

    Examples:
        >>> fedbench.run(pmr=1.5)
        Traceback (most recent call last):
        fedbench.errors.UserError: pmr=1.5: must be between 0 and 1
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP ended the command. Whatever handles Ctrl-C handles it alike."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number  # as shells report it


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about a name: `; did you mean krum? (known: fedavg, krum)`."""
    options = sorted(known)
    return f"{did_you_mean(name, options)} (known: {', '.join(options) or 'none'})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean krum?` if a known name resembles this one, whatever its case."""
    by_lower = {option.lower(): option for option in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def one_line(error: BaseException) -> str | None:
    """Return the message of a user error in one line, None for any other error."""
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(error, MissingConfigException):
        message = _missing_config(error)
    elif isinstance(cause, ConfigAttributeError | ConfigKeyError):
        message = _missing_setting(cause)
    elif isinstance(cause, OmegaConfBaseException):
        override = re.search(r"override (.+)", str(error))
        given = override[1] if override else str(cause.full_key)
        message = f"{given}: {expected(given, first_line(cause))}"
    elif is_out_of_memory(error):
        message = f"memory ran out: {first_line(error)}; {LESS_MEMORY}"
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror}"  # without its number
    elif isinstance(error, UserError | HydraException | OSError | MarkedYAMLError):
        message = str(error)
    else:
        return None
    return PREFIX + _printable(" ".join(message.split()))


def _printable(text: str) -> str:
    """Shorten a long text in its middle, and escape what a terminal would interpret."""
    if len(text) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch could not get memory."""
    signs = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "size calculation overf",
    )
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def _missing_config(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if error.options is None:
        known = "its folder is given by --config-dir, as in --config-dir sweeps --config-name NAME"
        return f"{error.missing_cfg_file}: no such config; {known}"
    return f"{group}={name}: no such {group}{nearest(name, error.options)}"


def _missing_setting(cause: ConfigAttributeError | ConfigKeyError) -> str:
    """Name the plugin that lacks the setting, or say where all settings are explained."""
    key, full_key, parent = str(cause.key), cause.full_key, cause.parent_node
    known = sorted(map(str, parent or {}))
    if full_key == key:
        return no_setting(key, {*known} - {"hydra"})
    if "name" in known:
        known.remove("name")
        return f"{full_key}: {parent['name']} has no such setting{nearest(key, known)}"
    return f"{full_key}: no such setting{nearest(key, known)}"


def no_setting(key: str, known: Iterable[str]) -> str:
    """Return the error about a setting of a run that does not exist."""
    hint = did_you_mean(key, known) or ";"
    return f"{key}: no such setting{hint} fedbench --help explains all settings"


def expected(given: str, reason: str) -> str:
    """Say what OmegaConf expects of a value, in words of the command line."""
    key, _, value = given.partition("=")
    if "is not a ListConfig" in reason:
        return f"must be a list, '{key}=[{value}]'"
    kinds = (kind for sign, kind in KINDS.items() if sign in reason)
    return next((f"must be {kind}" for kind in kinds), reason)


def failure(error: BaseException) -> str:
    """Describe an exception of the user's code in one line, with the place where it was raised."""
    reason, place = str(error), place_of(error)
    if isinstance(error, SyntaxError):
        reason = error.msg  # without the place, which Python appends
    described = " ".join(f"{type(error).__name__}: {reason}".split()).removesuffix(":")
    return f"{described}{place and f' ({place})'}; FEDBENCH_TRACEBACK=1 shows the traceback"


def place_of(error: BaseException) -> str:
    """Return `file:line` of the user's last line, not of a library that it called.

    If the user's code is itself installed, this is the last line in the folder of the first.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    lines = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    lines = [(path, number) for path, number in lines if not _is_internal(path)]
    own = [(path, number) for path, number in lines if not _is_installed(path)]
    own = own or [line for line in lines if line[0].parent == lines[0][0].parent]
    return "{}:{}".format(*own[-1]) if own else ""


def _is_internal(path: Path) -> bool:
    """Whether a file belongs to fedbench or to Python, such as `<frozen importlib>`."""
    in_python = path.is_relative_to(STDLIB) and not _is_installed(path)
    return in_python or path.is_relative_to(FEDBENCH) or path.name.startswith("<")


def is_of_library(path: Path) -> bool:
    """Whether a file belongs to Python, to fedbench or to an installed package."""
    return _is_internal(path) or _is_installed(path)


def _is_installed(path: Path) -> bool:
    return not INSTALLED.isdisjoint(path.parts)


def print_error(error: BaseException, brief: bool = False) -> None:
    """Print a user error in one line, any other error with its traceback, unless `brief`.

    FEDBENCH_TRACEBACK=1 shows the traceback of all.
    """
    line = one_line(error)
    if line is None and brief:
        line = PREFIX + failure(error)
    if line is None or os.environ.get("FEDBENCH_TRACEBACK") == "1":
        traceback.print_exception(error)
    else:
        print(line, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line: OmegaConf puts the reason there and its internals below."""
    return str(error).partition("\n")[0]
