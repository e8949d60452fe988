"""Published numbers: the shipped files, how they meet rows of a comparison, files of the user."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweep_folders import add_sweep, composed

from fedbench.errors import UserError
from fedbench.report.comparison import compare
from fedbench.report.reported import SHIPPED, ReportedMatch, ReportedValue, match, read_reported
from fedbench.results.run_reader import read_runs
from fedbench.results.settings import flat

# Rows as in the paper's source, without \changed, \cite and \textbf
TABLE_2 = r"""
\multirow{3}{*}{\ConstrainAndScale}   & Reddit & 100.0 & 22.6 & 0.0 & 22.6 \\ \cline{2-6}
                              & CIFAR-10 & 100.0 & 90.5 & 0.0 & 92.2 \\ \cline{2-6}
                              & MNIST & 43.0  & 96.5  & 0.0  & 96.0 \\ \cline{2-6}
                              & FMNIST & 71.0  & 85.5  & 2.0  & 85.3 \\ \cline{2-6}
                              & IoT-Traffic & 100.0 & 100.0 & 0.0 & 100.0 \\ \hline
 Edge-Case                    & CIFAR-10 &  33.16 & 88.42& 4.02 & 82.82 \\ \hline
"""
TABLE_3 = r"""
    Benign Setting     & -  & 22.6 & - & 92.6 & - & 100.0 \\ \hline
    No Defense         & 100.0 & 22.6 & 100.0 & 90.5 & 100.0 & 100.0 \\ \hline
    Krum                 & 100.0 & 9.6 & 100.0 & 56.7 & 100.0 & 84.0 \\ \hline
    FoolsGold        & 0.0 & 22.5 & 100.0 & 52.3 & 100.0 & 99.2 \\ \hline
    Auror                    & 100.0 & 22.5 & 100.0 & 26.1 & 100.0 & 96.6 \\ \hline
    AFA                       & 100.0 & 22.4 & 0.0 & 91.7 & 100.0 & 87.4\\ \hline
    DP                       & 14.0 & 18.9 & 0.0 & 78.9 & 14.8 & 82.3 \\ \hline
    Median              & 0.0 & 22.0 & 0.0 & 50.1 & 0.0 & 87.7\\ \hline
    FLAME                  & 0.0 & 22.3 & 0.0 & 91.9 & 0.0 & 99.8\\ \hline
    \ourname                & 0.0 & 22.6 & 0.0 & 92.2 & 0.0 & 100.0 \\ \hline
"""
DATASETS = {"Reddit": "reddit", "CIFAR-10": "cifar10", "IoT-Traffic": "iot"}
DATASETS |= {"MNIST": "mnist", "FMNIST": "fmnist"}
ATTACKS = {"Edge-Case": "edge_case", r"\multirow{3}{*}{\ConstrainAndScale}": "constrain_and_scale"}

Names = tuple[str, str, str]


def cells_of(table: str) -> list[list[str]]:
    lines = (line.partition(r"\\")[0] for line in table.strip().splitlines())
    return [[cell.strip() for cell in line.split("&")] for line in lines]


def numbers(ba: str, ma: str) -> dict[str, float]:
    return {name: float(cell) for name, cell in {"BA": ba, "MA": ma}.items() if cell != "-"}


def table_2() -> dict[Names, dict[str, float]]:
    found, attack = {}, ""
    for first, dataset, *cells in cells_of(TABLE_2):
        attack = ATTACKS[first] if first else attack
        found[DATASETS[dataset], attack, "fedavg"] = numbers(*cells[:2])
        found[DATASETS[dataset], attack, "baybfed"] = numbers(*cells[2:])
    return found


def table_3() -> dict[Names, dict[str, float]]:
    found = {}
    for name, *cells in cells_of(TABLE_3):
        defense = {r"\ourname": "baybfed", "No Defense": "fedavg"}.get(name, name.lower())
        attack = "constrain_and_scale"
        if name == "Benign Setting":
            attack, defense = "none", "fedavg"
        for i, dataset in enumerate(("reddit", "cifar10", "iot")):
            found[dataset, attack, defense] = numbers(*cells[2 * i : 2 * i + 2])
    return found


@pytest.mark.parametrize(("where", "rows"), [("Table 2", table_2), ("Table 3", table_3)])
def test_shipped_tables_are_the_papers(
    where: str, rows: Callable[[], dict[Names, dict[str, float]]]
) -> None:
    shipped = [value for value in read_reported([SHIPPED]) if value.where == where]
    expected = rows()
    assert len(shipped) == len(expected) == {"Table 2": 12, "Table 3": 30}[where]
    for value in shipped:
        printed = expected[value.dataset, value.attack, value.defense]
        assert value.metrics == {key: round(n / 100, 4) for key, n in printed.items()}
        assert value.settings == {}


def stated(where: str, **settings: Any) -> dict[str, float]:
    """Metrics in percent of the text's entry with these settings."""
    found = [
        value.metrics
        for value in read_reported([SHIPPED])
        if where in value.where
        and value.defense == "baybfed"
        and settings.items() <= dict(value.settings).items()
    ]
    assert found, (where, settings)
    assert all(metrics == found[0] for metrics in found)
    return {key: round(100 * rate, 6) for key, rate in found[0].items()}


