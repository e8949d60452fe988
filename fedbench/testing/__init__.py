"""The contract of plugins as a tool for their authors, in fedbench or elsewhere.

A test file of three lines, for pytest:

    from fedbench.testing import DefenseContract
    class TestMine(DefenseContract):
        plugins = ["mine"]

Without pytest, `check_defense(Mine(factor=2))` raises an AssertionError that lists what is broken,
and `python -m fedbench.testing defense=mine` prints a table.
"""

from fedbench.testing.attacks import check_attack
from fedbench.testing.backdoors import check_backdoor
from fedbench.testing.defenses import check_defense
from fedbench.testing.pytest_classes import AttackContract, BackdoorContract, DefenseContract
from fedbench.testing.rounds import example_round

__all__ = [
    "AttackContract",
    "BackdoorContract",
    "DefenseContract",
    "check_attack",
    "check_backdoor",
    "check_defense",
    "example_round",
]
