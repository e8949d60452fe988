"""Extends the docs site.

Adds CONTRIBUTING.md and CHANGELOG.md, which are outside docs/. Shows the comments behind the fields
of a class in the reference, which otherwise lists names and types only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
        for page, file in PAGES.items():
            text = text.replace(f"]({file})", f"]({page})")
        files.append(File.generated(config, name, content=text))
    return files


class FieldComments(griffe.Extension):
    """Appends `Attributes:` with the comment of each field to the docstring of a class."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        docstring = cls.docstring
        if docstring is None or "Attributes:" in docstring.value:
            return
        assert isinstance(cls.filepath, Path)
        lines = cls.filepath.read_text("utf-8").splitlines()
        documented = []
        for name, field in cls.members.items():  # without inherited ones
            if isinstance(field, griffe.Attribute) and field.lineno is not None:
                _, mark, comment = lines[field.lineno - 1].partition("  # ")
                documented += [f"    {name}: {comment}"] if mark else []
        if documented:
            docstring.value = "\n".join([docstring.value, "", "Attributes:", *documented])