def test_shipped_numbers_of_the_text() -> None:
    adaptive = {
        1.0: {"BA": 0, "MA": 92.33, "TPR": 100, "TNR": 95},  # TP 10, FN 0, TN 19, FP 1
        0.5: {"BA": 0, "MA": 92.25, "TPR": 100, "TNR": 100},
        0.0: {"BA": 0, "MA": 92.14, "TPR": 0, "TNR": 85},  # TP 0, FN 10, TN 17, FP 3
    }
    for alpha, metrics in adaptive.items():
        assert stated("adaptive attacks", **{"attack.alpha": alpha}) == metrics
    assert stated("client order") == {"BA": 0, "MA": 92.5}
    for pdr in (0.05, 0.1, 0.5):
        assert stated("PDR", pdr=pdr, pmr=0.2, n_clients=30) == {"BA": 0, "MA": 92.4}
        assert stated("PDR", pdr=pdr, pmr=0.3, n_clients=100) == {"BA": 0, "MA": 100}
    for pmr in (0.2, 0.3, 0.4, 0.5):
        assert stated("WP", pmr=pmr) == {"BA": 0, "MA": 22.6, "TPR": 100, "TNR": 100}
        assert stated("NIDS", pmr=pmr) == {"BA": 0, "MA": 100, "TPR": 100, "TNR": 100}
    for rate in (0.0, 0.5, 1.0):
        metrics = {"BA": 0, "MA": 92.2, "TPR": 100, "TNR": 100}
        assert stated("CIFAR-10, effect of non-IID", non_iid=rate, pmr=0.2) == metrics
    for n in (1, 2, 3, 4):
        assert stated("injection strategies", **{"attack.n_backdoors": n}) == {"BA": 0}
    assert stated("number of clients", n_clients="[40, 90]") == {"BA": 0}


def test_contradictions_of_the_paper_are_noted() -> None:
    values = read_reported([SHIPPED])
    afa = [v for v in values if v.defense == "afa" and "prints BA 0.0" in v.note]
    assert {v.dataset: v.metrics["BA"] for v in afa} == {"reddit": 1, "iot": 1}
    (fmnist,) = [v for v in values if v.metrics.get("BA") == 0.02]
    assert "The text says BA 0" in fmnist.note
    assert "states neither pmr" in fmnist.note


def test_shipped_names_and_settings_exist() -> None:
    known: dict[tuple[str, ...], set[str]] = {}
    for value in read_reported([SHIPPED]):
        named = (f"dataset={value.dataset}", f"attack={value.attack}", f"defense={value.defense}")
        if named not in known:
            known[named] = {*flat(vars(composed(named)[0]))}
        assert value.settings.keys() <= known[named]
        assert value.source.citation == "Kumari et al., IEEE S&P 2023"
        assert set(value.metrics) <= {"BA", "MA", "TPR", "TNR"}


def matches(top: Path, *overrides: str, **metrics: Any) -> list[ReportedMatch]:
    add_sweep(top, *overrides, **metrics)
    return match(compare(read_runs([top])).rows, read_reported([SHIPPED]))


def places(found: list[ReportedMatch]) -> set[str]:
    return {pair.reported.where for pair in found}


CIFAR = ("dataset=cifar10", "attack=constrain_and_scale")


def test_a_row_is_compared_with_the_paper(tmp_path: Path) -> None:
    add_sweep(tmp_path, *CIFAR, "defense=krum", "seed=0", BA=0.9, MA=0.5)
    found = matches(tmp_path, *CIFAR, "defense=krum", "seed=1", BA=0.7, MA=0.6)
    assert [(pair.metric, pair.paper) for pair in found] == [("BA", 1.0), ("MA", 0.567)]
    ba, ma = found
    assert ba.ours.mean == pytest.approx(0.8)
    assert ba.difference == pytest.approx(-0.2)
    assert ba.ours.values == {0: 0.9, 1: 0.7}
    assert ma.difference == pytest.approx(0.55 - 0.567)
    assert not ba.stands_in
    assert ba.unstated == {}
    assert ba.row.defense == "krum"
    assert ba.reported.where == "Table 3"


def test_a_variant_of_a_plugin_is_not_what_the_paper_measured(tmp_path: Path) -> None:
    for i, changed in enumerate(["defense.m=5", "attack.alpha=0.5", "model=cnn"]):
        assert not matches(tmp_path / str(i), *CIFAR, "defense=krum", changed)
    assert not matches(tmp_path / "literal", *CIFAR, "defense=baybfed_literal")


