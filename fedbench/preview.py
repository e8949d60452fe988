"""Draw how an attack changes samples: `python -m fedbench.preview attack=dba`.

The figure has a row of clean test samples, a row per backdoor of what BA is measured on, and a row
of training samples per group of malicious clients that poison their data in the same way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from fedbench.backdoor import BackdoorContext, prepare_all
from fedbench.composition import compose
from fedbench.data import Kind, Spec
from fedbench.display.console import Display
from fedbench.errors import UserError, nearest, print_error
from fedbench.plan import Plan
from fedbench.pretraining import pretrained
from fedbench.report.plotting import save_png
from fedbench.report.preview_samples import ImagePreview, SequencePreview
from fedbench.single_run import build_rank_context

MAX_SAMPLES = 100


def build_preview(plan: Plan) -> ImagePreview | SequencePreview:
    """Build the clients and backdoors of a run in this process."""
    _check_drawable(plan.source.spec)
    data = plan.source.load()
    _check_drawable(data.spec)
    plan = plan.fitted(data.spec)
    # Imported late: Lightning takes seconds, and user errors should appear before.
    from fedbench.engine.launch import make_fabric
    from fedbench.engine.ranks import RankGroup
    from fedbench.federation import Federation

    config, executor = plan.config, plan.executor
    torch.set_num_threads(executor.threads)
    fabric = make_fabric(executor, 1)
    rank_context = build_rank_context(plan, data.to(fabric.device), fabric)
    federation = Federation(RankGroup(executor, rank_context), plan.defense)

    @cache
    def pretrained_context() -> BackdoorContext:
        # On stderr: stdout has the path of the figure alone.
        display = Display(plan.title, config.rounds, console=Console(stderr=True))
        start = pretrained(plan, federation, display)
        return rank_context.backdoor_context(start.initial_params, start.initial_buffers)

    # Pretrain only if a backdoor asks for features.
    fresh = rank_context.backdoor_context(*federation.fresh)
    # Show samples as stored, not augmented: ImagePreview looks up labels by pixels.
    stored = replace(rank_context.dataset, augment=None)
    context = replace(fresh, dataset=stored, features=lambda x: pretrained_context().features(x))
    backdoors = prepare_all(plan.backdoors, context)
    preview = SequencePreview if data.kind.is_sequences else ImagePreview
    shards, attackers = rank_context.data.shards, rank_context.attackers
    return preview(plan, rank_context.dataset, shards, attackers, backdoors)


def _check_drawable(spec: Spec | None) -> None:
    if spec is None or spec.kind.is_sequences:
        return
    if spec.kind is not Kind.IMAGES or spec.sample_shape[:-2] not in ((1,), (3,)):
        raise UserError(
            f"preview draws images of shape (1 or 3, height, width) and sequences, "
            f"{spec.name} has {spec.kind} of shape {spec.sample_shape}"
        )


def plan_of(overrides: list[str]) -> Plan:
    """Compose the plan of a single run from command-line overrides."""
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: preview draws one run, not a sweep")
    return Plan.of(compose(overrides))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fedbench preview",
        description="Draw clean and poisoned samples of an attack on a data set.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--to", type=Path, default=Path("preview.png"), metavar="FILE.png")
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="samples per row")
    try:
        options, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if {"-m", "--multirun"} & {*unknown}:
        raise UserError("-m: preview draws one run, not a sweep")
    if unknown:
        raise UserError(f"{unknown[0]}: no such option{nearest(unknown[0], ('--samples', '--to'))}")
    if not 1 <= options.samples <= MAX_SAMPLES:
        raise UserError(f"--samples {options.samples}: must be between 1 and {MAX_SAMPLES}")
    if options.to.suffix.lower() != ".png" or options.to.is_dir():
        raise UserError(f"--to {options.to}: must be a file ending in .png")
    if not options.to.parent.is_dir():
        raise UserError(f"--to {options.to}: no folder {options.to.parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _options(arguments)
        plan = plan_of(options.overrides)
        title = f"{plan.config.attack['name']} on {plan.config.dataset['name']}"
        save_png(build_preview(plan).figure(title, options.samples), options.to)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print_error(error)
        return 1
    print(options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
