"""The list of a sweep's runs survives writing and reading; damage is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbench.results.planned_runs import PLANNED_FILE, read_planned_runs, write_planned_runs


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    titles = {"krum-b": "defense=krum seed=0", "flame-a": 'name="ü"'}
    write_planned_runs(tmp_path / "new", titles)
    assert [*read_planned_runs(tmp_path / "new").items()] == [*titles.items()]


@pytest.mark.parametrize("content", [None, "", "[1]", "{", "\x00", "[" * 10**5])
def test_a_missing_or_damaged_list_is_empty(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / PLANNED_FILE).write_text(content)
    assert read_planned_runs(tmp_path) == {}
