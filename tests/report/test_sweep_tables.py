"""Tables of whole sweeps: what they name, and how they fit a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from handmade_runs import seal
from rich.console import Console
from sweep_folders import add_sweep

from fedbench.report.comparison import Comparison, compare
from fedbench.report.table import notes, print_runs, to_terminal
from fedbench.results.run_reader import METRICS, RunResult, read_runs

ROOT = Path(__file__).parents[2]


def compared(top: Path, *overrides: str) -> Comparison:
    add_sweep(top, *overrides)
    return compare(read_runs([top]))


def drawn(runs: list[RunResult], width: int, columns: tuple[str, ...] = METRICS) -> str:
    file = io.StringIO()
    console = Console(width=width, file=file)
    console.print(to_terminal(runs, columns, width))
    return file.getvalue()


def words(text: str) -> set[str]:
    return {*re.split(r"[\s,;]+", text)}


def labels(table: Comparison) -> list[str]:
    return [row.defense for row in table.rows]


def test_the_readme_table(tmp_path: Path) -> None:
    """The numbers of README's first table give the table, to the character."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```\n pmr  defense")[1].split("```")[0]
    lines = [line.split() for line in shown.splitlines()]
    rows = [line[-7:] for line in lines if re.fullmatch(r"[\d.]+", (line or [""])[-1])]
    assert len(rows) == 12
    for i, (defense, *cells) in enumerate(rows):
        numbers = [None if cell == "-" else float(cell) for cell in cells]
        ba, ma, tpr, tnr, auc = (None if n is None else n / 100 for n in numbers[:5])
        pmr = ("0.2", "0.3", "0.5")[i // 4]
        metrics = {"BA": ba, "MA": ma, "TPR": tpr, "TNR": tnr, "AUC": auc, "seconds": numbers[5]}
        add_sweep(tmp_path, f"defense={defense}", f"pmr={pmr}", **metrics)
    for width in (80, 1000):
        text = drawn(read_runs([tmp_path]), width)
        found = [line.rstrip() for line in text.strip("\n ").splitlines()]
        assert found == ["pmr  defense" + shown.splitlines()[0], *shown.splitlines()[1:]]


def test_the_caption_names_every_shared_setting_that_differs_from_its_default(
    tmp_path: Path,
) -> None:
    changed = ["lr=0.01", "local_epochs=1", "attack.alpha=0.5", "momentum=0.9"]
    caption = compared(tmp_path, "defense=krum,flame", *changed).caption()
    assert "rounds 10, attack.alpha 0.5, local_epochs 1, lr 0.01; seed 0; " in caption
    assert "momentum" not in caption  # 0.9 is the default


def test_a_defense_is_labeled_with_its_changed_settings(tmp_path: Path) -> None:
    table = compared(tmp_path, "defense=flame", "defense.noise=0.01")
    assert (table.keys, labels(table)) == ([], ["flame noise=0.01"])
    table = compared(tmp_path, "defense=krum,flame,baybfed_literal")
    # Next to noise=0.01, the default is worth naming too. A choice names its own settings.
    assert labels(table) == ["flame noise=0.001", "flame noise=0.01", "krum", "baybfed_literal"]


@pytest.mark.parametrize(
    ("sweep", "keys"),
    [
        (["defense=krum,flame"], []),
        (["pdr=0.2,0.8", "non_iid=0,1"], ["pdr", "non_iid"]),
        (["attack=dba,none", "defense=krum,flame"], ["attack"]),
        (["attack.alpha=0.5,0.7", "lr=0.05"], ["attack.alpha"]),
        # Models, partitions and learning rates follow from the data set.
        (["dataset=reddit_sample,iot_sample,fmnist_sample", "defense=krum,flame"], ["dataset"]),
        (["dataset=reddit_sample,iot_sample", "lr=10,1"], ["dataset", "lr"]),
        (["dataset=mnist,fmnist", "defense=dp,auror"], ["dataset"]),  # each has tuned settings
        (["scenario=default,converged", "pmr=0.2,0.3"], ["pmr", "scenario"]),
        (["model=mlp,cnn"], ["model"]),
        (["pretrained=a.pt,b.pt"], ["pretrained"]),
        (["seed=0,1,2"], []),
    ],
)
def test_columns_are_what_was_swept(tmp_path: Path, sweep: list[str], keys: list[str]) -> None:
    folders = add_sweep(tmp_path, *sweep)
    runs = read_runs([tmp_path])
    table = compare(runs)
    assert table.keys == keys
    # Rows are told apart, and no run is lost.
    names = [(*row.setting, row.defense) for row in table.rows]
    assert len({*names}) == len(names)
    assert sum(len(row.runs) for row in table.rows) == len(folders)
    assert notes(runs) == []


def test_a_setting_of_one_attack_is_part_of_its_name(tmp_path: Path) -> None:
    add_sweep(tmp_path, "attack=dba,none")
    table = compared(tmp_path, "attack.alpha=0.5")
    assert table.keys == ["attack"]
    assert [row.setting[0] for row in table.rows] == [
        *("constrain_and_scale alpha=0.5", "dba", "none")
    ]
    assert "alpha" not in table.caption()


def test_settings_that_nobody_changed_tell_rows_apart_if_nothing_else_does(tmp_path: Path) -> None:
    """A later version may have other defaults; `auto` may mean another device."""
    add_sweep(tmp_path, "defense=krum,flame")
    _, later, *_ = add_sweep(tmp_path, "defense=krum,flame")
    config = later / "config.yaml"
    config.write_text(config.read_text().replace("noise: 0.001", "noise: 0.002"))
    seal(later)
    table = compare(read_runs([tmp_path]))
    assert (table.keys, labels(table)) == ([], ["krum", "flame noise=0.001", "flame noise=0.002"])
    config.write_text(config.read_text().replace("\nlr: 0.05", "\nlr: 0.5"))
    seal(later)
    table = compare(read_runs([tmp_path]))
    assert table.keys == ["lr"]
    assert [row.setting for row in table.rows] == [["0.05"], ["0.05"], ["0.5"]]


def test_older_runs_give_the_same_table(tmp_path: Path) -> None:
    sweep = ["dataset=reddit_sample,mnist", "defense=krum,flame", "lr=0.1", "seed=0,1"]
    folders = add_sweep(tmp_path, *sweep)
    before = drawn(read_runs([tmp_path]), 1000)
    (folders[0] / "origin.json").unlink()
    assert drawn(read_runs([tmp_path]), 1000) == before
    for folder in folders[1:]:
        (folder / "origin.json").unlink()
    assert drawn(read_runs([tmp_path]), 1000) == before


def test_older_runs_of_a_missing_plugin_show_what_varies(tmp_path: Path) -> None:
    for folder in add_sweep(tmp_path, "defense=flame", "defense.noise=0.001,0.01", "lr=0.01,0.05"):
        (folder / "origin.json").unlink()
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("name: flame", "name: gone"))
        seal(folder)
    table = compare(read_runs([tmp_path]))
    assert table.keys == ["lr"]
    assert labels(table) == ["gone noise=0.001", "gone noise=0.01"] * 2


