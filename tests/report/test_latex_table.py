"""The table for papers in LaTeX: its cells by hand, its looks with a real TeX."""

from __future__ import annotations

import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import a_run, data_of, with_seeds
from hypothesis import example, given
from hypothesis import strategies as st

from fedbench.report.latex_table import MAX_LINES, to_latex, to_latex_document
from fedbench.report.latex_text import comment, escape
from fedbench.report.report_data import ReportData
from fedbench.results.run_reader import RunResult

PRINTABLE = "".join(map(chr, range(32, 127)))
WEIRD = r"a_b%c&d#e$f{g}~h^i\j <b>|`x`--'---\"é,,*[0] 中 λ"
LONG = "my_long_defense_name_without_any_space epsilon=3000 noise=0.001 clip=median"
needs_tex = pytest.mark.skipif(
    shutil.which("pdflatex") is None,
    reason="no pdflatex: Debian has it in texlive-latex-recommended and texlive-science",
)


def body(text: str) -> list[str]:
    """Return the rows of the tabular, spaces removed, without headings."""
    rows = re.findall(r"^(?!\\(?:multicolumn|cmidrule))(\S.*&.*)\\\\$", text, re.MULTILINE)
    return [row.replace(" ", "") for row in rows if "arrow" not in row]


def test_one_seed_has_bold_values_and_no_intervals() -> None:
    runs = [a_run("krum", BA=0.104, MA=0.8), a_run("flame", BA=0.05, MA=0.8, TPR=1, TNR=0.5)]
    text = to_latex(data_of([*runs, a_run("fedavg", status="failed", reason="x\n\\end{table}")]))
    assert body(text) == [
        r"krum&\num{10.4}&\textbf{\num{80.0}}&\multicolumn{1}{c}{--}&\multicolumn{1}{c}{--}",
        r"flame&\textbf{\num{5.0}}&\textbf{\num{80.0}}&\num{100.0}&\num{50.0}",
        "fedavg" + r"&\multicolumn{1}{c}{--}" * 4,
    ]
    assert "no intervals and no ties" in text
    assert r"\pm" not in text
    assert "nderline" not in text
    assert r"\begin{tabular}{@{}lrrrr@{}}" in text
    assert re.search(r"^% Left out: failed: runs/demo/\w+: x \\end\{table\}$", text, re.MULTILINE)


def test_intervals_ties_and_notes() -> None:
    # BA of krum: 10, 12: mean 11, sd 1.414, half-width 12.706 * 1.414 / 1.414 = 12.7; cut below.
    # flame: 20, 20: 20 +- 0, within [0, 23.7]. median: 0, 90: mean 45, [0, 100], split 1 of 2.
    # bulyan: one seed. afa: 40, 40: not within [0, 23.7].
    runs = [
        *with_seeds("krum", [0.10, 0.12]),
        *with_seeds("flame", [0.20, 0.20]),
        *with_seeds("median", [0.0, 0.90]),
        *with_seeds("bulyan", [0.30]),
        *with_seeds("afa", [0.40, 0.40]),
    ]
    text = to_latex(data_of(runs), ["BA"])
    assert (
        body(text)[1:]
        == [
            r"krum&\textbf{\num{11.0}}&\num{12.7}&",
            r"flame&\underline{\num{20.0}}&\num{0.0}&",
            r"median&\underline{\num{45.0}}&\num{55.0}&\textsuperscript{\dag1/2}",
            r"bulyan&\multicolumn{1}{r@{\phantom{\,$\pm$\,}}}{\num{30.0}}&&\textsuperscript{\ddag1}",
            r"afa&\num{40.0}&\num{0.0}&",
        ][1:]
        or body(text) == []
    )
    assert r"krum & \textbf{\num{11.0}} & \num{12.7} & " in text
    assert r"\begin{tabular}{@{}lr@{\,$\pm$\,}r@{}l@{}}" in text
    assert r"BA is above 50\,\% in $k$ of $n$ seeds; the mean describes none of them." in text
    assert "From $n$ seeds only, others from 2." in text
    assert r"Mean $\pm$ half-width of the 95\,\% t-interval over seeds 0 and 1." in text
    assert "Underlined: the" in text


def test_lower_bounds_and_units() -> None:
    # lifespan_50 of krum: at least 8 and 4 rounds; mean 6, half-width 12.706 * 2 = 25.4.
    runs = [
        a_run("krum", 0, MA_lost=-0.015, lifespan_50=8, censored=["lifespan_50"]),
        a_run("krum", 1, MA_lost=-0.015, lifespan_50=4),
        *(a_run("flame", seed, MA_lost=0.02, lifespan_50=0) for seed in (0, 1)),
    ]
    data = data_of(runs, ["BA", "MA_lost", "lifespan_50"])
    text = to_latex(data, ["BA", "MA_lost", "lifespan_50"])
    assert r"\textbf{\num{-1.5}} & \num{0.0} & $\geq$\,\underline{\num{6.0}} & \num{25.4}" in text
    assert r"\num{2.0} & \num{0.0} & \textbf{\num{0.0}} & \num{0.0}" in text
    assert (
        r"Backdoor accuracy (BA) in \%, points of MA lost against the benign run of the same seed "
        r"(MA\_lost), rounds from the attack's end until BA is below 50\,\% (lifespan\_50). "
    ) in text
    assert r"$\geq$: a lower bound, as the run ended first." in text
    assert r"MA\_lost\,$\downarrow$" in text
    assert r"$\geq$" not in to_latex(data, ["BA"])


