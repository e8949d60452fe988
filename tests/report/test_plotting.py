"""Shared figure setup: safe text, one style, quiet and atomic PNG files, a lazy import."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import pytest
from end_to_end import TIMEOUT, environment, files
from matplotlib.figure import Figure

from fedbench.errors import UserError
from fedbench.report.plotting import plot_style, printable, save_png

ROOT = Path(__file__).parents[2]
HOSTILE = ["a\nb", " ", "", "\ud83d", "\x00", "世界", "😀", "$x^2$", "$", "\\frac", "{%}", "‮abc"]
DRAW = """
from fedbench.report.plotting import plot_style, save_png
from pathlib import Path
with plot_style():
    from matplotlib.figure import Figure
    figure = Figure()
    figure.text(0, 0, "text")
save_png(figure, Path("a.png"))
"""


def page(*texts: str) -> Figure:
    with plot_style():
        figure = Figure((1, 1))
        for i, text in enumerate(texts):
            figure.text(0, i, printable(text))
    return figure


def python(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**environment(), **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def test_unprintable_names_are_escaped() -> None:
    assert printable("the", 9) == "the"
    assert printable("a\nb", 9) == r"'a\nb'"
    assert printable(" ", 9) == "' '"
    assert printable("", 9) == "''"
    assert printable("\ud83d", 9) == r"'\ud83d'"
    assert printable("naïve → …") == "naïve → …"


def test_long_names_are_cut() -> None:
    assert printable("0123456789", 10) == "0123456789"
    assert printable("0123456789a", 10) == "012345678…"
    assert printable("0123456789a") == "0123456789a"


def test_characters_that_the_font_lacks_are_escaped() -> None:
    assert printable("世a") == r"\u4e16a"
    assert printable("😀") == r"\U0001f600"


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_drawn_without_a_warning(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_png(page(name), tmp_path / "a.png")


def test_a_dollar_sign_is_no_formula(tmp_path: Path) -> None:
    """As a formula, `$x$` would be one italic letter; `$x` and `$\\frac$` would fail."""
    figure = page("$x$", "x", r"$\frac$")
    save_png(figure, tmp_path / "a.png")
    wide, narrow, _ = (text.get_window_extent().width for text in figure.texts)
    assert wide > 2.5 * narrow


def test_the_style_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 33)
    before, level = dict(matplotlib.rcParams), logging.getLogger("matplotlib").level
    save_png(page("text"), tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
    assert logging.getLogger("matplotlib").level == level


def test_the_same_figure_gives_the_same_bytes_whatever_the_user_s_style(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_png(page("text"), tmp_path / "a.png")
    for key, value in (("font.size", 33), ("text.usetex", True), ("savefig.facecolor", "red")):
        monkeypatch.setitem(matplotlib.rcParams, key, value)
    save_png(page("text"), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_file_is_written_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")

    def fail(figure: Figure, file: object, **options: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", fail)
        with pytest.raises(UserError, match="disk full"):
            save_png(page("text"), path)
    assert path.read_text() == "old"
    save_png(page("text"), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert files(tmp_path) == ["a.png"]


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, False])
def test_the_font_cache_makes_no_noise(writable: bool, tmp_path: Path) -> None:
    """On the first use, and where matplotlib cannot write its cache."""
    cache = tmp_path / "cache" if writable else Path(os.devnull) / "cache"
    done = python(DRAW, tmp_path, MPLCONFIGDIR=str(cache))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path: Path) -> None:
    names = "[name in sys.modules for name in ('matplotlib', 'matplotlib.pyplot')]"
    code = f"import sys, fedbench.single_run, fedbench.preview\nprint({names}){DRAW}print({names})"
    assert python(code, tmp_path).stdout == "[False, False]\n[True, False]\n"


def test_nothing_draws_with_pillow() -> None:
    sources = [*ROOT.glob("fedbench/**/*.py")]
    assert len(sources) > 20
    pattern = re.compile(r"^\s*(from|import) PIL\b", re.MULTILINE)
    found = [path.name for path in sources if pattern.search(path.read_text("utf-8"))]
    assert found == ["custom_readers.py"]  # reads folders of images
