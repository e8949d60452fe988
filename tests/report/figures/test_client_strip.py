"""Clients by rounds: each cell is the verdict on a client, malicious clients are marked."""

from __future__ import annotations

import numpy as np
import pytest
from figure_data import assert_nothing_is_cut_off, legend_texts, report, rounds, run, verdicts
from matplotlib.collections import LineCollection

from fedbench.report.figures.client_strip import (
    ABSENT,
    ACCEPTED,
    MAX_CLIENTS,
    MAX_PANELS,
    NOT_JUDGED,
    REFUSED,
    REJECTED,
    client_drawings,
    client_strip,
    client_strips,
    malicious_stretches,
)

# Client 7 attacks in rounds 0 and 2; 9 is absent in round 1; 3 is refused in round 2.
ROUNDS = rounds(
    [
        verdicts([True, False, False], accepted=[False, True, True], clients=[7, 3, 9]),
        verdicts([False, False], accepted=[True, False], clients=[7, 3]),
        verdicts(
            [True, False, False],
            accepted=[True, None, None],
            refused=[False, True, False],
            clients=[7, 3, 9],
        ),
    ]
)
A, R, F, J, NO = ACCEPTED, REJECTED, REFUSED, NOT_JUDGED, ABSENT


def test_cells_are_verdicts_benign_clients_first() -> None:
    strip = client_strip(ROUNDS)
    assert strip.clients == [3, 9, 7]
    assert strip.verdicts.tolist() == [[A, R, F], [A, NO, J], [R, A, A]]
    assert strip.malicious.tolist() == [[False] * 3, [False] * 3, [True, False, True]]
    assert malicious_stretches(strip) == [[(-0.4, 2), (0.4, 2)], [(1.6, 2), (2.4, 2)]]


def test_the_image_and_the_marks_equal_the_run() -> None:
    data = report(run("krum", 0, ROUNDS, BA=0.1))
    figure = client_strips(data, data.rows)
    assert figure is not None
    (axes,) = figure.axes
    (image,) = axes.images
    assert np.asarray(image.get_array()).tolist() == [[A, R, F], [A, NO, J], [R, A, A]]
    assert image.get_extent() == [-0.5, 2.5, 2.5, -0.5]
    assert {tuple(image.cmap(image.norm(code))) for code in (A, R, F, J, NO)} == {
        tuple(image.cmap(i)) for i in range(5)
    }
    _, red = (c for c in axes.collections if isinstance(c, LineCollection))
    assert [segment.tolist() for segment in red.get_segments()] == [
        [[-0.4, 2], [0.4, 2]],
        [[1.6, 2], [2.4, 2]],
    ]
    names = ["accepted", "rejected", "refused before the defense", "not judged", "malicious"]
    assert legend_texts(figure) == names
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "clients")
    assert_nothing_is_cut_off(figure)


def test_colors_differ_in_gray_print() -> None:
    """By at least 0.04 in luma; accepted is light and rejected dark."""
    from matplotlib.colors import to_rgb

    from fedbench.report.figures.client_strip import VERDICTS

    luma = [np.dot(to_rgb(color), (0.299, 0.587, 0.114)) for color in VERDICTS.values()]
    ordered = sorted(luma)
    assert min(np.diff(ordered)) > 0.04
    assert luma[ACCEPTED] - luma[REJECTED] > 0.5


def test_the_first_seed_of_each_setting_is_shown() -> None:
    values = [i / 10 for i in range(1, MAX_PANELS + 2)]
    runs = [
        run("krum", seed, rounds([verdicts([False], accepted=[seed == 1])]), settings={"pmr": p})
        for p in values
        for seed in (0, 1)
    ]
    data = report(*runs)
    (drawing,) = client_drawings(data)
    assert drawing.name == "clients_krum"
    assert drawing.caption.endswith("Not shown: pmr 0.7.")
    figure = drawing.draw()
    assert figure is not None
    arrays = [np.asarray(axes.images[0].get_array()).tolist() for axes in figure.axes]
    assert arrays == [[[REJECTED]]] * MAX_PANELS
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"pmr {p}" for p in values[:MAX_PANELS]
    ]


@pytest.mark.parametrize(("n_malicious", "n_shown"), [(5, 5), (90, 30), (0, 0), (200, 60)])
def test_a_large_pool_shows_some_clients_of_both_kinds(n_malicious: int, n_shown: int) -> None:
    malicious = [client < n_malicious for client in range(200)]
    strip = client_strip(rounds([verdicts(malicious, accepted=[True] * 200)]))
    assert len(strip.clients) == len({*strip.clients}) == MAX_CLIENTS
    assert int(strip.malicious.sum()) == n_shown


def test_a_defense_that_judges_nobody_or_accepts_everybody_has_no_figure() -> None:
    data = report(
        run("fedavg", 0, rounds([verdicts([True, False], accepted=[True, True])]), BA=0.1),
        run("median", 0, rounds([verdicts([True, False])]), BA=0.1),
        run("krum", 0, None, BA=0.1),
        run("flame", 0, rounds(n=0), status="failed"),
    )
    assert [drawing.draw() for drawing in client_drawings(data)] == [None] * 4