def test_a_table_without_notes_has_no_footnotes() -> None:
    text = to_latex(data_of([*with_seeds("krum", [0.1, 0.2]), *with_seeds("flame", [0.9, 0.8])]))
    assert "dag" not in text
    assert "footnotesize" not in text


def test_the_caption_tells_shared_settings_in_words() -> None:
    text = to_latex(data_of([a_run("krum", n_clients=[40, 90], lr="5%")], ["BA"]), ["BA"])
    (caption,) = re.findall(r"\\caption\{(.*)\}$", text, re.MULTILINE)
    assert caption.startswith(
        r"Backdoor accuracy (BA) in \%. Defense krum, data set mnist, model cnn, attack dba, "
        "share of malicious clients 0.2, 40 to 90 clients per round, 10 rounds"
    )
    assert "Seed 0; one run per value" in caption
    assert r"\label{tab:demo}" in text


def test_sections_and_headings_of_several_columns() -> None:
    runs = [
        a_run(name, attack=attack, pmr=pmr)
        for name in ("krum", "flame")
        for attack in ("dba", "edge_case")
        for pmr in (0.2, 0.3)
    ]
    text = to_latex(data_of(runs), ["BA", "MA"])
    assert r" & \multicolumn{2}{c}{dba} & \multicolumn{2}{c}{edge\_case} \\" in text
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}" in text
    assert re.findall(r"\\multicolumn\{5\}\{@\{\}l\}\{\\textit\{(.*)\}\}", text) == [
        "pmr 0.2",
        "pmr 0.3",
    ]
    assert text.count(r"\midrule") == 2


def test_long_tables_become_several_and_wide_ones_are_stacked() -> None:
    many = [a_run(f"defense{i}", pmr=pmr) for i in range(30) for pmr in (0.2, 0.3, 0.4)]
    text = to_latex(data_of(many), by=["defense", "pmr"])
    assert text.count(r"\begin{table*}") == 1
    long = [a_run(f"defense{i}", BA=i / 100) for i in range(MAX_LINES + 5)]
    parts = to_latex(data_of(long))
    assert parts.count(r"\begin{table}") == 2
    assert "Part 2 of 2." in parts
    assert r"\label{tab:demo-2}" in parts
    assert len(body(parts)) == MAX_LINES + 5
    assert parts.count(r"\textbf{\num{0.0}}") == 1  # bold compares all parts
    attacks = [a_run("krum", attack=f"attack{i}") for i in range(12)]
    wide = to_latex(data_of(attacks), ["BA", "MA", "TPR"])
    assert wide.count(r"\begin{table*}") == 1
    assert wide.count(r"\begin{tabular}") > 1
    assert [wide.count(f"{{attack{i}}}") for i in range(12)] == [1] * 12


def test_sections_stay_on_one_page() -> None:
    settings = [{"attack": name, "pmr": pmr} for name in ("dba", "alie") for pmr in (0.2, 0.3, 0.4)]
    runs = [a_run(f"defense{i}", **setting) for i in range(20) for setting in settings]
    pages = to_latex(data_of(runs)).split(r"\end{table*}")[:-1]
    headings = [re.findall(r"\\textit\{(.*?)\}", page) for page in pages]
    assert headings == [["pmr 0.2", "pmr 0.3"], ["pmr 0.4"]]
    assert [len(body(page)) for page in pages] == [40, 20]


@pytest.mark.parametrize(
    ("seeds", "listed"),
    [([0], "Seed 0;"), ([4, 5, 6], "over seeds 4 to 6."), ([0, 2, 3], "over seeds 0, 2 and 3.")],
)
def test_the_caption_names_the_seeds(seeds: list[int], listed: str) -> None:
    assert listed in to_latex(data_of([a_run("krum", seed) for seed in seeds]))
    assert "over seeds a, b and c." in to_latex(data_of([a_run("krum", s) for s in "abc"]))


TOKEN = re.compile(
    r"\\(?:[&%$#_{}]|[`'^~=.\"uvrHc]\{[A-Za-z]\}|[A-Za-z]+\{\})|\$\\[A-Za-z]+\$|\{[\[*]\}|\{\}"
    r"|[^\\&%$#_{}~^<>|`\"*\[\n\x00-\x1f\x7f-\U0010ffff]"
)


