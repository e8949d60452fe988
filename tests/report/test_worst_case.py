"""The worst case of each defense, from handmade results; which attacks are adaptive."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from end_to_end import fedbench_in_this_process, run_folder, summary
from handmade_runs import seal
from sweep_folders import add_sweep

from fedbench.attack import ATTACKS, Attack
from fedbench.defense import DEFENSES
from fedbench.report.comparison import compare
from fedbench.report.worst_case import WorstCase, adaptive_to, worst_cases
from fedbench.results.run_reader import read_runs

CONSTRAIN, ADAPTIVE = "constrain_and_scale", "adaptive_baybfed"


def add(top: Path, defense: str, attack: str, *values: float | None, **more: Any) -> None:
    """Add a run per BA, with seeds 0, 1, ..., and MA 0.5, 0.6, ..."""
    overrides = [f"{key}={value}" for key, value in more.items() if key == "pmr"]
    others = {key: value for key, value in more.items() if key != "pmr"}
    for seed, ba in enumerate(values):
        words = [f"defense={defense}", *attack.split(), *overrides, f"seed={seed}"]
        add_sweep(top, *words, BA=ba, MA=round(0.5 + seed / 10, 1), **others)


def worst(top: Path) -> list[WorstCase]:
    return worst_cases(compare(read_runs([top])))


def test_the_attack_with_the_highest_mean(tmp_path: Path) -> None:
    add(tmp_path, "krum", f"attack={CONSTRAIN}", 0.2, 0.4)  # mean 0.3
    add(tmp_path, "krum", "attack=dba", 0.0, 0.5)  # mean 0.25, but the highest single seed
    add(tmp_path, "krum", "attack=edge_case", 0.1, 0.1)
    add(tmp_path, "krum", "attack=none", 0.9, 0.9)  # the errors of a clean model
    add(tmp_path, "krum", "attack=sign_flip", None, None)  # has no backdoor
    (case,) = worst(tmp_path)
    assert (case.defense, case.attack, case.setting) == ("krum", CONSTRAIN, {})
    assert case.BA.mean == pytest.approx(0.3)
    assert case.BA.values == {0: 0.2, 1: 0.4}
    assert case.MA is not None
    assert case.MA.mean == pytest.approx(0.55)
    assert (case.peak, case.peak_seed) == (0.5, 1)
    assert (case.n_attacks, case.ties, case.missing) == (3, (), ())
    assert (case.adaptive, case.is_adaptive) == ((), False)


def test_each_defense_and_each_setting_has_its_own(tmp_path: Path) -> None:
    for pmr, ba in (("0.2", 0.1), ("0.3", 0.6)):
        for defense in ("fedavg", "krum"):
            add(tmp_path, defense, f"attack={CONSTRAIN}", ba, pmr=pmr)
            add(tmp_path, defense, "attack=dba", 0.3 if defense == "krum" else 0.0, pmr=pmr)
    found = [(case.setting, case.defense, case.attack, case.BA.mean) for case in worst(tmp_path)]
    assert found == [
        ({"pmr": "0.2"}, "fedavg", CONSTRAIN, 0.1),
        ({"pmr": "0.2"}, "krum", "dba", 0.3),
        ({"pmr": "0.3"}, "fedavg", CONSTRAIN, 0.6),
        ({"pmr": "0.3"}, "krum", CONSTRAIN, 0.6),
    ]


def test_defenses_of_a_setting_stay_together(tmp_path: Path) -> None:
    add(tmp_path, "krum", f"attack={CONSTRAIN}", 0.1, pmr="0.2")
    add(tmp_path, "krum", f"attack={CONSTRAIN}", 0.1, pmr="0.3")
    add(tmp_path, "fedavg", "attack=dba", 0.1, pmr="0.2")
    found = [(case.setting["pmr"], case.defense) for case in worst(tmp_path)]
    assert found == [("0.2", "krum"), ("0.2", "fedavg"), ("0.3", "krum")]


def test_variants_of_a_defense_are_told_apart(tmp_path: Path) -> None:
    add_sweep(tmp_path, "defense=krum", "defense.m=1,5", "attack=dba", BA=0.5)
    assert [case.defense for case in worst(tmp_path)] == ["krum m=1", "krum m=5"]


def test_parameters_belong_to_the_attack(tmp_path: Path) -> None:
    for alpha, ba in ((0.3, 0.2), (0.5, 0.8), (0.9, 0.4)):
        add(tmp_path, "krum", f"attack={CONSTRAIN} attack.alpha={alpha}", ba)
    (alone,) = worst(tmp_path)
    assert (alone.attack, alone.n_attacks, alone.setting) == (f"{CONSTRAIN} alpha=0.5", 3, {})
    add(tmp_path, "krum", "attack=dba", 0.7)
    (case,) = worst(tmp_path)
    assert (case.attack, case.n_attacks, case.setting) == (f"{CONSTRAIN} alpha=0.5", 4, {})


def test_attacks_that_tie_are_all_named(tmp_path: Path) -> None:
    add(tmp_path, "krum", f"attack={CONSTRAIN}", 0.1, 0.2)  # mean 0.15000000000000002
    add(tmp_path, "krum", "attack=dba", 0.15, 0.15)
    add(tmp_path, "krum", "attack=edge_case", 0.14, 0.14)
    (case,) = worst(tmp_path)
    assert (case.attack, case.ties, case.n_attacks) == (CONSTRAIN, ("dba",), 3)


def test_attacks_that_only_others_met_are_missing(tmp_path: Path) -> None:
    add(tmp_path, "fedavg", f"attack={CONSTRAIN}", 0.5)
    add(tmp_path, "fedavg", "attack=dba", 0.9)
    add(tmp_path, "krum", f"attack={CONSTRAIN}", 0.5)
    (failed,) = add_sweep(tmp_path, "defense=krum", "attack=dba")
    (failed / "summary.json").write_text(json.dumps({"status": "failed", "error": "no luck"}))
    seal(failed)
    assert {case.defense: case.missing for case in worst(tmp_path)} == {
        "fedavg": (),
        "krum": ("dba",),
    }


def test_nothing_measured_is_no_worst_case(tmp_path: Path) -> None:
    add(tmp_path, "krum", "attack=sign_flip", None)
    add(tmp_path, "krum", "attack=none", 0.1)
    (unread,) = add_sweep(tmp_path, "defense=fedavg", "attack=dba")
    (unread / "config.yaml").write_text("{")
    assert worst(tmp_path) == []


def test_an_attack_is_adaptive_to_certain_defenses_only(tmp_path: Path) -> None:
    for defense in ("baybfed", "baybfed_literal", "krum"):
        add(tmp_path, defense, f"attack={CONSTRAIN}", 0.4)
        add(tmp_path, defense, f"attack={ADAPTIVE}", 0.6, adaptive_to=["baybfed"])
    found = {case.defense: (case.adaptive, case.is_adaptive) for case in worst(tmp_path)}
    assert found == {
        "baybfed": ((ADAPTIVE,), True),
        "baybfed_literal": ((ADAPTIVE,), True),  # its plugin is baybfed
        "krum": ((), False),
    }


def test_the_worst_attack_need_not_be_adaptive(tmp_path: Path) -> None:
    add(tmp_path, "baybfed", f"attack={ADAPTIVE}", 0.1, adaptive_to=["baybfed"])
    add(tmp_path, "baybfed", f"attack={CONSTRAIN}", 0.4, adaptive_to=[])
    (case,) = worst(tmp_path)
    assert (case.attack, case.adaptive, case.is_adaptive) == (CONSTRAIN, (ADAPTIVE,), False)


def test_the_run_knows_better_than_the_source(tmp_path: Path) -> None:
    add(tmp_path, "krum", "attack=dba", 0.4, adaptive_to=["krum", "flame"])
    add(tmp_path, "baybfed", f"attack={ADAPTIVE}", 0.4, adaptive_to=[])
    assert {case.defense: case.is_adaptive for case in worst(tmp_path)} == {
        "krum": True,
        "baybfed": False,
    }


@pytest.mark.parametrize("recorded", ["baybfed", 3, None])
def test_older_and_damaged_records_fall_back_to_the_source(tmp_path: Path, recorded: Any) -> None:
    add(tmp_path, "baybfed", f"attack={ADAPTIVE}", 0.4, adaptive_to=recorded)
    (case,) = worst(tmp_path)
    assert case.is_adaptive


THEIRS = """
import module_that_is_not_installed

