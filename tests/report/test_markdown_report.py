"""The tables of a report as markdown, read back by a markdown parser."""

from __future__ import annotations

from handmade_runs import a_run, data_of, with_seeds
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fedbench.report.markdown_report import escape, to_markdown_report
from fedbench.report.table import to_markdown


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of all tables, as plain text."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and found and found[-1]:
            found[-1][-1].append("".join(child.content for child in token.children or []))
    return found


def shown(text: str) -> str:
    """Return the text with the characters that a line can show."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@given(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from("ab_*|\\`<>&;~[]()!$#-+.= \n"))
)
@example("a|b\\|c `x` <b> &amp; **x** _x_ a_b ~~y~~ [l](u) ![i](u) $m$ \n\r\t\x00 <ins>")
@example("_a_b_")
@example("\\")
def test_a_cell_shows_any_text(text: str) -> None:
    _, row = tables(f"| a | b |\n| --- | ---: |\n| {escape(text)} | 1 |\n")[0]
    assert row == [shown(text), "1"]
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(f"x {escape(text)}")
    kinds = {child.type for token in parsed for child in token.children or []}
    assert kinds <= {"text", "text_special"}


def test_the_long_table_comes_first() -> None:
    data = data_of([*with_seeds("krum", [0.1, 0.2]), a_run("flame", BA=0.4)])
    assert to_markdown_report(data).startswith(f"# Results\n\n{to_markdown(data.runs)}")


def test_sections_with_intervals_and_marks() -> None:
    # krum 10 and 12: 11 [0, 23.7]; flame 20 and 20; median 0 and 90: split. One seed of afa.
    runs = [
        *with_seeds("krum", [0.10, 0.12], attack="dba", pmr=0.3),
        *with_seeds("flame", [0.20, 0.20], attack="dba", pmr=0.3),
        *with_seeds("median", [0.0, 0.90], attack="dba", pmr=0.3),
        *with_seeds("afa", [0.4], attack="dba", pmr=0.3),
        a_run("krum", status="failed", attack="alie", pmr=0.3),
        a_run("krum", BA=0.4, attack="alie", pmr=0.2),
    ]
    text = to_markdown_report(data_of(runs), ["BA", "MA"])
    assert "\n## By defense and attack\n\n### pmr 0.2\n" in text
    lines = text.partition("### pmr 0.3\n\n")[2].splitlines()
    assert lines[:6] == [
        "| defense | alie BA | alie MA | dba BA | dba MA |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| krum | failed | - | **11.0** [0.0, 23.7] | **80.0** [80.0, 80.0] |",
        "| flame | - | - | <ins>20.0</ins> [20.0, 20.0] | **80.0** [80.0, 80.0] |",
        "| median | - | - | <ins>45.0</ins> [0.0, 100.0] †1/2 | **80.0** [80.0, 80.0] |",
        "| afa | - | - | 40.0 (1 of 2 seeds) | **80.0** (1 of 2 seeds) |",
    ]
    assert "BA is above 50 % in k of n seeds" in text


def test_every_seed_and_the_worst() -> None:
    runs = [*with_seeds("krum", [0.1, 0.3, 0.2], cosine=0.5), a_run("flame", 1, BA=0.5, TPR=1.0)]
    text = to_markdown_report(data_of(runs), ["BA", "TPR", "cosine"])
    assert tables(text)[-1] == [
        ["defense", "metric", "seed 0", "seed 1", "seed 2", "worst seed"],
        ["krum", "BA", "10.0", "30.0", "20.0", "30.0 (seed 1)"],
        ["krum", "cosine", "0.50", "0.50", "0.50", "-"],
        ["flame", "BA", "-", "50.0", "-", "50.0 (seed 1)"],
        ["flame", "TPR", "-", "100.0", "-", "100.0 (seed 1)"],
    ]


def test_lower_bounds_are_marked() -> None:
    # krum: at least 8 and 4 rounds, so a mean of at least 6; interval 6 -+ 12.706 * 2, cut at 0
    runs = [
        a_run("krum", 0, recovery=8, MA_lost=0.02, censored=["recovery"]),
        a_run("krum", 1, recovery=4, MA_lost=0.02),
        a_run("flame", 0, recovery=0, MA_lost=-0.01),
    ]
    text = to_markdown_report(data_of(runs, ["MA_lost", "recovery"]), ["MA_lost", "recovery"])
    long, by_defense, seeds = tables(text)
    assert [line[:4] for line in long[1:3]] == [
        ["krum", "2.0 ± 0.0", "≥ 6.0 ± 2.8", "2"],
        ["flame", "-1.0", "0.0", "1"],
    ]
    assert by_defense[1] == ["krum", "2.0 [2.0, 2.0]", "≥ <ins>6.0</ins> [0.0, 31.4]"]
    assert ["krum", "recovery", "≥ 8.0", "4.0", "≥ 8.0 (seed 0)"] in seeds
    assert "\n\n≥: a lower bound, as the run ended first.\n\n" in text
    assert "≥" not in to_markdown_report(data_of(runs), ["BA"])


def test_runs_left_out_are_named_and_names_do_no_harm() -> None:
    name = "<script>|`x`"
    runs = [a_run(name), a_run("bad", status="failed", reason="<img src=x>")]
    text = to_markdown_report(data_of(runs))
    assert "<script>" not in text
    assert "<img" not in text
    assert [table[1][0] for table in tables(text)] == [name, name, name]
    assert "\n## Runs left out\n\n- failed: " in text
    assert "Runs left out" not in to_markdown_report(data_of(runs[:1]))
