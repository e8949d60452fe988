"""docs/tutorial.md and docs/sweep-to-figure.md work as written; the menu lists every page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end import ROOT, fedbench_in_this_process, run_folders
from handmade_runs import seal
from pages import commands, run, write_titled_blocks

from fedbench.preview import main as preview
from fedbench.report.__main__ import main as report

DOCS = ROOT / "docs"
TUTORIAL, FIGURE = DOCS / "tutorial.md", DOCS / "sweep-to-figure.md"
SMALL = ("n_clients=4", "pretrain_rounds=0", "local_epochs=1", "hydra/launcher=basic")
GENERATED = {"contributing.md", "changelog.md"}  # by .ci/mkdocs_hooks.py


def pages_of(nav: Sequence[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from pages_of(target)


def test_the_menu_lists_every_page_once() -> None:
    listed = sorted(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == sorted(pages | GENERATED)


def test_the_home_page_links_to_every_page() -> None:
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert links == {path.name for path in DOCS.glob("*.md")} - {"index.md"}


def start(command: str, folder: Path, *extra: str) -> list[str]:
    """Run a documented run or sweep with settings for a short run; return its output."""
    words = shlex.split(command, comments=True)[2:]
    ended = fedbench_in_this_process(*words, *SMALL, *extra, cwd=folder)
    assert (ended.code, ended.err) == (0, []), ended
    return ended.out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    return tmp_path


@pytest.mark.slow
def test_tutorial(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command, in the order of the page."""
    assert write_titled_blocks(TUTORIAL, folder) == ["verdicts.py"]
    first, sweep, again, drawing, attacks, seeds, markdown, long = commands(TUTORIAL)

    eight = "rounds=8"  # the script shows the eighth
    assert "finished in" in start(first, folder, eight)[-1]
    assert "already finished, skipped" in start(first, folder, eight)[-1]
    lines = start(sweep, folder, eight)
    assert "1 of 4 runs already finished" in lines
    defenses = ["fedavg", "krum", "flame", "baybfed"]
    assert [line.split()[0] for line in lines if re.match(r" \w+ +\d", line)] == defenses
    assert report(shlex.split(again)[2:]) == 0
    assert "baybfed" in capsys.readouterr().out

    verdicts = run("verdicts.py", folder)
    assert (verdicts.returncode, verdicts.stderr) == (0, "")
    heading, *clients = verdicts.stdout.splitlines()
    assert heading.split()[:3] == ["client", "malicious", "accepted"]
    assert len(clients) == 4

    assert preview(shlex.split(drawing)[2:]) == 0
    assert (folder / "dba.png").read_bytes().startswith(b"\x89PNG")
    start(attacks, folder, "rounds=1")
    assert len(run_folders(folder / "runs")) == 4 + 8
    assert " ± " in "".join(start(seeds, folder, "rounds=1"))
    capsys.readouterr()
    assert report(shlex.split(markdown)[2:]) == 0
    assert capsys.readouterr().out.startswith("| defense | BA |")
    assert "finished in" in start(long, folder, "rounds=2")[-1]


@pytest.mark.slow
def test_sweep_to_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep with fewer values, then the table, the DataFrame and the figure."""
    sweep_file, look, figure = write_titled_blocks(FIGURE, folder)
    params = yaml.safe_load(Path(sweep_file).read_text())["hydra"]["sweeper"]["params"]
    counts = [len(str(values).split(",")) for values in params.values()]
    text = " ".join(FIGURE.read_text().split())
    assert f"{' x '.join(map(str, counts))} = {counts[0] * counts[1] * counts[2]} runs" in text

    sweep, table = commands(FIGURE)
    start(sweep, folder, "pmr=0.5", "seed=0,1", "rounds=1")
    assert report(shlex.split(table)[2:]) == 0
    assert capsys.readouterr().out.count("| 2 |") == 3  # two seeds in each row
    looked = run(look, folder)
    assert (looked.returncode, looked.stderr) == (0, "")
    assert "baybfed" in looked.stdout
    drawn = run(figure, folder)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert Path("figures/ba_by_pmr.pdf").read_bytes().startswith(b"%PDF")
    assert Path("figures/ba_by_pmr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_figure_needs_all_runs(folder: Path) -> None:
    """An unfinished run stops the script, which names its folder."""
    *_, figure = write_titled_blocks(FIGURE, folder)
    unfinished = folder / "runs" / "ba_by_pmr" / "flame-1"
    unfinished.mkdir(parents=True)
    (unfinished / "config.yaml").write_text("defense: {name: flame}\npmr: 0.5\nseed: 0\n")
    seal(unfinished)
    drawn = run(figure, folder)
    assert drawn.returncode == 1
    assert "flame-1 unfinished" in " ".join(drawn.stderr.split())