def test_variants_in_a_table_of_both_match_alone(tmp_path: Path) -> None:
    found = matches(tmp_path, *CIFAR, "defense=krum", "defense.m=1,5")
    assert {pair.row.defense for pair in found} == {"krum m=1"}


def test_a_parameter_that_the_paper_states_must_be_equal(tmp_path: Path) -> None:
    adaptive = ("dataset=cifar10", "attack=adaptive_baybfed", "defense=baybfed", "pmr=0.33")
    found = matches(tmp_path / "a", *adaptive, "attack.alpha=1,0.5,0,0.7", BA=0.0, TPR=1.0)
    by_alpha: dict[Any, dict[str, float]] = {}
    for pair in found:
        alpha = pair.row.runs[0].value("attack.alpha")
        assert pair.reported.settings["attack.alpha"] == alpha
        by_alpha.setdefault(alpha, {})[pair.metric] = pair.paper
    assert {alpha: paper["TPR"] for alpha, paper in by_alpha.items()} == {1: 1, 0.5: 1, 0: 0}
    assert not matches(tmp_path / "b", *adaptive, "attack.alpha=1", "attack.gamma=2")


def test_the_number_of_malicious_clients_decides(tmp_path: Path) -> None:
    adaptive = ("dataset=cifar10", "attack=adaptive_baybfed", "defense=baybfed")
    for pmr, n_matches in {"0.3333": 4, "0.34": 4, "0.3": 0, "0.36": 0}.items():  # 10, 10, 9, 11
        assert len(matches(tmp_path / pmr, *adaptive, f"pmr={pmr}")) == n_matches


def test_settings_of_the_federation_must_be_equal_where_stated(tmp_path: Path) -> None:
    found = matches(tmp_path / "a", *CIFAR, "defense=baybfed", "non_iid=0.7", "pmr=0.3")
    effect = "Statistics for CIFAR-10, effect of PMR"
    tables = {"Table 2", "Table 3", "Overall Performance, baseline models"}
    assert places(found) == {effect, *tables}
    assert found[0].reported.where == effect  # the most specific comes first
    assert found[0].unstated == {}
    in_table = next(pair for pair in found if pair.reported.where == "Table 3")
    assert in_table.unstated == {"non_iid": 0.7, "pmr": 0.3}
    found = matches(tmp_path / "b", *CIFAR, "defense=baybfed", "non_iid=0.6", "pmr=0.3")
    assert places(found) == tables


def test_a_setting_without_effect_is_not_that_of_the_paper(tmp_path: Path) -> None:
    swept = (*CIFAR, "defense=baybfed", "non_iid=0.5", "pmr=0.2")
    effect = "Statistics for CIFAR-10, effect of non-IID data"
    assert effect in places(matches(tmp_path / "a", *swept))
    assert effect not in places(matches(tmp_path / "b", *swept, "partition=dirichlet"))


def test_a_range_of_clients(tmp_path: Path) -> None:
    found = matches(tmp_path, *CIFAR, "defense=baybfed", "n_clients=[40,90]")
    assert "Effect of other factors, number of clients" in places(found)


def test_other_backdoors_do_not_make_a_variant(tmp_path: Path) -> None:
    edge = ("dataset=cifar10", "attack=edge_case", "defense=fedavg")
    found = matches(tmp_path, *edge, "attack.backdoors=[southwest]", BA=0.3, MA=0.9)
    assert [(pair.paper, pair.unstated) for pair in found] == [
        (0.3316, {"attack.backdoors": '["southwest"]'}),
        (0.8842, {"attack.backdoors": '["southwest"]'}),
    ]


def test_no_attack_is_the_benign_setting(tmp_path: Path) -> None:
    found = matches(tmp_path, "dataset=cifar10", "attack=none", "defense=fedavg,krum", MA=0.9)
    assert [(p.metric, p.paper, p.row.defense) for p in found] == [("MA", 0.926, "fedavg")]


@pytest.mark.parametrize("real", ["fmnist", "reddit", "iot"])
def test_a_sample_stands_in_for_its_data_set(tmp_path: Path, real: str) -> None:
    overrides = ["attack=constrain_and_scale", "defense=fedavg"]
    for dataset, stands_in in ((real, False), (f"{real}_sample", True)):
        found = matches(tmp_path / dataset, *overrides, f"dataset={dataset}")
        assert "Table 2" in places(found)
        assert {pair.stands_in for pair in found} == {stands_in}
    assert not matches(tmp_path / "other", *overrides, "dataset=custom", "dataset.source=a.npz")


