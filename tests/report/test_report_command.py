"""`python -m fedbench.report`: its options, its files, and how it follows a sweep."""

from __future__ import annotations

import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
from handmade_runs import seal
from report_folders import add_runs

from fedbench.report import report_watch
from fedbench.report.__main__ import main
from fedbench.results.planned_runs import write_planned_runs


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two defenses, two attacks, two seeds; composing them takes seconds."""
    top = tmp_path_factory.mktemp("composed")
    add_runs(top, "defense=krum,flame", "attack=dba,edge_case", "seed=0,1", n_rounds=2)
    return top


@pytest.fixture
def runs(composed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The composed runs in runs/demo of the working folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(composed, "runs/demo"))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_writes_every_format_beside_the_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs)]) == 0
    printed = capsys.readouterr()
    assert " BA " in printed.out
    assert printed.err == "report: runs/demo/report/index.html\n"
    written = files(runs / "report")
    tables = {"table.tex", "table_standalone.tex", "table.md", "table.csv", "runs.csv"}
    assert {"index.html", *tables} <= written
    for kind in ("svg", "pdf", "png"):
        assert {f"figures/heatmap_BA.{kind}", f"figures/ba_ma.{kind}"} <= written
    assert not [name for name in written if name.rpartition("/")[2].startswith(".")]
    assert main([str(runs)]) == 0  # the report is no run
    assert files(runs / "report") == written


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ("csv", {"runs.csv", "table.csv"}),
        ("latex,markdown", {"table.tex", "table_standalone.tex", "table.md"}),
        ("html", {"index.html"}),
        ("none", None),
    ],
)
def test_formats(runs: Path, formats: str, expected: set[str] | None) -> None:
    assert main([str(runs), "--format", formats]) == 0
    assert (runs / "report").exists() == (expected is not None)
    assert files(runs / "report") == (expected or set())


def test_columns_and_by_reach_the_tables(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--columns", "MA,norm_ratio", "--by", "attack,defense", "--format", "latex,csv"]
    assert main([str(runs), *options, "--to", "elsewhere"]) == 0
    assert not (runs / "report").exists()
    assert capsys.readouterr().out.split()[:5] == ["attack", "defense", "MA", "norm_ratio", "seeds"]
    table = Path("elsewhere/table.tex").read_text()
    assert "MA" in table
    assert "TPR" not in table
    assert "norm_ratio_mean" in Path("elsewhere/table.csv").read_text().partition("\n")[0]


@pytest.mark.parametrize(
    ("by", "rows", "columns"), [("attack", "defense", "attack"), ("defense", "attack", "defense")]
)
def test_columns_alone_are_enough(runs: Path, by: str, rows: str, columns: str) -> None:
    assert main([str(runs), "--by", by, "--format", "html"]) == 0
    page = (runs / "report" / "index.html").read_text()
    assert f'"by":{{"rows":"{rows}","columns":"{columns}"}}' in page


def test_by_needs_two_settings(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(sorted(runs.glob("run*"))[0])
    assert main([one, "--by", "defense"]) == 2
    assert "--by defense: must be COLUMNS or ROWS,COLUMNS" in capsys.readouterr().err


def test_markdown_is_printed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--markdown", "--format", "none"]) == 0
    assert capsys.readouterr().out.startswith("| attack | defense | BA |")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--format", "htm"], "--format htm: no format 'htm'; did you mean html? (known: "),
        (["--format", ""], "--format : no format ''"),
        (["--columns", "BA,XX"], "--columns BA,XX: no column 'XX' (known: "),
        (["--by", "pmr"], "--by pmr: 'pmr' is not swept (known: attack, defense)"),
        (["--by", "attack,attack"], "--by attack,attack: must be COLUMNS or ROWS,COLUMNS"),
        (["--by", "attack,defense,attack"], "must be COLUMNS or ROWS,COLUMNS"),
        (["--watch", "0"], "--watch 0: must be at least 1 second"),
        (["--to", "occupied"], "cannot write to occupied: "),
        (["--to", "occupied/below"], "cannot write to occupied/below: "),
    ],
)
def test_mistakes_are_one_line(
    runs: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("occupied").write_text("a file")
    assert main([str(runs), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedbench.report: ")
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_no_runs(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / folder / "report").exists()


def test_several_folders_have_one_report(runs: Path) -> None:
    add_runs(Path("runs/other"), "defense=median", "attack=dba", "seed=0")
    assert main([str(runs), "runs/other", "--format", "csv"]) == 0
    assert ",median," in (runs / "report" / "runs.csv").read_text()
    assert not Path("runs/other/report").exists()


def test_open_shows_the_page(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main([str(runs), "--format", "html", "--open"]) == 0
    assert opened == [(runs / "report" / "index.html").resolve().as_uri()]


def test_missing_runs_are_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, unfinished = sorted(runs.glob("run*"))[:2]
    (failed / "summary.json").write_text('{"status": "failed", "error": "boom"}')
    seal(failed)
    (unfinished / "summary.json").unlink()
    write_planned_runs(runs, {"krum-0": "defense=krum seed=7"})
    assert main([str(runs), "--format", "html,markdown"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"failed: {failed}: boom"
    assert lines[1] == f"unfinished: {unfinished}"
    assert lines[2].startswith("not started: defense=krum seed=7")
    for name in ("index.html", "table.md"):
        text = (runs / "report" / name).read_text()
        assert "boom" in text
        assert "defense=krum seed=7" in text


def test_watch_writes_the_page_until_runs_end(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sorted(runs.glob("run*"))[0]
    summary = (first / "summary.json").read_text()
    (first / "summary.json").unlink()
    pages: list[str] = []

    def is_locked(folder: Path) -> bool:
        """The run is in progress; it ends after it was seen twice."""
        page = runs / "report" / "index.html"
        pages.append(page.read_text() if page.exists() else "")
        if len(pages) == 2:
            (first / "summary.json").write_text(summary)
            seal(first)
        return True

    monkeypatch.setattr("fedbench.results.run_reader._is_locked", is_locked)
    assert main([str(runs), "--watch", "1", "--format", "html"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "7 finished, 1 running; runs/demo/report/index.html"
    assert lines[-2:] == [
        "8 finished; runs/demo/report/index.html",
        "report: runs/demo/report/index.html",
    ]
    reloads = '<meta http-equiv="refresh" content="1">'
    assert reloads in pages[1]
    assert reloads not in (runs / "report" / "index.html").read_text()  # the last one stays


def test_watch_ends_if_a_sweep_was_stopped(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_watch, "PATIENCE", 1.5)
    write_planned_runs(runs, {"krum-0": "defense=krum seed=7"})
    assert main([str(runs), "--watch", "1", "--format", "html"]) == 0
    assert "8 finished, 1 not started; runs/demo" in capsys.readouterr().err


def test_needs_no_torch(runs: Path) -> None:
    """The report starts fast, also on a machine without a working torch."""
    code = (
        "import sys; from fedbench.report.__main__ import main; "
        f"code = main([{str(runs)!r}]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
