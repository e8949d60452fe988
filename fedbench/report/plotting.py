"""Shared matplotlib setup: one style for all figures, safe text, PNG files.

matplotlib is imported inside functions: most commands draw nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.results.atomic_files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 144  # two pixels per point
BLACK, GRAY, RED = "#181818", "#686868", "#c8102e"  # red marks the attacker
SANS, MONO = "DejaVu Sans", "DejaVu Sans Mono"  # both ship with matplotlib
STYLE = {
    "font.family": SANS,
    "font.size": 9,
    "text.color": BLACK,
    "text.parse_math": False,  # a `$` is a `$`
    **dict.fromkeys(("xtick.bottom", "xtick.labelbottom"), False),
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{"ytick.major.size": 0, "ytick.labelsize": 9},
    **{"legend.frameon": False, "legend.labelcolor": GRAY, "legend.handlelength": 1.2},
    **{"savefig.dpi": DPI, "savefig.bbox": "tight", "savefig.pad_inches": 0.2},
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Use one style, whatever `matplotlibrc` says, and keep matplotlib from logging warnings."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # e.g. the font cache reports where it is stored
    try:
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            yield
    finally:
        log.setLevel(level)


@plot_style()
def save_png(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the page fits the figure's contents."""
    write_atomically(path, figure.savefig)


def printable(text: str, limit: int | None = None) -> str:
    """Return text in one line of at most `limit` characters; escape what the fonts lack."""
    if not (text.isprintable() and text.strip()):
        text = repr(text)
    text = "".join(c if ord(c) in _glyphs() else ascii(c)[1:-1] for c in text)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


@cache
def _glyphs() -> frozenset[int]:
    """Code points that both fonts can draw."""
    with plot_style():
        from matplotlib.font_manager import findfont, get_font

        return frozenset.intersection(
            *(frozenset(get_font(findfont(family)).get_charmap()) for family in (SANS, MONO))
        )
