"""A sweep of runs: checked as a whole before the first one starts, compared when all have ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from fedbench.config import RunConfig
from fedbench.errors import one_line
from fedbench.report import print_runs
from fedbench.results import RunDir
from fedbench.run import Plan
from fedbench.runs import read_runs


class Sweep(Callback):
    """Hydra's callback around the runs of `-m`, in the process that launches them."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Composes and checks every run, so that a mistake in the last costs nobody the first."""
        try:
            for overrides in _runs_of(config):
                plan = Plan.of(RunConfig.from_hydra(_compose(config, overrides)))
                if plan.folder.path not in self.folders:
                    self.folders.append(plan.folder.path)
        except Exception as error:
            if (line := one_line(error)) is None:
                raise
            # Hydra turns an exception of a callback into a warning, but lets an exit pass.
            sys.exit(line)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """The table; the program ends with an error if any run did."""
        started = [folder for folder in self.folders if folder.exists()]
        if started or not self.folders:
            print_runs(read_runs(started or [config.hydra.sweep.dir]))
        if any(RunDir(folder).finished() is None for folder in self.folders):
            sys.exit(1)


def _runs_of(config: DictConfig) -> list[list[str]]:
    """The overrides of each run; none for a sweeper that decides as it goes."""
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []
    overrides = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    overrides += config.hydra.overrides.task
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return BasicSweeper.split_arguments(parser.parse_overrides(overrides), max_batch_size=None)[0]


def _compose(config: DictConfig, overrides: list[str]) -> DictConfig:
    composed = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
    with open_dict(composed):
        del composed["hydra"]
    return composed
