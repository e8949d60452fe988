"""List plugins: `fedbench list defenses` prints names, what they do and their papers.

The text comes from docstrings and from the comments of config files. Nothing is imported, so a
broken plugin does not hide the others.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedbench.config_comments import headline
from fedbench.errors import UserError, did_you_mean, failure, print_error
from fedbench.plugin_configs import options_of
from fedbench.registry import find_plugins

WIDTH, INDENT = 80, 21
DATASETS = [f"fedbench.datasets.{module}" for module in ("images", "reddit", "iot", "custom")]
# What can be listed: the kind of plugin, the package with one module per plugin, and the modules
# with several
KINDS: dict[str, tuple[str, list[str], list[str]]] = {
    "defenses": ("defense", ["fedbench.defenses"], []),
    "attacks": ("attack", ["fedbench.attacks"], []),
    "backdoors": ("backdoor", ["fedbench.backdoors"], []),
    "datasets": ("dataset", [], DATASETS),
    "models": ("model", [], ["fedbench.models"]),
}


@dataclass(frozen=True)
class Entry:
    """A name to choose, what it does, and its paper with a link; empty if unknown."""

    name: str
    about: str
    paper: str = ""
    link: str = ""

    def __str__(self) -> str:
        lines = [line for line in (self.about, self.paper, self.link) if line]
        wrapper = textwrap.TextWrapper(
            WIDTH - INDENT, break_long_words=False, break_on_hyphens=False
        )
        first, *rest = [part for line in lines for part in wrapper.wrap(line)] or [""]
        label = f"  {self.name}"
        head = [f"{label:<{INDENT}}{first}".rstrip()]
        if len(label) >= INDENT:
            head = [label, " " * INDENT + first]
        return "\n".join([*head, *(" " * INDENT + line for line in rest)])


def entries(listed: str) -> list[Entry]:
    """Return the plugins of a kind, with those of the working folder and of installed packages."""
    kind, packages, modules = KINDS[listed]
    plugins = find_plugins(kind, *packages)
    names = sorted({*options_of(kind), *plugins})
    own = {name: [plugin.module] for name, plugin in plugins.items()}
    return [_entry(f"{kind}/{name}", own.get(name, modules)) for name in names]


def _entry(config: str, modules: Sequence[str]) -> Entry:
    """Describe a plugin by the docstrings of its class and module, else by its config file."""
    name = config.rpartition("/")[2]
    for module in modules:
        try:
            if (described := _described(name, _source(module))) is not None:
                return described
        except Exception as error:
            reason = failure(error).rpartition("; ")[0]  # without the advice to show a traceback
            return Entry(name, f"cannot be read: {reason}")
    return Entry(name, headline(config))


def _source(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise UserError(f"no module {module}")
    return Path(spec.origin)


def _described(name: str, file: Path) -> Entry | None:
    """Find the class that the file registers under `name`, and the paper of the file."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and name in _registered(node):
            about = _first_paragraph(ast.get_docstring(node))
            paper, link = _paper(ast.get_docstring(tree) or "")
            return Entry(name, about or paper, paper if about else "", link)
    return None


def _registered(node: ast.ClassDef) -> Iterator[str]:
    """Names in decorators such as `@DEFENSES.register("krum")`."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
            constants = (a.value for a in decorator.args if isinstance(a, ast.Constant))
            yield from (str(value) for value in constants if decorator.func.attr == "register")


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())


def _paper(docstring: str) -> tuple[str, str]:
    """Return the first line, and the link below it: a module without a link names no paper."""
    head, _, rest = docstring.partition("\n\n")
    link = rest.split(maxsplit=1)[0].rstrip(",") if rest.startswith("http") else ""
    return (" ".join(head.split()), link) if link else ("", "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fedbench list",
        description="List names to choose from, what they do and their papers.",
        epilog="Plugins of the working folder and of installed packages are listed, too.",
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; none: all")
    wanted = parser.parse_args(arguments).kinds or [*KINDS]
    plurals = {kind: listed for listed, (kind, _, _) in KINDS.items()}
    try:
        for word in wanted:
            if (listed := plurals.get(word, word)) not in KINDS:
                known = f"{did_you_mean(word, KINDS)} (known: {', '.join(KINDS)})"
                raise UserError(f"{word}: cannot be listed{known}")
            print("\n".join([f"{listed}:", *map(str, entries(listed)), ""]))
    except UserError as error:
        print_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
