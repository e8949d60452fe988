"""The report page: one HTML file that opens offline, with its scripts, styles and data inside."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

from fedbench.report.page_data import PageOptions, page_data
from fedbench.report.report_data import ReportData

ASSETS = "fedbench.report"
PLACE = re.compile(r"/\*(TITLE|CSS|DATA|PLOTLY|JS)\*/")  # in page.html
# Inside a script element these could end it; JSON has no use for them outside of strings.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page(data: ReportData, options: PageOptions) -> str:
    """Return the page as HTML. If it loads itself again, its address keeps the reader's choices."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    content = page_data(data, options)
    parts = {
        "TITLE": html.escape(f"{content['title']} - fedbench"),
        "CSS": _asset("page.css"),
        "DATA": as_json(content),
        "PLOTLY": get_plotlyjs(),
        "JS": _scripts(),
    }
    template = _asset("page.html")
    if options.refresh is not None:
        again = f'<meta http-equiv="refresh" content="{options.refresh}">'
        template = template.replace("</head>", f"{again}\n</head>", 1)
    # In one pass, because the data may contain the name of a place.
    return PLACE.sub(lambda found: parts[found[1]], template)


def as_json(content: Any) -> str:
    """Return JSON that is safe inside a script element: pure ASCII without <, > and &."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _scripts() -> str:
    """Return the page's scripts as one: all page_*.js, then page.js, which starts the page."""
    folder = files(ASSETS).joinpath("assets")
    names = sorted(entry.name for entry in folder.iterdir())
    parts = [name for name in names if name.startswith("page_") and name.endswith(".js")]
    return "\n".join(_asset(name) for name in [*parts, "page.js"])


def _asset(name: str) -> str:
    return files(ASSETS).joinpath("assets", name).read_text(encoding="utf-8")
