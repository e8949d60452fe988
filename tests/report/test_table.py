"""The report's table, from handmade run directories."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from handmade_runs import seal
from rich.console import Console

from fedbench.errors import UserError
from fedbench.report.__main__ import main
from fedbench.report.table import notes, to_markdown, to_terminal
from fedbench.results.run_reader import read_runs

ROOT = Path(__file__).parents[2]


class Runs:
    """Create run directories, each started a second after the one before."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.count = 0

    def add(
        self, defense: str | dict[str, Any], summary: dict[str, Any] | str | None, **config: Any
    ) -> Path:
        # Numbered downwards, so that names and start times sort differently.
        folder = self.top / f"run{99 - self.count}"
        folder.mkdir(parents=True)
        chosen = {"name": defense} if isinstance(defense, str) else defense
        whole = {
            **{"pmr": 0.2, "n_clients": 30, "rounds": 10, "seed": 0, "name": "demo", "out": "runs"},
            **{"defense": chosen, "attack": {"name": "dba", "parts": 4}},
            **{"dataset": {"name": "mnist"}, "model": {"name": "cnn"}, **config},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        seal(folder)
        os.utime(folder / "config.yaml", (self.count, self.count))
        if summary is not None:
            text = summary if isinstance(summary, str) else json.dumps(summary)
            (folder / "summary.json").write_text(text)
            seal(folder)
        self.count += 1
        return folder

    def rows(self) -> list[list[str]]:
        """Return the cells of the markdown table, header first, without rule and caption."""
        lines = to_markdown(read_runs([self.top])).split("\n\n")[0].splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:1] + lines[2:]]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "demo")


def finished(**numbers: Any) -> dict[str, Any]:
    some = {"MA": 0.84, "BA": 0.1, "TPR": 1.0, "TNR": 0.5, "AUC": 0.75, "seconds": 7.44}
    return {"status": "finished", **some, "rounds": 10, "versions": {}, **numbers}


def test_markdown_exactly(runs: Runs) -> None:
    runs.add("krum", finished(), pmr=0.5)
    runs.add("krum", finished(BA=0))
    runs.add("median", finished(TPR=None, TNR=None, AUC=None), pmr=0.5)
    runs.add("median", {"status": "failed", "error": "out of memory"})
    assert to_markdown(read_runs([runs.top])) == (
        "| pmr | defense | BA | MA | TPR | TNR | AUC | seconds |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 0.2 | krum | 0.0 | 84.0 | 100.0 | 50.0 | 75.0 | 7.4 |\n"
        "| 0.2 | median | failed |  |  |  |  |  |\n"
        "| 0.5 | krum | 10.0 | 84.0 | 100.0 | 50.0 | 75.0 | 7.4 |\n"
        "| 0.5 | median | 10.0 | 84.0 | - | - | - | 7.4 |\n"
        "\n"
        "dataset mnist, model cnn, attack dba, n_clients 30, rounds 10; seed 0; "
        "BA, MA, TPR, TNR, AUC in %\n"
    )


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("main_class", "non_iid 0.7"),
        ("dirichlet", "partition dirichlet"),
        ("natural", "partition natural"),
    ],
)
def test_the_caption_names_the_partition(runs: Runs, partition: str, expected: str) -> None:
    runs.add("krum", finished(), partition=partition, non_iid=0.7)
    caption = to_markdown(read_runs([runs.top])).splitlines()[-1]
    assert f", {expected}, n_clients 30" in caption
    assert ("non_iid" in caption) == (partition == "main_class")


