"""All figures of a report: names, formats, atomic and repeatable files, real run folders."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from figure_data import STRANGE, report, rounds, run, verdicts
from handmade_runs import seal
from matplotlib.figure import Figure
from PIL import Image
from sweep_folders import add_sweep

from fedbench.errors import UserError
from fedbench.report import parallel
from fedbench.report.figures.draw_all import CAPTIONS_FILE, all_drawings, draw_figures
from fedbench.report.report_data import ReportData, read_report_data

ONE = verdicts([True, False, False], [0.9, 0.1, 0.2], [False, True, True])


def small(names: tuple[str, ...] = ("krum", "flame", "afa"), n: int = 2) -> ReportData:
    made = rounds([ONE], BA=[0.1], MA=[0.8], TPR=[1.0], TNR=[1.0])
    return report(
        *(
            run(name, seed, made, BA=0.1 * i, MA=0.8, TPR=1.0, TNR=0.9, settings={"attack": a})
            for i, name in enumerate(names)
            for a in ("dba", "edge")[:n]
            for seed in (0, 1)
        )
    )


def test_every_figure_is_written_in_every_format(tmp_path: Path) -> None:
    paths = draw_figures(small(), tmp_path / "figures")
    assert all(path.is_file() for path in paths)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {path.name for path in paths}
    stems = {path.stem for path in paths if path.suffix == ".png"}
    expected = {"heatmap", "ba_ma", "roc", "cost", "worst_case", "effect_of_attack"}
    expected |= {f"heatmap_{metric}" for metric in ("BA", "MA", "TPR", "TNR")}
    expected |= {"rounds_dba", "rounds_edge", "critical_difference_BA", "critical_difference_MA"}
    expected |= {
        f"{kind}_{name}" for kind in ("clients", "scores") for name in ("krum", "flame", "afa")
    }
    assert stems == expected
    for suffix, start in ((".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG")):
        found = [path for path in paths if path.suffix == suffix]
        assert {path.stem for path in found} == stems
        assert all(path.read_bytes().startswith(start) for path in found)
    for path in (path for path in paths if path.suffix == ".png"):
        with Image.open(path) as image:  # at most as wide as both columns
            assert image.width <= 7.16 * 300 + 1, path
            assert image.info["dpi"][0] == pytest.approx(200, abs=1)
    captions = (tmp_path / "figures" / CAPTIONS_FILE).read_text("utf-8")
    assert {line.partition(":")[0] for line in captions.splitlines() if line} == stems


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (draw_figures(small(("krum",), 1), tmp_path / name) for name in ("a", "b"))
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name


def test_fonts_in_pdf_files_are_true_type_and_text_in_svg_files_is_outlines(tmp_path: Path) -> None:
    draw_figures(small(("krum",), 1), tmp_path, formats=("svg", "pdf"))
    pdf, svg = (tmp_path / "ba_ma.pdf").read_bytes(), (tmp_path / "ba_ma.svg").read_text()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"/CreationDate" not in pdf
    assert "<text" not in svg
    assert "<dc:date>" not in svg


def test_files_are_whole_or_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_n_cores", lambda: 1)
    (tmp_path / "ba_ma.png").write_text("old")

    def fail(figure: Figure, file: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(UserError, match="disk full"):
        draw_figures(small(n=1), tmp_path, formats=("png",))
    assert (tmp_path / "ba_ma.png").read_text() == "old"


def test_processes_draw_what_one_process_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    monkeypatch.setattr(parallel, "_n_cores", lambda: 2)
    draw_figures(small(n=1), several, formats=("svg",))
    monkeypatch.setattr(parallel, "_n_cores", lambda: 1)
    draw_figures(small(n=1), alone, formats=("svg",))
    assert multiprocessing.active_children() == []
    assert sorted(p.name for p in several.iterdir()) == sorted(p.name for p in alone.iterdir())
    for path in alone.iterdir():
        assert (several / path.name).read_bytes() == path.read_bytes()


def test_files_have_different_names_whatever_the_defenses_are_called() -> None:
    data = small(("a b", "a_b", "A B", *STRANGE), n=1)
    names = [drawing.name.lower() for drawing in all_drawings(data)]
    assert len({*names}) == len(names)
    assert {"clients_a_b", "clients_a_b_2", "clients_a_b_3"} <= {*names}
    assert all(name.isascii() and not set(name) & set("/\\<>:\"'|?*$ ") for name in names)


def test_strange_names_are_drawn(tmp_path: Path) -> None:
    data = small(("$x^2$", "世界😀", "W" * 70), n=2)
    paths = draw_figures(data, tmp_path, formats=("pdf",))
    assert len(paths) > 15


def test_an_empty_report_has_no_figures(tmp_path: Path) -> None:
    failed = report(run("krum", status="failed"), run("flame", status="unfinished"))
    for data in (report(), failed):
        assert [path.name for path in draw_figures(data, tmp_path)] == [CAPTIONS_FILE]


def test_real_folders_of_a_partial_sweep(tmp_path: Path) -> None:
    """One run failed, one has a torn last line, one has no rounds, one is not readable."""
    folders = add_sweep(tmp_path / "runs", "defense=krum,median", "pmr=0.1,0.3", "seed=0,1")
    client = {"id": 0, "malicious": True, "accepted": False, "score": 1.0}
    record = {"round": 0, "attacked": True, "MA": 0.8, "BA": 0.1, "TPR": 1.0, "TNR": None}
    record |= {"AUC": None, "seconds": {"train": 1.0, "aggregate": 0.1}, "clients": [client]}
    for folder in folders[:-1]:
        (folder / "rounds.jsonl").write_text(json.dumps(record) + "\n")
        seal(folder)
    with (folders[1] / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1, "att')
    (folders[0] / "summary.json").write_text(json.dumps({"status": "failed", "error": "x"}))
    seal(folders[0])
    (folders[2] / "config.yaml").write_text("{")
    data = read_report_data([tmp_path / "runs"])
    paths = draw_figures(data, tmp_path / "figures", ("pmr", "defense"), ("png",))
    stems = {path.stem for path in paths}
    assert {"heatmap_BA", "ba_ma", "rounds_pmr_0.1", "effect_of_pmr", "cost"} <= stems
