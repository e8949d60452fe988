"""The comments of config files: what `--help` and `fedbench list` say about settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fedbench.plugin_configs import config_folders

# `key: value # comment`, or `- key: value # comment` in a list
LINE = re.compile(
    r"(?P<indent> *)(?P<item>- )?(?P<key>[\w/ ]+):(?P<value>[^#]*)(# (?P<comment>.*))?"
)


def config_file(name: str) -> Path | None:
    """Return the file of a config such as `defense/flame`: fedbench's own comes first."""
    files = [folder / f"{name}.yaml" for _, folder in config_folders()]
    return next((file for file in files if file.is_file()), None)


def comments(name: str) -> dict[str, str]:
    """Return the comment of each setting of a config, with dotted names; "" where there is none.

    Settings that a config inherits from another of its group have the comments of that one.
    """
    file = config_file(name)
    if file is None:
        return {}
    text = file.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    group = name.rpartition("/")[0]
    for parent in re.findall(r"^  - (\w+)$", text, re.MULTILINE) if group else []:
        found |= comments(f"{group}/{parent}") if parent != "_self_" else {}
    own = dict(_settings(text))
    return found | {key: comment for key, comment in own.items() if comment or key not in found}


def _settings(text: str) -> Iterator[tuple[str, str]]:
    parents: list[tuple[int, str]] = []
    for match in filter(None, map(LINE.fullmatch, text.splitlines())):
        indent = len(match["indent"])
        parents = [parent for parent in parents if parent[0] < indent]
        path = ".".join([*(key for _, key in parents), match["key"]])
        parents.append((indent, match["key"]))
        if match["item"] is None:
            yield path, match["comment"] or ""


def sections(name: str) -> dict[str, list[str]]:
    """Return the top-level settings below each heading: a comment that follows an empty line."""
    file = config_file(name)
    assert file is not None
    found: dict[str, list[str]] = {}
    for block in file.read_text(encoding="utf-8").split("\n\n"):
        heading, *lines = block.splitlines()
        keys = [match["key"] for line in lines if (match := re.match(r"(?P<key>\w+):", line))]
        if heading.startswith("# ") and keys:
            found[heading.removeprefix("# ")] = keys
    return {heading: keys for heading, keys in found.items() if "defaults" not in keys}


def group_comments() -> dict[str, str]:
    """Return what the defaults list of config.yaml says about each group to choose from."""
    file = config_file("config")
    assert file is not None
    return dict(re.findall(r"^  - (\w+): \w+ # (.*)$", file.read_text("utf-8"), re.MULTILINE))


def headline(name: str) -> str:
    """Return the first comment of a config above its settings; "" if there is none."""
    file = config_file(name)
    if file is None:
        return ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        if not line.startswith("# @package"):
            return line.removeprefix("#").strip()
    return ""