def test_a_range_of_clients_is_shown_as_on_the_command_line(runs: Runs) -> None:
    runs.add("krum", finished(), n_clients=[40, 90])
    assert ", n_clients [40, 90], rounds" in to_markdown(read_runs([runs.top])).splitlines()[-1]
    for n_clients in (100, [9, 90], 30):
        runs.add("krum", finished(), n_clients=n_clients)
    assert [row[0] for row in runs.rows()] == ["n_clients", "30", "100", "[9, 90]", "[40, 90]"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, True),
        ({"partition": "dirichlet"}, True),
        ({"partition": "natural"}, False),
        ({"pretrain_rounds": 0}, False),
        ({"pretrained": "model.pt"}, False),
        ({"pretrain_non_iid": None}, False),
    ],
)
def test_the_caption_names_pretrain_non_iid_if_it_has_an_effect(
    runs: Runs, settings: dict[str, Any], named: bool
) -> None:
    runs.add("krum", finished(), **{"pretrain_rounds": 40, "pretrain_non_iid": 0.0} | settings)
    caption = to_markdown(read_runs([runs.top])).splitlines()[-1]
    assert ("pretrain_non_iid 0.0, n_clients 30" in caption) == named


def test_seeds_are_averaged(runs: Runs) -> None:
    # MA 80, 84, 88: mean 84, squared deviations (16 + 0 + 16) / (3 - 1) = 16, root 4.
    # TPR has two values, 90 and 100: mean 95, root of (25 + 25) / 1 = 7.07. AUC has one, TNR none.
    runs.add("krum", finished(MA=0.80, TPR=0.9, TNR=None, AUC=None, seconds=1), seed=0)
    runs.add("krum", finished(MA=0.84, TPR=None, TNR=None, AUC=None, seconds=2), seed=1)
    runs.add("krum", finished(MA=0.88, TPR=1.0, TNR=None, AUC=0.5, seconds=3), seed=2)
    runs.add("flame", finished(), seed=1)
    header, krum, flame = runs.rows()
    assert header == ["defense", "BA", "MA", "TPR", "TNR", "AUC", "seconds", "seeds"]
    assert krum[1:4] == ["10.0 ± 0.0", "84.0 ± 4.0", "95.0 ± 7.1"]
    assert krum[4:] == ["-", "50.0", "2.0 ± 1.0", "3"]
    assert flame == ["flame", "10.0", "84.0", "100.0", "50.0", "75.0", "7.4", "1"]
    caption = to_markdown(read_runs([runs.top])).splitlines()[-1]
    assert "; seeds 0, 1, 2; " in caption
    assert caption.endswith("in %, mean ± sample standard deviation over seeds")


def test_unfinished_runs_are_counted_but_not_averaged(runs: Runs) -> None:
    runs.add("krum", finished(MA=0.8), seed=0)
    runs.add("krum", {"status": "failed", "error": "out of\nmemory"}, seed=1)
    runs.add("krum", finished(MA=0.9), seed=2)
    runs.add("flame", None, seed=0)
    runs.add("flame", {"status": "failed"}, seed=1)
    runs.add("median", None)
    _, krum, flame, median = runs.rows()
    assert (krum[2], krum[-1]) == ("85.0 ± 7.1", "2 of 3")
    assert flame == ["flame", "failed", "", "", "", "", "", "0 of 2"]
    assert median == ["median", "unfinished", "", "", "", "", "", "0 of 1"]
    assert notes(read_runs([runs.top])) == [
        f"failed: {runs.top}/run98: out of memory",
        f"unfinished: {runs.top}/run96",
        f"failed: {runs.top}/run95",
        f"unfinished: {runs.top}/run94",
    ]


def test_a_repeated_seed_counts_once(runs: Runs) -> None:
    """The newest finished run counts: its plugins may be of a later version."""
    old = runs.add("krum", finished(MA=0.8), executor={"devices": 2}, name="other")
    runs.add("krum", finished(MA=0.9), tracker={"name": "wandb"}, executor={"devices": 1})
    runs.add("krum", None, executor={"devices": 4})
    assert runs.rows() == [
        ["defense", "BA", "MA", "TPR", "TNR", "AUC", "seconds"],
        ["krum", "10.0", "90.0", "100.0", "50.0", "75.0", "7.4"],
    ]
    assert f"not counted: {old}: a newer run has the same settings and seed" in notes(
        read_runs([runs.top])
    )


