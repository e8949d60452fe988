"""ROC of the scores, against scikit-learn and an average by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from figure_data import (
    STRANGE,
    assert_nothing_is_cut_off,
    legend_texts,
    report,
    rounds,
    run,
    verdicts,
)
from sklearn.metrics import roc_auc_score, roc_curve  # type: ignore[import-untyped]

from fedbench.report.figures.roc import (
    MAX_PANELS,
    roc,
    roc_curves,
    roc_drawings,
    round_roc,
    run_roc,
)
from fedbench.results.run_rounds import Verdicts


def some_round(seed: int, n: int = 12) -> Verdicts:
    """Scores with ties."""
    rng = random.Random(seed)
    malicious = [i < 4 for i in range(n)]
    return verdicts(malicious, [float(rng.randrange(6) + 2 * bad) for bad in malicious])


def oracle(one: Verdicts, at: np.ndarray) -> np.ndarray:
    """True-positive rate at false-positive rates: the highest where the curve rises vertically."""
    false, true, _ = roc_curve(one.malicious, one.scores, drop_intermediate=False)
    values = []
    for x in at:
        i = int(np.flatnonzero(false <= x + 1e-12)[-1])
        if i == len(false) - 1:
            values.append(true[i])
        else:
            share = (x - false[i]) / (false[i + 1] - false[i])
            values.append(true[i] + max(share, 0.0) * (true[i + 1] - true[i]))
    return np.array(values)


@pytest.mark.parametrize("seed", range(10))
def test_a_round_equals_scikit_learn(seed: int) -> None:
    one = some_round(seed)
    curve = round_roc(one)
    assert curve is not None
    false, true, _ = roc_curve(one.malicious, one.scores, drop_intermediate=False)
    assert curve.false_positives == pytest.approx(false)
    assert curve.true_positives == pytest.approx(true)
    assert curve.auc == pytest.approx(roc_auc_score(one.malicious, one.scores))


def test_rounds_are_averaged_before_seeds() -> None:
    """Seed 0 has three attacked rounds, seed 1 has one: each seed counts once."""
    many = [some_round(i) for i in range(3)]
    few = some_round(9)
    data = report(
        run("krum", 0, rounds([*many, some_round(50)], attacked=[True] * 3 + [False]), BA=0.1),
        run("krum", 1, rounds([few, verdicts([True, False])]), BA=0.1),
        run("median", 0, rounds([verdicts([True, False])]), BA=0.1),
    )
    curve = roc_curves(data, data.rows)["krum"]
    at = curve.false_positives
    first = np.mean([oracle(one, at) for one in many], axis=0)
    assert curve.true_positives == pytest.approx((first + oracle(few, at)) / 2)
    area = np.mean([roc_auc_score(one.malicious, one.scores) for one in many])
    assert curve.auc == pytest.approx((area + roc_auc_score(few.malicious, few.scores)) / 2)
    figure = roc(data)
    assert figure is not None
    (axes,) = figure.axes
    line = next(line for line in axes.lines if line.get_color() == data.styles["krum"].color)
    assert np.asarray(line.get_xdata())[1:] == pytest.approx(100 * at)
    assert np.asarray(line.get_ydata())[1:] == pytest.approx(100 * curve.true_positives)
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (0, 0)  # type: ignore[index]
    assert legend_texts(axes) == [f"krum {curve.auc:.2f}"]
    assert axes.get_xlabel() == "false positive rate (%)"
    assert axes.get_ylabel() == "true positive rate (%)"
    assert_nothing_is_cut_off(figure)


def test_clients_are_not_pooled_over_rounds() -> None:
    """Every round is perfect, but on a scale of its own: pooled, the AUC would be 0.75."""
    low = verdicts([False, True], [0.0, 1.0])
    high = verdicts([False, True], [2.0, 3.0])
    curve = run_roc(rounds([low, high]))
    assert curve is not None
    assert curve.auc == 1.0


@pytest.mark.parametrize(
    "one",
    [
        verdicts([True, True], [1.0, 2.0]),
        verdicts([False], [1.0]),
        verdicts([True, False], [None, 1.0]),
        verdicts([True, False], [float("nan"), 1.0]),
        verdicts([]),
    ],
)
def test_one_kind_of_clients_has_no_curve(one: Verdicts) -> None:
    assert round_roc(one) is None
    data = report(run("krum", 0, rounds([one]), BA=0.1), run("flame", 0, None, status="failed"))
    assert roc(data) is None


def test_settings_are_panels_and_the_rest_is_named() -> None:
    values = [i / 10 for i in range(1, MAX_PANELS + 2)]
    data = report(
        *(
            run(name, 0, rounds([some_round(0)]), settings={"pmr": p})
            for p in values
            for name in STRANGE
        )
    )
    figure = roc(data)
    assert figure is not None
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"pmr {p}" for p in values[:MAX_PANELS]]
    assert_nothing_is_cut_off(figure)
    assert roc_drawings(data)[0].caption.endswith("Not shown: pmr 0.7.")


def test_a_long_legend_stays_on_the_page() -> None:
    data = report(*(run(f"defense{i}", 0, rounds([some_round(i)])) for i in range(25)))
    figure = roc(data)
    assert figure is not None
    assert len(legend_texts(figure.axes[0])) == 25
    assert_nothing_is_cut_off(figure)
