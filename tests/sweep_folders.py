"""Run directories of whole sweeps, with real settings and made-up numbers, without training."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from handmade_runs import seal
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import open_dict

from fedbench.composition import hydra_initialized
from fedbench.config import RunConfig, register_schema
from fedbench.default_settings import origin_of
from fedbench.multirun.sweeper import expand
from fedbench.results.run_dir import RunDir


def composed(overrides: Sequence[str], sweep: bool = False) -> tuple[RunConfig, HydraConf]:
    """Compose a run as the command line does; return it with Hydra's own part."""
    register_schema()
    with hydra_initialized():
        config: Any = hydra.compose("config", [*overrides], return_hydra_config=True)
    job = config.hydra
    with open_dict(config):
        del config["hydra"]
        job.mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    return RunConfig.from_hydra(config), job


def add_sweep(top: Path, *overrides: str, **metrics: Any) -> list[Path]:
    """Create the run directories of `-m *overrides`, in order; half of the rates are 100 %."""
    register_schema()
    folders = []
    parsed = OverridesParser.create().parse_overrides([*overrides])
    for words in expand(parsed, {}, lambda run: {}):
        config, job = composed(words, sweep=True)
        folder = top / f"run{len([*top.glob('run*')]):03}"
        folder.mkdir(parents=True)
        RunDir(folder).start(config, origin_of(config, job))
        start = len(folders) + 1000 * len([*top.glob("run*")])
        os.utime(folder / "config.yaml", (start, start))
        rng = random.Random(repr(words))
        rates = {name: rng.choice([1.0, rng.random()]) for name in ("BA", "MA", "TPR", "TNR")}
        summary = {"status": "finished", **rates, "AUC": 1.0, "seconds": 1000 * rng.random()}
        (folder / "summary.json").write_text(json.dumps(summary | metrics))
        seal(folder)
        folders.append(folder)
    return folders
