"""What figures show: titles, runs, names of files, and the sentence about the rest."""

from __future__ import annotations

from figure_data import report, rounds, run

from fedbench.report.figures.selection import (
    by_setting,
    drawn_runs,
    file_name,
    first_run,
    left_out,
    title_of,
)


def test_titles_name_what_is_not_obvious() -> None:
    assert (
        title_of(["attack", "pmr", "attack.alpha"], ("dba", "0.2", "0.5"))
        == "dba, pmr 0.2, attack.alpha 0.5"
    )
    assert title_of([], ()) == ""


def test_rows_are_grouped_in_order_of_the_table() -> None:
    data = report(*(run(d, BA=0.1, settings={"pmr": p}) for d in ("b", "a") for p in (0.5, 0.1)))
    groups = by_setting(data, ["pmr"])
    assert [*groups] == [("0.1",), ("0.5",)]
    assert [[row.defense for row in rows] for rows in groups.values()] == [["b", "a"]] * 2
    assert len(by_setting(data, [])[()]) == 4


def test_finished_runs_come_before_the_others() -> None:
    done, going = rounds(BA=[0.1]), rounds(BA=[0.2])
    data = report(run("krum", 0, going, status="running"), run("krum", 1, done, BA=0.1))
    assert drawn_runs(data, data.rows[0]) == [done]
    data = report(
        run("krum", 0, rounds(n=0), status="failed"), run("krum", 1, going, status="running")
    )
    assert drawn_runs(data, data.rows[0]) == [going]
    assert first_run(data, data.rows[0]) == going
    assert first_run(report(run("krum")), report(run("krum")).rows[0]) is None


def test_what_is_left_out_is_named() -> None:
    assert left_out(["a", "b"], 2) == ""
    assert left_out(["a", "b", "c"], 1) == " Not shown: b; c."
    assert left_out([str(i) for i in range(10)], 2) == " Not shown: 2; 3; 4; 5; 6; 7 and 2 more."


def test_names_of_files_are_plain() -> None:
    assert file_name("clients", "krum m=5") == "clients_krum_m=5"
    assert file_name("rounds", "") == "rounds"
    assert file_name("a", "../<b>'\"/\\$x") == "a_b_x"
    assert file_name("a", "é") == "a_xe9"
    assert len(file_name("x" * 500)) == 100