SWEEPS = [
    ["defense=fedavg,baybfed", "pmr=0.2,0.3", "seed=0,1"],
    ["attack=constrain_and_scale,alie", "defense=fedavg,krum", "seed=0,1"],
    ["attack=constrain_and_scale,dba", "pmr=0.2,0.3", "non_iid=0,1", "defense=krum"],
    ["dataset=reddit_sample,iot_sample", "defense=baybfed_literal,krum", "seed=0,1"],
    ["defense=flame", "defense.noise=0.001,0.01", "seed=0,1"],
    ["attack.constraint=l2,cosine", "attack.alpha=1,0.9", "seed=0,1"],
    ["pretrain_non_iid=0,1", "attack.constraint=l2,cosine", "attack_start=0,1"],
    ["defense=baybfed", "defense.error_floor=0.01,0.02", "defense.max_clusters=3", "seed=0,1"],
]


@pytest.mark.parametrize("sweep", SWEEPS, ids=" ".join)
def test_no_word_and_no_number_is_broken(tmp_path: Path, sweep: list[str]) -> None:
    add_sweep(tmp_path, *sweep, "attack_rounds=[3,4]", TPR=1.0, TNR=1.0)
    runs = read_runs([tmp_path])
    table = compare(runs)
    needed = max(map(len, drawn(runs, 1000).splitlines()))
    for width in (80, 90, 100, 120):
        text = drawn(runs, width)
        assert max(map(len, text.splitlines())) <= width
        hidden = text.split("--columns ")[1].strip().split(",") if "--columns " in text else []
        assert not hidden or needed > width
        shown = [name for name in METRICS if name not in hidden]
        assert shown[:4] == ["BA", "MA", "TPR", "TNR"]
        # Every cell is there, in one piece, as often as it should be.
        cells = Counter(cell for row in table.rows for cell in row.cells(shown))
        for cell, count in cells.items():
            assert len(re.findall(rf"(?<=\s){re.escape(cell)}(?=\s)", text)) >= count, cell
        names = [" ".join([*row.setting, row.defense]) for row in table.rows]
        assert words(" ".join([*names, *table.keys, table.caption(shown)])) <= words(text)


