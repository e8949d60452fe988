"""A picture of an attack: `python -m fedbench.preview attack=dba` draws what becomes of samples.

A row of clean test samples; for each backdoor a row of what BA is measured on; for each way in
which malicious clients poison their data a row of what they train on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from fedbench.backdoor import BackdoorContext, prepare_all
from fedbench.config import RunConfig, register_schema
from fedbench.data import Spec
from fedbench.errors import UserError, nearest, one_line
from fedbench.plan import Plan
from fedbench.pretraining import pretrained
from fedbench.report.console import Display
from fedbench.report.stage import ImageStage, SequenceStage
from fedbench.results.storage import write_atomically
from fedbench.run import population_of

MAX_SAMPLES = 100


def prepared(plan: Plan) -> ImageStage | SequenceStage:
    """The clients and backdoors of a run, in this process alone."""
    _check_drawable(plan.source.spec)
    data = plan.source.load()
    _check_drawable(data.spec)
    plan.check_fit(data.spec)
    # It imports Lightning, which takes seconds: mistakes are told before.
    from fedbench.engine.launch import fabric_of
    from fedbench.engine.ranks import RankGroup
    from fedbench.federation import Federation

    config, executor = plan.config, plan.executor
    torch.set_num_threads(executor.threads)
    fabric = fabric_of(executor, 1)
    population = population_of(plan, data.to(fabric.device), fabric)
    federation = Federation(population, RankGroup(executor, fabric, population), plan.defense)

    @cache
    def trained() -> BackdoorContext:
        # On stderr: stdout is for the path of the picture.
        display = Display(config.title, config.rounds, console=Console(stderr=True))
        start = pretrained(config, federation, display)
        return population.backdoor_context(start.initial_params, start.initial_buffers)

    # Few backdoors ask for features; for the others nothing is trained.
    fresh = population.backdoor_context(*federation.fresh)
    # Samples are shown as they are stored, and recognised by that.
    stored = replace(population.dataset, augment=None)
    context = replace(fresh, dataset=stored, features=lambda x: trained().features(x))
    stage = SequenceStage if data.spec.is_sequences else ImageStage
    return stage(plan, population, prepare_all(plan.backdoors, context))


def _check_drawable(spec: Spec | None) -> None:
    if spec is None or spec.is_sequences:
        return
    if len(spec.sample_shape) != 3 or spec.sample_shape[0] not in (1, 3):
        raise UserError(
            f"preview draws images of shape (1 or 3, height, width) and sequences, "
            f"{spec.name} has samples of shape {spec.sample_shape}"
        )


def plan_of(overrides: list[str]) -> Plan:
    """The plan of a run by its command line."""
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: preview draws one setting, not a sweep")
    register_schema()
    try:
        with initialize_config_module("fedbench.conf", version_base="1.3"):
            composed = compose("config", overrides=overrides)
    except ValueError as error:  # so Hydra tells a few mistakes, such as `defense=null`
        raise UserError(f"{error}, in {' '.join(overrides)}") from error
    return Plan.of(RunConfig.from_hydra(composed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fedbench.preview",
        description="Draws clean and triggered samples of an attack on a data set.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of python -m fedbench")
    parser.add_argument("--to", type=Path, default=Path("preview.png"), metavar="FILE.png")
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="of a row")
    try:
        options, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if {"-m", "--multirun"} & {*unknown}:
        raise UserError("-m: preview draws one setting, not a sweep")
    if unknown:
        raise UserError(f"{unknown[0]}: no such option{nearest(unknown[0], ('--samples', '--to'))}")
    if not 1 <= options.samples <= MAX_SAMPLES:
        raise UserError(f"--samples {options.samples}: must be between 1 and {MAX_SAMPLES}")
    if options.to.suffix.lower() != ".png" or options.to.is_dir():
        raise UserError(f"--to {options.to}: must be a file that ends in .png")
    if not options.to.parent.is_dir():
        raise UserError(f"--to {options.to}: there is no folder {options.to.parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _options(arguments)
        plan = plan_of(options.overrides)
        title = f"{plan.config.attack['name']} on {plan.config.dataset['name']}"
        drawn = prepared(plan).draw(title, options.samples)
        write_atomically(options.to, lambda file: drawn.save(file, "PNG"))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        line = one_line(error)
        if line is None or os.environ.get("FEDBENCH_TRACEBACK") == "1":
            raise
        print(line, file=sys.stderr)
        return 1
    print(options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