def test_what_was_not_measured_is_not_compared(tmp_path: Path) -> None:
    found = matches(tmp_path / "a", *CIFAR, "defense=krum", BA=None)
    assert [pair.metric for pair in found] == ["MA"]
    (folder,) = add_sweep(tmp_path / "b", *CIFAR, "defense=krum")
    (folder / "summary.json").unlink()
    assert match(compare(read_runs([tmp_path / "b"])).rows, read_reported([SHIPPED])) == []


def test_runs_without_an_origin_are_compared_with_the_defaults(tmp_path: Path) -> None:
    for name, changed, n_matches in (("plain", "pmr=0.2", 2), ("variant", "defense.m=5", 0)):
        (folder,) = add_sweep(tmp_path / name, *CIFAR, "defense=krum", changed)
        (folder / "origin.json").unlink()
        rows = compare(read_runs([tmp_path / name])).rows
        assert len(match(rows, read_reported([SHIPPED]))) == n_matches


def test_unreadable_runs_match_nothing(tmp_path: Path) -> None:
    (folder,) = add_sweep(tmp_path, *CIFAR, "defense=krum")
    (folder / "config.yaml").write_text("{")
    assert match(compare(read_runs([tmp_path])).rows, read_reported([SHIPPED])) == []


OWN = """
source: {authors: [Ann Lee, Bo Kim], title: Mine, venue: NDSS, year: 2024, link: https://x.org}
where: Table 1
entries:
  - {dataset: mnist, attack: dba, defense: mine, settings: {pmr: 0.1}, metrics: {BA: 7.5}}
"""


def own(folder: Path, text: str = OWN) -> list[ReportedValue]:
    (folder / "reported").mkdir()
    (folder / "reported" / "own.yaml").write_text(text)
    return read_reported()


def test_a_folder_of_the_user_adds_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    n_shipped = len(read_reported())
    *shipped, mine = own(tmp_path)
    assert len(shipped) == n_shipped > 42
    assert (mine.dataset, mine.attack, mine.defense) == ("mnist", "dba", "mine")
    assert mine.settings == {"pmr": 0.1}
    assert mine.metrics == {"BA": 0.075}
    assert mine.note == ""
    assert mine.source.citation == "Lee and Kim, NDSS 2024"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("entries:", "entries: [", r"not YAML, line \d"),
        (OWN, "", r"the file must be a mapping with source, where, entries, note"),
        ("where: Table 1", "", "the file lacks where"),
        ("entries:", "entrys:", r"the file has no key 'entrys'; did you mean entries\? \(known: "),
        ("BA: 7.5", "BA: 750", "entry 1: BA must be a percentage, 0 to 100, got 750"),
        ("BA: 7.5", "BA: high", "entry 1: BA must be a percentage, 0 to 100, got 'high'"),
        ("BA: 7.5", "BA: true", "entry 1: BA must be a percentage, 0 to 100, got True"),
        ("BA: 7.5", "BA: .nan", "entry 1: BA must be a percentage, 0 to 100, got nan"),
        ("BA: 7.5", "F1: 7.5", r"entry 1: metrics has no key 'F1'.* \(known: BA, MA, TPR, TNR\)"),
        ("{BA: 7.5}", "{}", "entry 1: metrics must be a mapping with BA, MA, TPR, TNR"),
        ("defense: mine, ", "", "entry 1 lacks defense"),
        ("defense: mine", "defense: 3", "entry 1: defense must be text, got 3"),
        ("{pmr: 0.1}", "[pmr]", r"entry 1: settings must be a mapping, got \['pmr'\]"),
        ("year: 2024", "year: soon", "year must be a number, got 'soon'"),
        ("[Ann Lee, Bo Kim]", "Ann Lee", "authors must be a list of names, got 'Ann Lee'"),
        ("title: Mine, ", "", "source lacks title"),
    ],
)
def test_a_damaged_file_costs_one_line(
    tmp_path: Path, monkeypatch: Any, old: str, new: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        own(tmp_path, OWN.replace(old, new))
    assert re.fullmatch(rf".*/reported/own\.yaml: {problem}.*", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"x\.yaml: .*codec"):
        read_reported([tmp_path])
    (tmp_path / "x.yaml").unlink()
    (tmp_path / "x.yaml").mkdir()
    with pytest.raises(UserError, match=r"x\.yaml: .*directory"):
        read_reported([tmp_path])


def test_the_example_of_the_docstring_can_be_read(tmp_path: Path) -> None:
    from fedbench.report import reported

    example = re.search(r"(?s)\n\n(    source: .*?)\n\n", str(reported.__doc__))
    assert example is not None
    text = re.sub("(?m)^    ", "", example[1])
    assert yaml.safe_load(text)["where"] == "Table 1"
    (tmp_path / "x.yaml").write_text(text)
    (value,) = read_reported([tmp_path])
    assert value.settings == {"pmr": 0.2, "attack.alpha": 0.5}
    assert value.metrics["BA"] == 1
