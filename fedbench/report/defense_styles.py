"""How a defense looks in every figure: color, marker and line are the same everywhere.

Colors are Okabe and Ito's and Tol's, which readers with any color vision can tell apart. Markers
and line styles differ as well, so that figures survive gray print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Color, marker of matplotlib and of plotly, line style of matplotlib and of plotly
LOOKS = (
    ("#0072B2", "o", "circle", "-", "solid"),
    ("#D55E00", "s", "square", "--", "dash"),
    ("#009E73", "^", "triangle-up", "-.", "dashdot"),
    ("#CC79A7", "D", "diamond", ":", "dot"),
    ("#56B4E9", "v", "triangle-down", "-", "solid"),
    ("#E69F00", "P", "cross", "--", "dash"),
    ("#332288", "X", "x", "-.", "dashdot"),
    ("#882255", "p", "pentagon", ":", "dot"),
    ("#999933", "*", "star", "-", "solid"),
    ("#44AA99", "h", "hexagon", "--", "dash"),
    ("#AA4499", "<", "triangle-left", "-.", "dashdot"),
    ("#117733", ">", "triangle-right", ":", "dot"),
)
NO_DEFENSE = ("#5A5A5A", "o", "circle-open", ":", "dot")
# Defenses with a look of their own; others take a free one in order of appearance.
KNOWN = ("baybfed", "flame", "krum", "median", "foolsgold", "afa", "auror", "dp")


@dataclass(frozen=True)
class DefenseStyle:
    """The look of one defense."""

    color: str  # hexadecimal
    marker: str  # of matplotlib
    symbol: str  # of plotly
    line: str  # of matplotlib
    dash: str  # of plotly


def defense_styles(labels: Sequence[str]) -> dict[str, DefenseStyle]:
    """Return the look of each label; `krum m=5` has the color of `krum` and another marker."""
    plugins = list(dict.fromkeys(label.partition(" ")[0] for label in labels))
    unknown = [name for name in plugins if name not in (*KNOWN, "fedavg")]
    looks = {name: LOOKS[i] for i, name in enumerate(KNOWN)}
    looks |= {name: LOOKS[(len(KNOWN) + i) % len(LOOKS)] for i, name in enumerate(sorted(unknown))}
    looks["fedavg"] = NO_DEFENSE
    found: dict[str, DefenseStyle] = {}
    variants: Counter[str] = Counter()
    for label in dict.fromkeys(labels):
        plugin = label.partition(" ")[0]
        color, *look = looks[plugin]
        if number := variants[plugin]:
            _, *look = LOOKS[(_position(plugin) + number) % len(LOOKS)]
        variants[plugin] += 1
        found[label] = DefenseStyle(color, *look)
    return found


def _position(plugin: str) -> int:
    """Position of the plugin's own look, from which its variants count."""
    return KNOWN.index(plugin) if plugin in KNOWN else len(KNOWN)
