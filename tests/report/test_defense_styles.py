"""A defense looks the same in every report."""

from __future__ import annotations

from shipped import shipped

from fedbench.defense import DEFENSES
from fedbench.report.defense_styles import KNOWN, LOOKS, defense_styles


def test_the_look_of_a_shipped_defense_does_not_depend_on_the_others() -> None:
    names = shipped(DEFENSES)
    assert {*names} <= {*KNOWN, "fedavg"}
    together = defense_styles(names)
    assert all(defense_styles([name])[name] == together[name] for name in names)
    assert defense_styles(names[::-1]) == together


def test_all_shipped_defenses_differ_in_color_and_in_marker() -> None:
    styles = defense_styles(shipped(DEFENSES)).values()
    assert len({style.color for style in styles}) == len(styles)
    assert len({style.symbol for style in styles}) == len(styles)


def test_variants_share_a_color_and_differ_in_marker() -> None:
    styles = defense_styles(["krum", "krum m=5", "krum m=9", "flame"])
    krum = [style for label, style in styles.items() if label.startswith("krum")]
    assert len({style.color for style in krum}) == 1
    assert len({style.symbol for style in krum}) == 3
    assert styles["flame"].color != krum[0].color


def test_unknown_defenses_get_free_looks_whatever_their_order() -> None:
    styles = defense_styles(["zeta", "mine", "krum"])
    assert styles == defense_styles(["krum", "mine", "zeta"])
    assert len({style.color for style in styles.values()}) == 3


def test_more_defenses_than_looks() -> None:
    styles = defense_styles([f"d{i}" for i in range(3 * len(LOOKS))])
    assert len(styles) == 3 * len(LOOKS)


def test_fedavg_variants_do_not_fail() -> None:
    assert len({s.symbol for s in defense_styles(["fedavg", "fedavg x=1"]).values()}) == 2
