"""`fedbench list`: every name to choose, what it does and its paper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from end_to_end import CONFIGS, ROOT, install, succeed
from shipped import shipped

from fedbench.attack import ATTACKS
from fedbench.backdoor import BACKDOORS
from fedbench.data import DATASETS
from fedbench.defense import DEFENSES
from fedbench.models import MODELS
from fedbench.plugin_list import KINDS, entries, main
from fedbench.registry import Registry

REGISTRIES: dict[str, Registry[Any]] = {
    "defenses": DEFENSES,
    "attacks": ATTACKS,
    "backdoors": BACKDOORS,
    "datasets": DATASETS,
    "models": MODELS,
}
WITHOUT_PAPER = {"none"}
THEIRS = """
from dataclasses import dataclass

from fedbench.defense import DEFENSES, Defense


@DEFENSES.register("theirs")
@dataclass(frozen=True)
class Theirs(Defense):
    \"\"\"Does what they do.\"\"\"
"""


@pytest.mark.parametrize("listed", KINDS)
def test_every_plugin_is_listed_with_what_it_does(listed: str) -> None:
    found = {entry.name: entry for entry in entries(listed)}
    assert {*shipped(REGISTRIES[listed])} <= {*found}
    for name, entry in found.items():
        assert entry.about, name
        assert max(map(len, str(entry).splitlines())) <= 80 or "http" in str(entry)
        paper = listed in ("defenses", "attacks", "backdoors") and name not in WITHOUT_PAPER
        if paper and name in shipped(REGISTRIES[listed]):
            assert entry.paper, name
            assert entry.link.startswith("https://"), name


def test_an_entry_has_the_words_of_the_docstrings() -> None:
    (krum,) = (entry for entry in entries("defenses") if entry.name == "krum")
    assert krum.about == "Average the updates that are closest to their neighbors."
    assert krum.paper == "Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017."
    assert krum.link == "https://arxiv.org/abs/1703.02757"


def test_a_config_without_a_plugin_of_its_own_is_described_by_its_comment() -> None:
    (literal,) = (entry for entry in entries("defenses") if entry.name == "baybfed_literal")
    assert literal.about.startswith("As close to the paper's text as the options allow.")


@pytest.mark.slow
def test_plugins_of_the_working_folder_and_installed_ones_are_listed(tmp_path: Path) -> None:
    """A broken one is listed, too, and does not hide the others."""
    work = tmp_path / "work"
    (work / "defenses").mkdir(parents=True)
    mine = THEIRS.replace("theirs", "mine").replace("they do", "I want")
    (work / "defenses" / "mine.py").write_text(mine)
    (work / "defenses" / "broken.py").write_text("import nothing_like_this\ndef f(:\n")
    points = f"[fedbench.defenses]\ntheirs = theirs:Theirs\ngone = gone.away:Gone\n{CONFIGS}"
    site = install(tmp_path / "site", points, THEIRS, {"defense/theirs": "name: theirs\n"})
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    with mock.patch("end_to_end.SMALL", {}):
        ended = succeed("list", "defenses", cwd=work, env=site.env | {"PYTHONPATH": path})
    text = " ".join(" ".join(ended.out).split())
    assert "theirs Does what they do." in text
    assert "mine Does what I want." in text
    assert "broken cannot be read: SyntaxError" in text
    assert "broken.py:2)" in text
    assert "gone cannot be read" in text
    assert "median Coordinate-wise median." in text


def test_unknown_kinds_are_user_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defences"]) == 1
    assert capsys.readouterr().err.startswith("fedbench: defences: cannot be listed; did you mean")
    assert main(["model", "attacks"]) == 0
    out = capsys.readouterr().out
    assert out.index("models:") < out.index("attacks:")
    assert "defenses:" not in out
