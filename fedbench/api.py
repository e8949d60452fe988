"""Run fedbench from Python: `fedbench.run` and `fedbench.sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedbench.command import start_runs
from fedbench.composition import overrides_of, sweep_overrides_of
from fedbench.config import RunConfig
from fedbench.errors import UserError
from fedbench.results.frames import frame_of, load_clients, load_rounds

if TYPE_CHECKING:
    import pandas as pd

ONE_VALUE = "fedbench.run takes one value per setting; fedbench.sweep takes several"
ONE_VALUE_EACH = {field.name for field in fields(RunConfig)} - {"n_clients", "attack_rounds"}


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """The result of `fedbench.run`. Rates are between 0 and 1, None if they are undefined.

    Attributes:
        folder: the run directory.
        config: every setting, the content of `config.yaml`.
        summary: the content of [summary.json](run-directory.md#summaryjson).

    Examples:
        >>> result = fedbench.run(defense="krum", rounds=2, tracker="none")
        >>> result.config["defense"]
        {'name': 'krum', 'f': None, 'm': 1}
        >>> sorted(path.name for path in result.folder.glob("*.json*"))
        ['origin.json', 'rounds.jsonl', 'summary.json']
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def BA(self) -> float | None:  # noqa: N802
        """Accuracy of the backdoor after the last round."""
        return self._number("BA")

    @property
    def MA(self) -> float | None:  # noqa: N802
        """Accuracy on the main task after the last round."""
        return self._number("MA")

    @property
    def TPR(self) -> float | None:  # noqa: N802
        """Share of the poisoned updates that the defense rejected."""
        return self._number("TPR")

    @property
    def TNR(self) -> float | None:  # noqa: N802
        """Share of the benign updates that the defense accepted."""
        return self._number("TNR")

    @property
    def AUC(self) -> float | None:  # noqa: N802
        """Probability that a poisoned update scores higher than a benign one."""
        return self._number("AUC")

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round, see `fedbench.load_rounds`."""
        return load_rounds(self.folder)

    @property
    def clients(self) -> pd.DataFrame:
        """One row per round and client, see `fedbench.load_clients`."""
        return load_clients(self.folder)

    def _number(self, key: str) -> float | None:
        value: float | None = self.summary[key]
        return value

    def __repr__(self) -> str:
        values = ((key, self._number(key)) for key in ("BA", "MA", "TPR", "TNR"))
        rates = [f"{key}=" + ("None" if rate is None else f"{rate:.3f}") for key, rate in values]
        return f"<{self.folder}: {', '.join(rates)}>"


def run(*overrides: str, **settings: Any) -> FinishedRun:
    """Run one configuration; resume it or skip it if it was run before.

    Starts `python -m fedbench` in another process and prints its output. A notebook or script needs
    no `if __name__ == "__main__"`, and edits to plugin files count in the next call. An interrupt
    stops the run; the same call resumes it.

    Args:
        overrides: settings as on the command line, such as `"attack.alpha=0.5"`.
        settings: settings as keyword arguments, such as `pmr=0.3`: strings, numbers, paths, None,
            and lists and dicts of these. A setting with a dot goes in a dict:
            `**{"attack.alpha": 0.5}`.

    Raises:
        UserError: if a setting is wrong, with the line that the command line prints.
        RuntimeError: if the run fails, for example in a plugin; the traceback is in the output.

    Examples:
        >>> result = fedbench.run("attack.alpha=0.5", defense="krum", rounds=2, tracker="none")
        >>> 0 <= result.BA <= 1, result.TPR, result.config["attack"]["alpha"]
        (True, 1.0, 0.5)
        >>> result.rounds[["round", "MA", "BA"]].shape
        (2, 3)
    """
    _check_one_value(settings)
    found, *others = start_runs([*overrides, *overrides_of(settings)])
    if others:
        raise UserError(ONE_VALUE)
    if found.status != "finished":
        raise RuntimeError(f"{found.folder} {found.status}: {found.reason}")
    config = yaml.safe_load((found.folder / "config.yaml").read_text(encoding="utf-8"))
    return FinishedRun(found.folder, config, dict(found.summary))


def _check_one_value(settings: Mapping[str, Any]) -> None:
    """Raise a UserError for a list, except for a setting that is one."""
    for key, value in settings.items():
        if isinstance(value, list | tuple | range) and key in ONE_VALUE_EACH:
            raise UserError(f"{key}={value}: {ONE_VALUE}")


def sweep(*overrides: str, **settings: Any) -> pd.DataFrame:
    """Run all combinations of several values in parallel, as `python -m fedbench -m` does.

    Args:
        overrides: as on the command line, such as `"pmr=0.2,0.3"`. A sweep file is
            `"--config-dir=sweeps/paper", "--config-name=table3"`.
        settings: as for `run`. A list, a range or an array holds the values to try. A tuple is one
            value: `n_clients=[30, (40, 90)]` tries 30 clients, then 40 to 90.

    Returns:
        The runs of the sweep, as `load` returns them. A run that fails does not stop the others;
            its `status` is failed and its `reason` says why.

    Raises:
        UserError: if a setting of any run is wrong, or if no run could start.

    Examples:
        >>> runs = fedbench.sweep(defense=["krum", "median"], rounds=2, tracker="none")
        >>> runs[["defense", "pmr", "status"]]
          defense  pmr    status
        0    krum  0.2  finished
        1  median  0.2  finished
    """
    return frame_of(start_runs(["-m", *overrides, *sweep_overrides_of(settings)]))
