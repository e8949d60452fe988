"""A contract is a list of named checks. An inspection runs them on one plugin."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch

from fedbench.errors import nearest
from fedbench.registry import Registry
from fedbench.testing.compare import isolated

T = TypeVar("T")
Status = Literal["ok", "failed", "exempt", "skipped", "not run"]


class NotApplicable(Exception):  # noqa: N818
    """Raised by a check that does not concern the plugin, with the reason."""


@dataclass(frozen=True)
class Check:
    """One promise of a plugin, tried on every case."""

    run: Callable[..., None]  # (plugin, *case); raises AssertionError
    needs: tuple[str, ...]  # checks whose failure would explain a failure of this one
    cases: tuple[tuple[Any, ...], ...]
    optional: bool  # a plugin may declare an exemption

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def meaning(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0].rstrip(".")

    def label(self, case: Sequence[Any]) -> str:
        """Return a case for a message: `huge_row, n=3, float32`."""
        names = list(inspect.signature(self.run).parameters)[1:]
        return ", ".join(map(_describe, names, case))


def check(
    *needs: str, cases: Iterable[tuple[Any, ...]] = ((),), optional: bool = False
) -> Callable[[Callable[..., None]], Check]:
    """Return a decorator that turns a function into a check of the same name."""
    return lambda run: Check(run, needs, tuple(cases), optional)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    meaning: str
    reason: str = ""  # why it failed, is exempt or did not run

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.check:<18} {self.meaning}"
        indented = self.reason.replace("\n", "\n" + " " * 11)
        return f"{line}\n{' ' * 11}{indented}" if self.reason else line


class Contract(Generic[T]):
    """The checks of one kind of plugin, in the order in which they run."""

    def __init__(self, registry: Registry[T], *checks: Check) -> None:
        self.kind = registry.kind
        self.registry = registry
        self.checks = {check.name: check for check in checks}

    @property
    def optional(self) -> list[str]:
        """Names of the checks that a plugin may be exempt from."""
        return [check.name for check in self.checks.values() if check.optional]

    def build(self, plugin: Any) -> Any:
        """Build a plugin from its name, its settings or its class; return an instance as it is."""
        if isinstance(plugin, str):
            return self.registry.build({"name": plugin})
        if isinstance(plugin, Mapping):
            return self.registry.build(plugin)
        return plugin() if isinstance(plugin, type) else plugin


class Inspection(Generic[T]):
    """The checks of a contract on one plugin. Each runs once, when its finding is asked for."""

    def __init__(
        self, contract: Contract[T], plugin: Any, subject: Callable[[Any], Any] = lambda p: p
    ) -> None:
        self.contract = contract
        self.given = plugin
        self._subject = subject  # turns the plugin into the first argument of the checks
        self._findings: dict[str, Finding] = {}

    def __str__(self) -> str:
        return label(self.given)

    @cached_property
    def plugin(self) -> Any:
        return self.contract.build(self.given)

    @property
    def _exempt(self) -> Any:
        """The plugin's exemptions; none if it derives from no base class that has them."""
        return getattr(self.plugin, "exemptions", {})

    def findings(self) -> list[Finding]:
        return [self.exemptions(), *map(self.finding, self.contract.checks)]

    def exemptions(self) -> Finding:
        """Check the names and the reasons of the plugin's exemptions."""
        meaning = "Exemptions name optional checks and give a reason"
        known = self.contract.optional
        if not isinstance(self._exempt, Mapping):
            problem = f"exemptions must map names of checks to reasons, got {self._exempt!r}"
            return Finding("exemptions", "failed", meaning, problem)
        for name, reason in self._exempt.items():
            problem = ""
            if name not in known:
                problem = f"no optional check is called {name!r}{nearest(str(name), known)}"
            elif not isinstance(reason, str) or not reason.strip():
                problem = f"the exemption from {name} must have a reason, got {reason!r}"
            if problem:
                return Finding("exemptions", "failed", meaning, problem)
        return Finding("exemptions", "ok", meaning)

    def finding(self, name: str) -> Finding:
        if name not in self._findings:
            self._findings[name] = self._run(self.contract.checks[name])
        return self._findings[name]

    def _run(self, check: Check) -> Finding:
        def found(status: Status, reason: str = "") -> Finding:
            return Finding(check.name, status, check.meaning, reason)

        for need in check.needs:
            if self.finding(need).status in ("failed", "not run"):
                return found("not run", f"fix {need} first")
        try:
            failures = self._failures(check)
        except NotApplicable as reason:
            return found("skipped", str(reason))
        may_be_exempt = check.optional and isinstance(self._exempt, Mapping)
        exemption = self._exempt.get(check.name) if may_be_exempt else None
        if exemption is None:
            return found("failed", summary(failures, len(check.cases))) if failures else found("ok")
        if failures:
            return found("exempt", str(exemption))
        if self._default_fails(check.name):
            return found("ok")
        return found("failed", f"the check passes: remove the exemption ({exemption})")

    def _default_fails(self, name: str) -> bool:
        """Whether the plugin needs its exemption with other settings: the default ones."""
        cls = type(self.plugin)
        try:
            default = cls()
        except (TypeError, ValueError):  # has settings without a default
            return True
        if default == self.plugin:
            return False
        return Inspection(self.contract, default, self._subject).finding(name).status == "exempt"

    def _failures(self, check: Check) -> list[tuple[str, str]]:
        """Return (case, message) of each case that fails."""
        failures = []
        for case in check.cases:
            # A copy: memory that a plugin keeps in itself must not reach the next case.
            subject = copy.deepcopy(self._subject(self.plugin))
            try:
                with isolated():
                    check.run(subject, *case)
            except NotApplicable:
                raise
            except AssertionError as error:
                failures.append((check.label(case), str(error)))
            except Exception as error:
                failures.append((check.label(case), self._crash(error)))
        return failures

    def _crash(self, error: Exception) -> str:
        """Return the exception and the last line of the plugin's own file that led to it."""
        frames: list[traceback.FrameSummary] = []
        chain: BaseException | None = error
        while chain is not None:  # the round loop wraps errors of clients
            frames += traceback.extract_tb(chain.__traceback__)
            chain = chain.__cause__
        own = [frame for frame in frames if frame.filename == _file(type(self.plugin))]
        at = (own or frames)[-1]
        return f"raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}: {at.line})"


