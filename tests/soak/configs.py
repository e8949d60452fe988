"""Generated configurations, most of them bad: each is valid, or refused in one line.

Every try composes a few settings as the command line does and builds the plan of the run. Nothing
is trained, and nothing may be written.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource as Files,
)

from fedbench.command_line import hydra_arguments
from fedbench.composition import compose
from fedbench.config import RunConfig, register_schema
from fedbench.errors import UserError
from fedbench.plan import Plan
from fedbench.plugin_configs import config_folders, config_groups, options_of
from tests.soak._refusals import judged
from tests.soak.outcome import Outcome

TIMES = 5000


def split(text: str) -> tuple[str, ...]:
    """Values that contain no space."""
    return tuple(text.split())


NUMBERS = (
    *split(
        """
        0 1 -1 2 -0.0 0.5 1.5 30 1e-9 1e18 1e30 1e308 1e400 -1e400 inf -inf nan .5 5. 1_000 0x10
        1e --1 5000 100000000 2147483648 4294967296 9223372036854775807 9223372036854775808
        """
    ),
    f"1{'0' * 400}",
)
WORDS = (
    *split(
        """
        true false null None yes auto abc krum median fedavg none '' naïve ７ 😀 .. . / a/b .hidden
        '~' /dev/null /dev/zero /nonexistent/file os.system os.getcwd shutil.rmtree torch.load
        pathlib.Path nowhere.Net net.py:Net x.npz builtins.eval subprocess.run a:b a@b %s {0} '
        `id` $(id)
        """
    ),
    '""',
    "' '",
    "'a b'",
    "'a\nb'",
    "'a\x00b'",
    "'\x1b[31mred'",
    "'\x07'",
    "'\udc80'",
    "a" * 300,
    "b" * 5000,
    "\\",
    '"',
)
LISTS = (
    *split(
        """
        [] [1] [[]] [[1,2],[3]] [null] [true,1] [a,b] [1,-5] [90,40] [1e400] {} {a:1}
        {a:{b:{c:1}}} {name:patch} {name:krum} [{name:patch}] [{name:x}]
        [{name:patch,size:1000000}] [{name:words,trigger:[]}] [{name:null}] [{}] {1:2}
        [1,9999999999] {_target_:os.getcwd}
        """
    ),
    "[" * 40 + "]" * 40,
    "[" + ",".join(["1"] * 2000) + "]",
)
REFERENCES = split(
    """
    ${pmr} ${rounds} ${nothing} ${seed ${} ${.} ${..} ${oc.env:HOME}
    ${oc.env:NOTHING_OF_THIS_NAME} ${oc.env:NOTHING,5} ${oc.decode:'['} ${oc.create:[1]}
    ${oc.select:pmr} ${jobs:cpu,0,1} ${jobs:} ${jobs:a,b,c} ${hydra:job.name} ${eval:1}
    ${oc.dict.keys:defense} ${defense} ${model.hidden} x${seed}y ${now:%Y}
    """
)
BROKEN = (
    *split(
        """
        [ ] { } ( ) [1 1] {a {a: 'a 1,2 , 1, a=b = choice(1,2) range(1,5) range(1) sort(3,1)
        glob(*) int(x) str( f() a,b !!python/object:os.system &a *a << | > #
        """
    ),
    '"a',
    "\\n",
    "a\tb",
    "- a",
    "? a",
)
PLAIN = split("1 2 3 5 10 30 0.1 0.3 0.5 0.9 [1] [2,3] true null")
VALUES = (*(PLAIN,) * 5, *(NUMBERS,) * 4, WORDS, WORDS, LISTS, LISTS, REFERENCES, BROKEN)
PREFIXES = ("",) * 12 + ("+", "++", "~", "+++", "~~", "@", "-", "--", " ")
ODD_KEYS = (
    *split(
        """
        = pmr.x defense..name .pmr pmr. defense@attack defense@ @x a@b:c hydra hydra.mode
        hydra.run.dir hydra.searchpath hydra/launcher hydra.verbose _target_ defense._target_
        model._args_ dataset._partial_ defaults _self_ __class__ defense.__class__ name.name
        attack.backdoors.0 model.hidden.0 näme dataset.arguments.x model.arguments.x
        defense.flame.noise schema tuned scenario [0] defense[name] pmr[0] ${pmr} 'pmr' PMR
        """
    ),
    "",
    "\x00",
    "a\nb",
    "a b",
    "k" * 3000,
)


@cache
def known_keys() -> tuple[tuple[str, str], ...]:
    """Settings of the run, and of each plugin with the word that chooses it."""
    plain = [(name, "") for name in RunConfig.__dataclass_fields__]
    own = Path(config_folders()[0][1])
    for group in sorted(set(config_groups()) & RunConfig.__dataclass_fields__.keys()):
        for name in options_of(group):
            path = own / group / f"{name}.yaml"
            content = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
            settings = content.get(group, content)
            plain += [
                (f"{group}.{key}", f"{group}={name}") for key in settings if key != "defaults"
            ]
    return tuple(plain)


def generated(rng: random.Random) -> list[str]:
    """The words of one command line."""
    words = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key, choice = rng.choice(known_keys())
        if rng.random() < 0.15:
            key, choice = rng.choice(ODD_KEYS), ""
        if choice and rng.random() < 0.9:
            words.append(choice)
        value = rng.choice(rng.choice(VALUES))
        if rng.random() < 0.1:
            value = mangled(value, rng)
        equals = "" if rng.random() < 0.03 else "="
        words.append(f"{rng.choice(PREFIXES)}{key}{equals}{value}")
    if rng.random() < 0.05:
        words += rng.choices(words, k=rng.randrange(1, 30))  # duplicates
    if rng.random() < 0.1:
        words[-1] = mangled(words[-1], rng)
    return words


def mangled(text: str, rng: random.Random) -> str:
    """The text with characters that are doubled, dropped, replaced or quoted."""
    at = rng.randrange(len(text) + 1)
    odd = rng.choice("'\"[]{}(),=:+~@$\\ \t\n\x00é￿0")
    start, end = text[:at], text[at:]
    return rng.choice((start + odd + end, start, end, start * 2, f"'{text}'"))


def soak(times: int, seed: int) -> Iterator[Outcome]:
    register_schema()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbench-soak-")))
        stack.enter_context(chdir(folder))
        stack.enter_context(mock.patch.object(Files, "load_config", cached(Files.load_config)))
        for i in range(times):
            yield outcome(generated(random.Random(f"{seed} {i}")), folder)


def cached(load: Callable[..., Any]) -> Callable[..., Any]:
    """Read each YAML file once. Hydra reads fifteen for a configuration, which takes most time."""
    known: dict[str, Any] = {}

    def loaded(source: Any, path: str) -> Any:
        key = f"{source.path} {path}"
        if key not in known:
            known[key] = load(source, path)
        return copy.deepcopy(known[key])

    return loaded


def outcome(words: Sequence[str], folder: Path) -> Outcome:
    """Compose and plan one configuration."""
    found = judged(lambda: _plan(words), "valid", repr([*words]))
    if found.failure is None and (left := os.listdir(folder)):
        return Outcome(found.kind, f"{[*words]!r}: wrote {left}")
    return found


def _plan(words: Sequence[str]) -> None:
    """What the command does before it trains."""
    try:
        arguments = hydra_arguments(words)
    except ValueError as error:  # as in `fedbench.__main__`
        raise UserError(str(error)) from error
    if not arguments or arguments[0].startswith("-"):  # options, such as --help
        return
    plan = Plan.of(compose(arguments))
    assert plan.title
    assert plan.folder.path.name