@given(st.text() | st.text(st.sampled_from(WEIRD)))
@example(WEIRD)
@example("---,,,--")
@example("\x00\n\t\x7f")
def test_escaped_text_has_nothing_special(text: str) -> None:
    escaped = escape(text)
    assert re.fullmatch(f"(?:{TOKEN.pattern})*", escaped), escaped
    assert not re.search(r"--|,,|\A\[|\A\*", escaped)


@given(st.text())
def test_a_comment_stays_in_its_line(text: str) -> None:
    assert len(comment(text).splitlines()) == 1


def compiled(text: str, folder: Path) -> tuple[str, str]:
    """Compile a document; return the log and the text of the pages."""
    (folder / "table.tex").write_text(text, encoding="utf-8")
    for _ in range(2):  # for \label
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
            cwd=folder,
            capture_output=True,
        )
    log = (folder / "table.log").read_text("utf-8", "replace")
    assert done.returncode == 0, log[-2000:]
    if shutil.which("pdftotext") is None:
        return log, ""
    subprocess.run(["pdftotext", "-layout", "table.pdf"], cwd=folder, check=True)
    return log, (folder / "table.txt").read_text("utf-8")


def several(defenses: Sequence[str], n_seeds: int, **swept: Sequence[Any]) -> ReportData:
    """Return runs of all combinations, with numbers of all lengths."""
    settings: list[dict[str, Any]] = [{}]
    for key, values in swept.items():
        settings = [{**setting, key: value} for setting in settings for value in values]
    runs = []
    for number, setting in enumerate(settings):
        for place, name in enumerate(defenses):
            for seed in range(n_seeds):
                ba = (0.0, 0.013, 0.5, 1.0)[(number + place + seed * (place % 3)) % 4]
                rates = {} if place % 4 == 1 else {"TPR": 1 - ba / 3, "TNR": 0.9 - seed / 50}
                runs.append(a_run(name, seed, BA=ba, MA=0.8 + seed / 100, **rates, **setting))
    return data_of(runs)


DEFENSES = ["fedavg", "krum", "median", "flame", "baybfed"]
ATTACKS = ["dba", "constrain_and_scale", "alie", "none"]
SHAPES: dict[str, tuple[Callable[[], ReportData], dict[str, Any]]] = {
    "one seed": (lambda: several(DEFENSES, 1), {}),
    "six seeds": (lambda: several(DEFENSES, 6), {}),
    "sections": (lambda: several(DEFENSES, 3, attack=ATTACKS[:3], pmr=[0.2, 0.3, 0.5]), {}),
    "weird names": (lambda: several([WEIRD, LONG, "näïve Ł ß", "[0]", "*"], 2), {}),
    "25 defenses": (lambda: several([f"defense{i}" for i in range(25)], 6, attack=ATTACKS), {}),
    "defenses as columns": (
        lambda: several(DEFENSES, 3, attack=ATTACKS),
        {"metrics": ["BA"], "by": ["attack", "defense"]},
    ),
    "all metrics": (
        lambda: several(DEFENSES, 3),
        {"metrics": ["BA", "MA", "TPR", "TNR", "AUC", "seconds", "norm_ratio", "cosine"]},
    ),
    "lower bounds": (
        lambda: data_of(
            [
                a_run(name, seed, lifespan_50=1000, MA_lost=-0.5, censored=["lifespan_50"])
                for name in DEFENSES
                for seed in range(3)
            ]
        ),
        {"metrics": ["lifespan_50", "MA_lost"]},
    ),
    "nothing readable": (
        lambda: data_of([RunResult(Path("runs/x"), "unreadable", {}, {}, "not YAML")]),
        {},
    ),
    "nothing finished": (lambda: data_of([a_run("krum", status="running")]), {}),
}


@needs_tex
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_documents_compile(shape: str, tmp_path: Path) -> None:
    make, options = SHAPES[shape]
    log, text = compiled(to_latex_document(make(), **options), tmp_path)
    assert "LaTeX Warning" not in log
    assert "Overfull" not in log
    assert "Float too large" not in log
    if text:
        assert "Table 1:" in text


@needs_tex
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no pdftotext (poppler-utils)")
def test_tex_prints_what_was_escaped(tmp_path: Path) -> None:
    lines = [*re.findall(r"\S{1,12}", PRINTABLE), "x--y---z", "?`!`,,", "éüçñÅøßŁ", "αΩ±×"]
    text = "\n\n".join(escape(line) for line in lines)
    document = "\\documentclass{article}\n\\begin{document}\n" + text + "\n\\end{document}\n"
    _, found = compiled(document, tmp_path)
    printed = unicodedata.normalize("NFC", re.sub(r"\s", "", found))
    # In TeX's fonts, " is curly, ^ and ~ are accents, _ is a rule, and Ł is an L with a stroke.
    same = {'"': "”", "^": "ˆ", "~": "˜", "_": "", "Ł": "L"}
    for line in lines:
        pattern = "".join(same.get(character, re.escape(character)) for character in line)
        assert re.search(pattern, printed), (line, printed)
