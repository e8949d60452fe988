"""Adds CONTRIBUTING.md and CHANGELOG.md, which are outside docs/, to the site."""

from __future__ import annotations

from pathlib import Path

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
