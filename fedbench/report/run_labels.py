"""RunLabels: which settings the table names, and where."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fedbench.results.run_reader import LACKING, RunResult
from fedbench.results.settings import Value, group_of, is_named, leading_first, show

# Groups whose choice is always a column. Other choices, such as the model, may follow from these.
CHOSEN = ("dataset", "attack")


def value_of(run: RunResult, key: str) -> Value:
    """Return a choice or a setting, or a dash if the run lacks it."""
    choices = {} if run.origin is None else run.origin.choices
    return choices.get(key, run.value(key))


def changed_in(runs: Sequence[RunResult], varying: Sequence[str]) -> dict[str, None]:
    """Return the settings that were changed in any run, without duplicates.

    For a run of unknown origin, any of the `varying` settings may have been.
    """
    found: dict[str, None] = {}
    for run in runs:
        changed = None if run.origin is None else run.origin.changed
        found |= dict.fromkeys(varying if changed is None else changed)
    return found


def varying_keys(runs: Sequence[RunResult]) -> list[str]:
    """Return the settings with more than one value, in the configs' order.

    Parameters of a group are compared only between runs with the same choice in that group. dba
    has parameters that other attacks lack, but `attack` already tells these runs apart.
    """
    configs = [run.config for run in runs]
    varying = []
    for key in dict.fromkeys(key for config in configs for key in config):
        # Most settings have one value, which is quick to see.
        if len({config.get(key, LACKING) for config in configs}) == 1 or not is_named(key):
            continue
        steps = key.split(".")
        groups = [".".join(steps[:depth]) for depth in range(1, len(steps))]
        seen: dict[tuple[Value, ...], set[Value]] = {}
        for run in runs:
            seen.setdefault(tuple(map(run.value, groups)), set()).add(run.value(key))
        if any(len(values) > 1 for values in seen.values()):
            varying.append(key)
    return varying


class RunLabels:
    """Names what tells runs apart and what the user changed, each setting in one place.

    Settings that only follow from a choice, such as the learning rate of a data set, are named only
    if two rows would look the same without them.
    """

    def __init__(self, runs: Sequence[RunResult]) -> None:
        self._runs = runs
        self._parameters: dict[tuple[str, Value], list[str]] = {}  # a cache, see `_named`
        self.varying = varying_keys(runs)  # settings of which any difference starts a new row
        self.columns: list[str] = []  # settings with a column, besides the defense
        self.shared: list[str] = []  # changed settings that all runs have in common
        self._necessary: Collection[str] = ()  # not changed, but two rows would look the same
        self._divide()
        alike: dict[tuple[str, ...], list[RunResult]] = {}
        for run in runs:
            cells = (self.cell(run, key) for key in self.columns)
            alike.setdefault((*cells, self.defense(run)), []).append(run)
        self._necessary = {key for group in alike.values() for key in varying_keys(group)}
        self._parameters.clear()
        self._divide()

    def _divide(self) -> None:
        """Decide for every setting that is not of the defense where it is named."""
        changed = [k for k in changed_in(self._runs, self.varying) if group_of(k) != "defense"]
        named = [key for key in self.varying if key in {*CHOSEN, *changed, *self._necessary}]
        columns = [key for key in named if group_of(key) != "defense"]
        shared = []
        for key in changed:
            labeled = "." in key and group_of(key) in columns  # `cell` names it
            if len({value_of(run, key) for run in self._runs}) == 1:
                shared.append(key)
            elif key not in columns and not labeled:
                columns.append(key)
        self.columns = sorted(columns, key=leading_first)
        self.shared = sorted(shared, key=leading_first)

    def identity(self, run: RunResult) -> list[Value]:
        """Return the settings that all runs of a row share."""
        return [run.value(key) for key in self.varying]

    def cell(self, run: RunResult, key: str) -> str:
        """Format a setting: `0.2`, `constrain_and_scale alpha=0.5`, `alie (omniscient)`.

        Attacks that see the honest updates are marked.
        """
        elsewhere = {*self.columns, *self.shared}
        parameters = [name for name in self._named(run, key) if name not in elsewhere]
        marked = key == "attack" and run.config.get("attack.omniscient") is True
        return _label(run, key, parameters) + (" (omniscient)" if marked else "")

    def defense(self, run: RunResult) -> str:
        """Return the defense with every parameter that was changed in any of its runs."""
        return _label(run, "defense", self._named(run, "defense"))

    def _named(self, run: RunResult, group: str) -> list[str]:
        """Return the parameters to name in all runs with the same choice in the group."""
        choice = value_of(run, group)
        if (group, choice) not in self._parameters:
            alike = [other for other in self._runs if value_of(other, group) == choice]
            keys = dict.fromkeys(key for other in alike for key in other.config)
            inside = [key for key in keys if key.startswith(f"{group}.")]
            varying = varying_keys(alike) if inside else []
            named = {*changed_in(alike, varying), *(k for k in varying if k in self._necessary)}
            self._parameters[group, choice] = [key for key in inside if key in named]
        return self._parameters[group, choice]


def _label(run: RunResult, group: str, parameters: Sequence[str]) -> str:
    given = [key for key in parameters if key in run.config]
    words = [f"{key.removeprefix(group + '.')}={show(run.value(key))}" for key in given]
    return " ".join([show(value_of(run, group)), *words])