def test_a_narrow_terminal_gets_a_note_about_missing_columns(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum,flame", "seed=0,1,2", BA=1.0, MA=1.0, TPR=1.0, TNR=1.0)
    runs = read_runs([tmp_path])
    narrow, wide = drawn(runs, 80), drawn(runs, 120)
    assert narrow.split()[:6] == ["defense", "BA", "MA", "TPR", "TNR", "AUC"]
    assert narrow.count("100.0 ± 0.0") == 10
    note = "No space for seconds; see python -m fedbench.report --columns seconds"
    assert narrow.splitlines()[-1].rstrip() == note
    assert wide.split()[:8] == [*("defense", "BA", "MA", "TPR", "TNR", "AUC", "seconds", "seeds")]
    assert "No space" not in wide


def test_seeds_stay_where_the_caption_does_not_tell_them(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum,flame", "seed=0,1,2")
    last = add_sweep(tmp_path, "defense=median", "seed=0,1")[-1]
    (last / "summary.json").write_text(json.dumps({"status": "failed"}))
    seal(last)
    text = drawn(read_runs([tmp_path]), 80)
    assert text.splitlines()[1].split()[-1] == "seeds"
    assert "1 of 2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_settings_become_headings_before_a_metric_is_left_out(tmp_path: Path) -> None:
    sweep = ["attack=constrain_and_scale,dba", "non_iid=0,1", "defense=krum,flame"]
    add_sweep(tmp_path, *sweep, BA=1.0, MA=1.0, TPR=1.0, TNR=1.0, seconds=1000.0)
    lines = [line.rstrip() for line in drawn(read_runs([tmp_path]), 80).splitlines()]
    cells = "100.0  100.0  100.0  100.0  100.0   1000.0"
    assert lines[1:8] == [
        " non_iid  defense     BA     MA    TPR    TNR    AUC  seconds",
        " " + "─" * 61,
        " attack constrain_and_scale",
        *(f" 0.0      krum     {cells}", f"          flame    {cells}", ""),
        f" 1.0      krum     {cells}",
    ]
    assert [line for line in lines if line.startswith(" attack")][1:] == [" attack dba"]


def test_wide_settings_become_headings_and_one_defense_moves_to_the_caption(
    tmp_path: Path,
) -> None:
    sweep = ["attack.constraint=l2,cosine", "attack.alpha=0.5,0.9", "seed=0,1,2"]
    add_sweep(tmp_path, *sweep, BA=1.0, MA=1.0, TPR=1.0, TNR=1.0)
    lines = [line.rstrip() for line in drawn(read_runs([tmp_path]), 80).splitlines()]
    cells = "  ".join(["100.0 ± 0.0"] * 5)
    assert lines[1].split() == ["attack.alpha", "BA", "MA", "TPR", "TNR", "AUC"]
    assert lines[3:9] == [
        *(" attack.constraint cosine", f" 0.5           {cells}", f" 0.9           {cells}", ""),
        *(" attack.constraint l2", f" 0.5           {cells}"),
    ]
    assert lines[11].startswith("defense fedavg, dataset fmnist_sample, ")


def test_pipes_get_all_columns_unless_they_ask_for_a_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_sweep(tmp_path, *SWEEPS[2], "seed=0,1")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert not sys.stdout.isatty()
    print_runs(read_runs([tmp_path]))
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 100
    assert whole.split()[:4] == ["attack", "pmr", "non_iid", "defense"]
    monkeypatch.setenv("COLUMNS", "80")
    print_runs(read_runs([tmp_path]))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
