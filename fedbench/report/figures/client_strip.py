"""Who was rejected: clients by rounds of one run per setting, one figure per defense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedbench.report.comparison import TableRow
from fedbench.report.figures.layout import (
    DOUBLE,
    LINE,
    SINGLE,
    Legend,
    Margins,
    balanced,
    grid,
    inches,
    is_lowest,
    label_x,
    label_y,
    panel_title,
)
from fedbench.report.figures.selection import (
    Drawing,
    file_name,
    first_run,
    left_out,
    row_title,
)
from fedbench.report.plotting import PAPER_STYLE, RED, plot_style
from fedbench.report.report_data import ReportData
from fedbench.results.run_rounds import RunRounds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy import ndarray

MAX_PANELS, MAX_CLIENTS = 6, 60
# Lightness tells them apart in gray print.
VERDICTS = {
    "accepted": "#c6dbef",
    "rejected": "#0a2a5c",
    "refused before the defense": "#E69F00",
    "not judged": "#e9e9e9",
}
ACCEPTED, REJECTED, REFUSED, NOT_JUDGED = range(4)
ABSENT = -1


@dataclass(frozen=True)
class ClientStrip:
    """What happened to the clients of a run in each round."""

    clients: list[int]  # [N] ids: benign ones first
    rounds: list[int]  # [T]
    verdicts: ndarray  # [N, T] places in VERDICTS, or ABSENT
    malicious: ndarray  # [N, T] whether the client attacked in this round


def client_drawings(data: ReportData) -> list[Drawing]:
    """Return one figure per defense that judges clients."""
    drawings = []
    for defense in data.defenses:
        rows = [row for row in data.rows if row.defense == defense]
        titles = [row_title(data, row) for row in rows]
        caption = f"{defense}: verdict on each client in each round, first seed."
        caption += f" Pools of more clients show {MAX_CLIENTS}." + left_out(titles, MAX_PANELS)
        name = file_name("clients", defense)
        drawings.append(Drawing(name, caption, partial(client_strips, data, rows)))
    return drawings


@plot_style(PAPER_STYLE)
def client_strips(data: ReportData, rows: Sequence[TableRow]) -> Figure | None:
    """Draw one panel per row; None if the defense judges nobody, or accepted everybody."""
    strips = [
        (row_title(data, row), client_strip(run))
        for row in rows
        if (run := first_run(data, row)) is not None and judges(run)
    ][:MAX_PANELS]
    if not any({REJECTED, REFUSED} & {*strip.verdicts.flat} for _, strip in strips):
        return None
    width = SINGLE if len(strips) == 1 else DOUBLE
    n_across = balanced(len(strips), 4)
    legend = Legend(_handles([strip for _, strip in strips]), width)
    title = LINE if data.swept else 0
    margins = Margins(
        left=0.34,
        bottom=0.36,
        top=legend.height + title + 0.05,
        between=0.14,
        below=title + 0.12 + (0.3 if len(strips) % n_across else 0),
    )
    n_clients = max(len(strip.clients) for _, strip in strips)
    height = min(max(0.055 * n_clients, 0.9), 2.6)
    figure, panels = grid(len(strips), n_across, width, height, margins)
    for i, (axes, (name, strip)) in enumerate(zip(panels, strips, strict=True)):
        _draw_strip(axes, strip, n_clients)
        _name_axes(axes, i % n_across == 0, is_lowest(i, len(strips), n_across))
        if name:
            panel_title(axes, name)
    legend.draw(figure)
    return figure


def judges(run: RunRounds) -> bool:
    """Whether any client was accepted or rejected."""
    return any(verdict is not None for one in run.verdicts for verdict in one.accepted)


def client_strip(run: RunRounds) -> ClientStrip:
    """Sort the verdicts of a run by client and round."""
    import numpy as np

    attacked = {
        client
        for one in run.verdicts
        for client, malicious in zip(one.clients, one.malicious, strict=True)
        if malicious
    }
    seen = {client for one in run.verdicts for client in one.clients}
    clients = sorted(seen, key=lambda client: (client in attacked, client))
    if len(clients) > MAX_CLIENTS:  # half of them malicious, if there are as many
        n_malicious = min(len(attacked), MAX_CLIENTS // 2)
        benign = len(clients) - len(attacked)
        n_benign = min(benign, MAX_CLIENTS - n_malicious)
        clients = clients[:n_benign] + clients[benign : benign + MAX_CLIENTS - n_benign]
    place = {client: i for i, client in enumerate(clients)}
    verdicts = np.full((len(clients), len(run)), ABSENT)
    malicious = np.zeros(verdicts.shape, dtype=bool)
    for t, one in enumerate(run.verdicts):
        columns = zip(one.clients, one.malicious, one.accepted, one.refused, strict=True)
        for client, is_malicious, accepted, refused in columns:
            if client in place:
                verdicts[place[client], t] = _verdict(accepted, refused)
                malicious[place[client], t] = is_malicious
    return ClientStrip(clients, run.index, verdicts, malicious)


def _verdict(accepted: bool | None, refused: bool) -> int:
    if refused:
        return REFUSED
    if accepted is None:
        return NOT_JUDGED
    return ACCEPTED if accepted else REJECTED


def _draw_strip(axes: Axes, strip: ClientStrip, n_clients: int) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["white", *VERDICTS.values()])
    first, last = strip.rounds[0] - 0.5, strip.rounds[-1] + 0.5
    axes.imshow(
        strip.verdicts,
        cmap=colors,
        vmin=ABSENT - 0.5,
        vmax=len(VERDICTS) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(first, last, len(strip.clients) - 0.5, -0.5),
    )
    axes.set_ylim(n_clients - 0.5, -0.5)
    height = inches(axes)[1] / n_clients  # of a row
    width = min(max(0.3 * 72 * height, 0.6), 1.6)
    stretches = malicious_stretches(strip)
    for color, extra in (("white", 0.8), (RED, 0.0)):  # white edges stand out from dark cells
        axes.add_collection(LineCollection(stretches, color=color, linewidth=width + extra))


def malicious_stretches(strip: ClientStrip) -> list[list[tuple[float, float]]]:
    """Return a line for each stretch of rounds in which a client attacked."""
    found = []
    for place, row in enumerate(strip.malicious.tolist()):
        attacked = {strip.rounds[t] for t, malicious in enumerate(row) if malicious}
        firsts = [t for t in sorted(attacked) if t - 1 not in attacked]
        lasts = [t for t in sorted(attacked) if t + 1 not in attacked]
        for first, last in zip(firsts, lasts, strict=True):
            found.append([(first - 0.4, float(place)), (last + 0.4, float(place))])
    return found


def _name_axes(axes: Axes, is_first: bool, is_lowest: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_yticks([])
    if is_first:
        label_y(axes, "clients")
    axes.tick_params(labelbottom=is_lowest)
    if is_lowest:
        label_x(axes, "round")


def _handles(strips: Sequence[ClientStrip]) -> list[Artist]:
    """Return entries for the verdicts that occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {int(code) for strip in strips for code in strip.verdicts.flat}
    handles: list[Any] = [
        Patch(color=color, label=name)
        for code, (name, color) in enumerate(VERDICTS.items())
        if code in found
    ]
    if any(strip.malicious.any() for strip in strips):
        handles.append(Line2D([], [], color=RED, linewidth=1.6, label="malicious"))
    return handles