def test_settings_that_change_results_start_a_new_row(runs: Runs) -> None:
    for precision in ("32-true", "bf16-mixed"):
        executor = {"name": "sequential", "precision": precision}
        runs.add("krum", finished(), executor=executor, dataset={"name": "x", "root": precision})
    assert [row[0] for row in runs.rows()] == ["executor.precision", "32-true", "bf16-mixed"]


def test_settings_are_the_keys_that_vary(runs: Runs) -> None:
    scale = {"name": "constrain_and_scale", "alpha": 0.5}
    runs.add("flame", finished(), pmr=0.5, lr=0.1)
    runs.add("krum", finished(), pmr=0.5, lr=0.1, attack=scale)
    runs.add("krum", finished(), pmr=0.25, lr=0.1, attack=scale)
    runs.add("flame", finished(), pmr=0.25, lr=0.1, attack=scale)
    # No column for lr, which is always 0.1, nor for alpha, which one attack has and never varies.
    assert [row[:3] for row in runs.rows()] == [
        ["attack", "pmr", "defense"],
        ["constrain_and_scale alpha=0.5", "0.25", "flame"],
        ["constrain_and_scale alpha=0.5", "0.25", "krum"],
        ["constrain_and_scale alpha=0.5", "0.5", "krum"],
        ["dba", "0.5", "flame"],
    ]
    runs.add("krum", finished(), pmr=0.5, lr=0.1, attack={**scale, "alpha": 0.9})
    assert [row[:4] for row in runs.rows()][-3:] == [
        ["constrain_and_scale", "0.5", "0.5", "krum"],
        ["constrain_and_scale", "0.9", "0.5", "krum"],
        ["dba", "-", "0.5", "flame"],
    ]
    assert runs.rows()[0][:4] == ["attack", "attack.alpha", "pmr", "defense"]


def test_settings_are_in_natural_order(runs: Runs) -> None:
    given: list[Any] = ["cnn10", 10, "cnn9", 9, "1e-3", None, [1, 2], True, "cnn09"]
    for value in given:
        runs.add("krum", finished(), option=value)
    shown = ["null", "1e-3", "true", "9", "10", "[1, 2]", "cnn09", "cnn9", "cnn10"]
    assert [row[0] for row in runs.rows()[1:]] == shown


def test_parameters_of_a_defense_start_new_rows(runs: Runs) -> None:
    for m in (10, 5):
        runs.add({"name": "krum", "m": m, "f": None}, finished())
    runs.add({"name": "flame", "epsilon": 3000}, finished())
    runs.add({"name": "krum", "m": 5, "f": 2}, finished())
    labels = [row[0] for row in runs.rows()[1:]]
    assert labels == ["krum m=5 f=null", "krum m=5 f=2", "krum m=10 f=null", "flame"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"status": "fini', "summary.json has no checksum"),
        ("[]", "summary.json has no checksum"),
        ('{"status": "running"}', "summary.json: status must be finished or failed"),
        ('{"status": "finished", "BA": 0.1}', "summary.json: no MA"),
        (json.dumps(finished(TNR="high")), "summary.json: TNR is 'high'"),
        ("[" * 100_000, "summary.json has no checksum"),
    ],
)
def test_a_damaged_summary_is_unreadable(runs: Runs, text: str, reason: str) -> None:
    folder = runs.add("krum", text)
    assert runs.rows()[1] == ["krum", "unreadable", "", "", "", "", ""]
    [note] = notes(read_runs([runs.top]))
    assert note.startswith(f"unreadable: {folder}: {reason}")


@pytest.mark.parametrize(
    "text", ["a: [", "", "- 1", "\x00", "day: 2024-99-99", "pmr: 0.2", "\ufeff"]
)
def test_a_damaged_config_is_unreadable(runs: Runs, text: str) -> None:
    runs.add("krum", finished(), pmr=0.2)
    runs.add("krum", finished(), pmr=0.3)
    (runs.add("flame", finished()) / "config.yaml").write_text(text)
    assert runs.rows()[-1][:3] == ["?", "run97", "unreadable"]
    (runs.top / "run97" / "config.yaml").write_bytes(b"\xff\xfe\xfa")
    assert runs.rows()[-1][:3] == ["?", "run97", "unreadable"]