class Helper:
    note: str

@ATTACKS.register("theirs")
class Theirs(Attack):
    {declaration}
"""


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("adaptive_to = ('krum', 'flame')", ("krum", "flame")),
        ("adaptive_to: ClassVar[tuple[str, ...]] = ('krum',)", ("krum",)),
        ("adaptive_to: ClassVar[tuple[str, ...]]", ()),
        ("adaptive_to = names()", ()),
        ("adaptive_to = ('krum',", ()),  # no Python
        ("version = 2", ()),
    ],
)
def test_the_source_is_read_without_an_import(
    tmp_path: Path, declaration: str, expected: tuple[str, ...]
) -> None:
    """In a process of its own: the packages of plugins look at the working folder once."""
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / "theirs.py").write_text(THEIRS.format(declaration=declaration))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from fedbench.report.worst_case import adaptive_to\n"
        "from fedbench.results.run_reader import RunResult\n"
        "for attack in sys.argv[1:]:\n"
        "    print(adaptive_to(RunResult(Path(), 'finished', {'attack': attack}, {})))\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, "theirs", "nowhere", ADAPTIVE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(expected), "()", "('baybfed',)", "False"]


def test_declared_defenses_exist() -> None:
    for name in ATTACKS.names():
        assert {*ATTACKS.get(name).adaptive_to} <= {*DEFENSES.names()}
    assert ATTACKS.get(ADAPTIVE).adaptive_to == ("baybfed",)
    assert ATTACKS.get(CONSTRAIN).adaptive_to == ()


def test_a_declaration_must_be_a_tuple_of_names() -> None:
    for wrong in ("baybfed", ["baybfed"], (1,)):
        with pytest.raises(TypeError, match="adaptive_to must be a tuple of names of defenses"):
            type("Wrong", (Attack,), {"adaptive_to": wrong})


def test_a_declaration_is_inherited_and_no_setting() -> None:
    @dataclass(frozen=True)
    class Evading(Attack):
        adaptive_to: ClassVar[tuple[str, ...]] = ("krum",)

    @dataclass(frozen=True)
    class EvadingMore(Evading):
        strength: float = 1.0

    assert EvadingMore(2.0).adaptive_to == ("krum",)
    assert [field.name for field in fields(EvadingMore)] == ["strength"]


def test_a_run_records_what_its_attack_declares(tmp_path: Path) -> None:
    settings = ("model.hidden=[4]", f"attack={ADAPTIVE}", "defense=baybfed")
    fedbench_in_this_process(*settings, cwd=tmp_path)
    folder = run_folder(tmp_path / "runs")
    assert summary(folder)["adaptive_to"] == ["baybfed"]
    assert "adaptive_to" not in (folder / "config.yaml").read_text()
    (run,) = read_runs([tmp_path / "runs"])
    assert adaptive_to(run) == ("baybfed",)
