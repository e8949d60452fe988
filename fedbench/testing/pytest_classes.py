"""Contracts as classes that pytest collects. pytest itself is not imported."""

from __future__ import annotations

import dataclasses
import re
import unittest
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fedbench.data import Dataset
from fedbench.errors import UserError
from fedbench.testing.attacks import ATTACK
from fedbench.testing.backdoors import BACKDOOR, inspect_backdoor
from fedbench.testing.contract import Contract, Inspection
from fedbench.testing.defenses import DEFENSE


class PluginContract:
    """Base class of the contracts. Each check on each plugin is a test."""

    contract: ClassVar[Contract[Any]]
    # Registered names, settings with a `name`, classes or instances.
    plugins: ClassVar[Sequence[Any]] = ()
    checks: ClassVar[Sequence[str] | None] = None  # None: all
    # Setting -> values that the first plugin must refuse.
    invalid: ClassVar[Mapping[str, Sequence[Any]]] = {}

    def inspect(self, plugin: Any) -> Inspection[Any]:
        return Inspection(self.contract, plugin)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize the tests, as pytest asks when it collects the class."""
        if not self.plugins:
            raise UserError(f"{type(self).__name__}.plugins must list at least one plugin")
        if "inspection" in metafunc.fixturenames:
            inspections = [self.inspect(plugin) for plugin in self.plugins]
            metafunc.parametrize("inspection", inspections, ids=str)
        if "check" in metafunc.fixturenames:
            metafunc.parametrize("check", self.checks or ["exemptions", *self.contract.checks])

    def test_contract(self, inspection: Inspection[Any], check: str) -> None:
        __tracebackhide__ = True  # the message says what is wrong, in the terms of the plugin
        found = inspection.exemptions() if check == "exemptions" else inspection.finding(check)
        if found.status == "failed":
            raise AssertionError(f"{found.meaning}:\n{found.reason}")
        if found.status in ("exempt", "not run"):
            raise unittest.SkipTest(found.reason)

    def test_invalid_settings_are_refused(self) -> None:
        """The error is one line that names the setting and its value."""
        __tracebackhide__ = True
        for setting, value in (
            (s, value) for s, values in self.invalid.items() for value in values
        ):
            line = self._refusal(setting, value)
            assert line is not None, f"{setting}={value} must be refused"
            clear = re.search(rf"\b{setting}\b", line) and str(value) in line and "\n" not in line
            assert clear, f"the error must name {setting} and {value} in one line, got: {line}"

    def _refusal(self, setting: str, value: Any) -> str | None:
        plugin = self.plugins[0]
        plugin = {"name": plugin} if isinstance(plugin, str) else plugin
        try:
            if isinstance(plugin, Mapping):
                self.contract.build({**plugin, setting: value})
            elif isinstance(plugin, type):
                plugin(**{setting: value})
            else:
                dataclasses.replace(plugin, **{setting: value})
        except (ValueError, UserError) as error:
            return str(error)
        return None


class DefenseContract(PluginContract):
    """The contract of defenses. Subclass it in a test file, and list them in `plugins`."""

    contract = DEFENSE


class AttackContract(PluginContract):
    """The contract of attacks. Subclass it in a test file, and list them in `plugins`."""

    contract = ATTACK


class BackdoorContract(PluginContract):
    """The contract of backdoors. Subclass it in a test file, and list them in `plugins`."""

    contract = BACKDOOR
    datasets: ClassVar[Sequence[Dataset] | None] = None  # None: small examples of every kind

    def inspect(self, plugin: Any) -> Inspection[Any]:
        return inspect_backdoor(plugin, self.datasets)