def test_hidden_folders_and_folders_inside_a_run_are_not_runs(runs: Runs) -> None:
    run = runs.add("krum", finished())
    for folder in (run / "wandb" / "files", runs.top / ".cache", runs.top / "x" / ".hydra"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("a: 1")
        seal(folder)
    assert [found.folder for found in read_runs([runs.top])] == [run]
    # A run can be named itself; a run named twice counts once.
    assert [found.folder for found in read_runs([run, runs.top])] == [run]


def test_a_folder_without_runs_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in (
        (tmp_path / "none", "no folder "),
        (tmp_path / "file", "is not a folder"),
        (tmp_path, "no runs below"),
    ):
        with pytest.raises(UserError, match=message):
            read_runs([folder])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_table_matches_the_markdown(runs: Runs, width: int) -> None:
    runs.add({"name": "krum", "layers": "[bold]"}, finished(MA=0.8), seed=0)
    runs.add({"name": "krum", "layers": "[bold]"}, finished(MA=0.9), seed=1)
    runs.add({"name": "krum", "layers": "a|b"}, finished())
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(to_terminal(read_runs([runs.top]), width=width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    if width == 200:
        assert "krum layers=[bold]  10.0 ± 0.0  85.0 ± 7.1" in text
        assert "krum layers=a|b" in text
        assert "seeds 0, 1; BA" in text
    assert "krum layers=a\\|b" in to_markdown(read_runs([runs.top]))


def report(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    return subprocess.run(
        [sys.executable, "-m", "fedbench.report", *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, **environ},
        capture_output=True,
        encoding="utf-8",
    )


def test_command_line(runs: Runs) -> None:
    runs.add("krum", finished(rounds=0), seed=0)
    runs.add("krum", finished(rounds=0), seed=1)
    runs.add("flame", None)
    table = report(runs.top)
    assert table.returncode == 0
    assert "10.0 ± 0.0" in table.stdout
    assert "\x1b" not in table.stdout
    assert table.stderr == (f"unfinished: {runs.top}/run97\nreport: {runs.top}/report/index.html\n")
    only = ("--format", "none")
    markdown = report("--markdown", runs.top, *only, PYTHONIOENCODING="utf-8")
    assert markdown.stdout == to_markdown(read_runs([runs.top]))
    assert "10.0 ? 0.0" in report(runs.top, *only, PYTHONIOENCODING="ascii").stdout


def test_the_command_line_prints_a_user_error_in_one_line(tmp_path: Path) -> None:
    missing = report(tmp_path / "nowhere")
    assert missing.returncode == 2
    assert missing.stdout == ""
    assert missing.stderr == f"fedbench.report: no folder {tmp_path}/nowhere\n"
    assert report().returncode == 2


def test_report_starts_without_torch() -> None:
    code = (
        "import sys, fedbench.report.table; print(sorted({'torch', 'lightning'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_omniscient_attacks_are_marked(runs: Runs) -> None:
    for omniscient in (True, False):
        attack = {"name": "alie", "omniscient": omniscient}
        runs.add("krum", finished(BA=None), attack=attack)
    runs.add("krum", finished(), attack={"name": "dba"})
    assert [row[0] for row in runs.rows()] == ["attack", "alie", "alie (omniscient)", "dba"]


def test_the_caption_marks_omniscient_attacks(runs: Runs) -> None:
    runs.add("krum", finished(), attack={"name": "ipm", "omniscient": True})
    assert "attack ipm (omniscient), " in to_markdown(read_runs([runs.top]))


def test_columns_by_name(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    by_backdoor = {"0": 0.25, "1": 0.75}
    runs.add("krum", finished(norm_ratio=2.345, cosine=-0.5, BA_by_backdoor=by_backdoor))
    runs.add("median", finished())  # from an older version, without these metrics
    wanted = "BA,norm_ratio,cosine,BA/1"
    assert main([str(runs.top), "--markdown", "--columns", wanted]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| defense | BA | norm_ratio | cosine | BA/1 |"
    assert lines[2:4] == [
        "| krum | 10.0 | 2.35 | -0.50 | 75.0 |",
        "| median | 10.0 | - | - | - |",
    ]
    assert lines[-1].endswith("; BA, BA/1 in %")


def test_durability_by_name(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    after = {"BA_cumulative": 0.5, "lifespan_50": 2, "lifespan_10": 6, "rounds_after_attack": 6}
    runs.add("krum", finished(**after, BA=0.2))
    runs.add("krum", finished(**after | {"lifespan_10": 2}, BA=0.05), seed=1)
    runs.add("median", finished())  # from an older version, without these metrics
    wanted = "BA_cumulative,lifespan_50,lifespan_10,rounds_after_attack"
    assert main([str(runs.top), "--markdown", "--columns", wanted]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        "| krum | 50.0 ± 0.0 | 2.0 ± 0.0 | ≥ 4.0 ± 2.8 | 6.0 ± 0.0 | 2 |",
        "| median | - | - | - | - | 1 |",
    ]
    assert lines[-1].endswith(
        "; BA_cumulative in %; lifespan_50, lifespan_10, rounds_after_attack in rounds; "
        "mean ± sample standard deviation over seeds; ≥: a lower bound, as the run ended first"
    )


@pytest.mark.parametrize("format_", ["none", "markdown"])
def test_pairs_by_name(runs: Runs, format_: str, capsys: pytest.CaptureFixture[str]) -> None:
    benign = {"name": "none"}
    runs.add("fedavg", finished(MA=0.9), attack=benign)
    runs.add("krum", finished(MA=0.8))
    runs.add("krum", finished(MA=0.9004))
    runs.add("krum", finished(), seed=1)
    command = [str(runs.top), "--markdown", "--columns", "MA_lost,recovery", "--format", format_]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        "| dba | krum | 0.0 | - | 2 |",  # -0.04 points; seed 1 has no benign run
        "| none | fedavg | 0.0 | - | 1 |",
    ]
    assert "; MA_lost in points; recovery in rounds; mean" in lines[-1]


@pytest.mark.parametrize("key", ["BA_cumulative", "lifespan_50", "rounds_after_attack"])
def test_damaged_durability_makes_one_run_unreadable(runs: Runs, key: str) -> None:
    runs.add("krum", finished(**{key: "long"}))
    runs.add("median", finished(**{key: None}))
    found = read_runs([runs.top])
    assert [run.status for run in found] == ["unreadable", "finished"]
    assert found[0].reason == f"summary.json: {key} is 'long'"
    assert not found[0].censored


def test_a_caption_without_percentages_ends_with_the_seeds(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add("krum", finished(norm_ratio=2.0))
    assert main([str(runs.top), "--markdown", "--columns", "norm_ratio"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; seed 0")
    runs.add("krum", finished(norm_ratio=4.0), seed=1)
    assert main([str(runs.top), "--markdown", "--columns", "norm_ratio"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("; seeds 0, 1; mean ± sample standard deviation over seeds")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("BA,normratio", "no column 'normratio'; did you mean norm_ratio?"),
        ("MA_lots", "no column 'MA_lots'; did you mean MA_lost?"),
        ("BA/7", "no column 'BA/7'"),
        ("", "no column ''"),
    ],
)
def test_an_unknown_column_is_a_user_error(
    runs: Runs, columns: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add("krum", finished())
    assert main([str(runs.top), "--columns", columns]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"fedbench.report: --columns {columns}: {message}")


@pytest.mark.parametrize("broken", [5, [0.1], "a", {"0": "much"}])
def test_a_damaged_ba_by_backdoor_makes_one_run_unreadable(runs: Runs, broken: Any) -> None:
    runs.add("krum", finished(BA_by_backdoor=broken))
    runs.add("median", finished())
    assert [run.status for run in read_runs([runs.top])] == ["unreadable", "finished"]
