"""Shared matplotlib setup: two styles, safe text, files written atomically.

matplotlib is imported inside functions: most commands draw nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
TICKS = {"major.size": 2.5, "major.width": 0.6, "minor.size": 1.5, "color": GRAY}
# Figures for papers: the page has the size of a column, and text stands where the layout put it.
PAPER_DPI = 200  # of PNG, for slides; papers take SVG or PDF
PAPER_STYLE = {
    **{"font.family": SANS, "font.size": 7, "text.color": BLACK, "text.parse_math": False},
    **{"axes.labelsize": 7.5, "axes.titlesize": 7.5, "axes.titlepad": 3, "axes.labelpad": 2},
    **{"xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7},
    **{"axes.linewidth": 0.6, "axes.edgecolor": GRAY, "axes.labelcolor": BLACK},
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in TICKS.items()},
    **{"xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.5},
    **{"lines.linewidth": 1.0, "lines.markersize": 3.5, "hatch.linewidth": 0.5},
    **{"legend.frameon": False, "legend.handlelength": 2.2, "legend.handletextpad": 0.5},
    **{"savefig.dpi": PAPER_DPI, "savefig.bbox": "standard"},
    # Publishers refuse Type 3 fonts in PDF files. Text in SVG files is drawn as outlines: a browser
    # without these fonts would put wider letters over neighboring ones.
    **{"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "fedbench"},
}
# Without a date, the same figure gives the same bytes.
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}


@contextmanager
def plot_style(style: Mapping[str, Any] = STYLE) -> Iterator[None]:
    """Use one style, whatever `matplotlibrc` says, and keep matplotlib from logging warnings."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # e.g. the font cache reports where it is stored
    try:
        import matplotlib.style

        with matplotlib.style.context(["default", {**style}]):
            yield
    finally:
        log.setLevel(level)


@plot_style()
def save_png(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the page fits the figure's contents."""
    write_atomically(path, figure.savefig)


def save_figure(figure: Figure, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Write a figure for papers atomically, once per format, and return the files.

    The page keeps the figure's size, so that text has the size it was given.
    """
    paths = [folder / f"{name}.{suffix}" for suffix in formats]
    with plot_style(PAPER_STYLE):
        _separate_letters(figure)
        for path, suffix in zip(paths, formats, strict=True):
            options: dict[str, Any] = {"format": suffix, "metadata": METADATA.get(suffix, {})}
            if suffix == "png":
                options["pil_kwargs"] = {"compress_level": 1}  # a fifth larger, twice as fast
            write_atomically(path, partial(figure.savefig, **options))
    return paths


def _separate_letters(figure: Figure) -> None:
    """Draw `fl` as two letters: a search of the PDF finds them, and one font is embedded, not two.

    Only matplotlib 3.11 and later have ligatures, and a way to turn them off.
    """
    from matplotlib.text import Text

    if hasattr(Text, "set_fontfeatures"):
        for text in figure.findobj(Text):
            text.set_fontfeatures(("-liga",))


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