def _file(cls: type) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except TypeError:  # defined in a notebook or an interpreter
        return None


def _describe(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else f"{name}={value}"


def summary(failures: Sequence[tuple[str, str]], n_cases: int) -> str:
    """Return the first message, its case, and the other cases that fail."""
    (case, message), *others = failures
    text = f"{message} [{case}]" if case else message
    if others:
        shown = "; ".join(other for other, _ in others[:4]) + ("; ..." if len(others) > 4 else "")
        text += f"\n{len(failures)} of {n_cases} cases fail, also {shown}"
    return text


def label(plugin: Any) -> str:
    """Return a short name of a plugin that is given by name, settings, class or instance."""
    if isinstance(plugin, Mapping):
        name, *others = [plugin.get("name"), *(f"{k}={v}" for k, v in plugin.items())]
        return "-".join(map(str, [name, *(o for o in others if not o.startswith("name="))]))
    if isinstance(plugin, str):
        return plugin
    return plugin.__name__ if isinstance(plugin, type) else repr(plugin)


def raise_if_broken(inspection: Inspection[Any]) -> None:
    """Raise one AssertionError that lists every broken check."""
    broken = [finding for finding in inspection.findings() if finding.status == "failed"]
    if broken:
        kind = inspection.contract.kind
        lines = "\n".join(map(str, broken))
        count = f"{len(broken)} check{'s' * (len(broken) > 1)}"
        raise AssertionError(f"{kind} {inspection} breaks {count}:\n{lines}")
