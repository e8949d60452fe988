"""A picture of an attack: `python -m fedbench.preview attack=dba` draws what becomes of samples.

A row of clean test samples; for each backdoor a row of what BA is measured on; for each way in
which malicious clients poison their data a row of what they train on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from torch import Tensor

from fedbench.attack import Poisoning
from fedbench.backdoor import Collection, Implant, Scene, make_ready, settings_of
from fedbench.config import RunConfig, register_schema
from fedbench.console import Display
from fedbench.data import Spec
from fedbench.errors import UserError, nearest, one_line
from fedbench.executors import Workforce
from fedbench.metrics import Probe
from fedbench.picture import Row, Tile, draw
from fedbench.rng import generator
from fedbench.run import Plan, population_of, pretrained
from fedbench.storage import write_atomically

if TYPE_CHECKING:  # Lightning takes seconds to import: mistakes are told before it is
    from fedbench.population import Population

MAX_SAMPLES = 100
REFERENCE = 100  # samples by which ways to poison are told apart


class Stage:
    """A run's clients and backdoors as they are before round 0."""

    def __init__(self, plan: Plan, population: Population, implants: Sequence[Implant]) -> None:
        self.plan, self.population, self.implants = plan, population, implants
        self.data = population.dataset
        self.malicious = population.malicious if plan.attack.active else []

    def rows(self, n: int) -> list[Row]:
        """The rows of the picture, at most n images each."""
        columns = self._columns(n)
        labels = map(str, self.data.y_test[columns].tolist())
        trained = [self._trained(slots, n) for slots in self._ways()]
        about = "Test samples."
        if not self.malicious:
            about += " No client attacks."
        elif not trained:
            about += f" {self.plan.config.attack['name']} changes updates, not samples."
        rows = [Row("clean", about, [*zip(self.data.x_test[columns], labels, strict=True)])]
        planted = self.plan.attack.planted(self.plan.source.backdoors)
        for i, settings in enumerate(planted):
            if settings not in planted[:i]:  # else the same row again
                given = settings_of(settings)
                details = [f"{key}={value}" for key, value in given.items() if key != "name"]
                about = f"BA is measured on these. {', '.join(details)}"
                rows.append(Row(given["name"], about, self._measured(i, columns, n)))
        return [*rows, *trained]

    def _columns(self, n: int) -> list[int]:
        """Places of test samples: those that every backdoor is measured on, if there are such."""
        order = self._varied(self.data.y_test)
        made = [implant for implant in self.implants if not len(self._probe(implant, []).x)]
        shared = (i for i in order if all(len(self._probe(implant, [i]).x) for implant in made))
        return [*islice(shared, n)] or order[:n]

    def _varied(self, labels: Tensor) -> list[int]:
        """The places of all samples in random order, but with the classes in turn."""
        seen: Counter[int] = Counter()
        turns, values = [], labels.tolist()
        for place in torch.randperm(len(values), generator=self._rng()).tolist():
            turns.append((seen[values[place]], values[place], place))
            seen[values[place]] += 1
        return [place for _, _, place in sorted(turns)]

    def _rng(self) -> torch.Generator:
        return generator(self.plan.config.seed, "preview")

    def _probe(self, implant: Implant, places: list[int]) -> Probe:
        """What BA is measured on of these test samples; of none, the backdoor's own samples."""
        return implant.probe(self.data.x_test[places], self.data.y_test[places])

    def _measured(self, i: int, columns: list[int], n: int) -> list[Tile | None]:
        """What BA is measured on: the backdoor's own samples, or what it makes of the columns."""
        own = self._probe(self.implants[i], [])
        if len(own.x):
            return [self._tile(x, y) for x, y in zip(own.x[:n], own.expected[:n], strict=True)]
        tiles: list[Tile | None] = []
        for place in columns:
            made, label = self._probe(self.implants[i], [place]), self.data.y_test[place]
            kept = len(made.x) > 0  # not a sample of the target's class
            tiles.append(self._tile(made.x[0], made.expected[0], label) if kept else None)
        return tiles

    def _tile(self, image: Tensor, given: Tensor, label: Tensor | None = None) -> Tile:
        """An image with its true label, if that is known, and the one that it is given."""
        usual = "" if label is None else str(int(label))
        return image, f"{self._collected.get(_bytes(image), usual)} -> {int(given)}".lstrip()

    @cached_property
    def _collected(self) -> dict[bytes, str]:
        """Images that replace samples: the data set's label for each, if it is from there."""
        data, replacing = self.data, [i for i in self.implants if isinstance(i, Collection)]
        images = (x for collection in replacing for x in (*collection.x_train, *collection.x_test))
        labels = dict.fromkeys(map(_bytes, images), "")
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)) if labels else ():
            own = ((_bytes(image), label) for image, label in zip(x, y.tolist(), strict=True))
            labels |= {key: str(label) for key, label in own if key in labels}
        return labels

    def _ways(self) -> list[list[int]]:
        """The slots of malicious clients by what becomes of the same samples, if anything."""
        everyone = range(len(self.malicious))
        ways: dict[bytes, list[int]] = {}
        if everyone:
            samples = self._held(everyone)[:REFERENCE]
            for slot in everyone:
                ways.setdefault(_bytes(*self._poisoned(samples, slot)), []).append(slot)
            ways.pop(_bytes(self.data.x_train[samples], self.data.y_train[samples]), None)
        return [*ways.values()]

    def _held(self, slots: Sequence[int]) -> Tensor:
        held = torch.cat([self.population.shards[self.malicious[slot]] for slot in slots])
        return held[self._varied(self.data.y_train[held])]

    def _poisoned(self, samples: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        x, y = self.data.x_train[samples], self.data.y_train[samples]
        orders = Poisoning(slot, self.implants, 1.0, self.data.n_classes, self._rng())
        return self.plan.attack.poison(x, y, orders)

    def _trained(self, slots: Sequence[int], n: int) -> Row:
        """What the clients of these slots train on."""
        samples = self._held(slots)[:n]
        x, y = self._poisoned(samples, slots[0])
        tiles = map(self._tile, x, y, self.data.y_train[samples])
        who = "all malicious clients"
        if len(slots) < len(self.malicious):
            ids = sorted(self.malicious[slot] for slot in slots)
            who = f"malicious client{'s'[: len(ids) - 1]} {', '.join(map(str, ids))}"
        about = f"Poisoned, a share pdr={self.plan.config.pdr:g} of the data of {who}."
        return Row("training", about, [*tiles])


def _bytes(*values: Tensor) -> bytes:
    return b"".join(value.cpu().numpy().tobytes() for value in values)


def prepared(plan: Plan) -> Stage:
    """The clients and backdoors of a run, in this process alone."""
    _check_images(plan.source.spec)
    data = plan.source.load()
    _check_images(data.spec)
    plan.check_fit(data.spec)
    from fedbench.federation import Federation

    config, executor = plan.config, replace(plan.executor, devices=1)
    torch.set_num_threads(executor.threads)
    fabric = executor.fabric()
    population = population_of(plan, data.to(fabric.device), fabric)
    federation = Federation(population, Workforce(executor, fabric, population), plan.defense)

    @cache
    def trained() -> Scene:
        # On stderr: stdout is for the path of the picture.
        display = Display(config.title, config.rounds, console=Console(stderr=True))
        start = pretrained(config, federation, display)
        return population.scene(start.initial_params, start.initial_buffers)

    # Few backdoors ask for features; for the others nothing is trained.
    fresh = population.scene(*federation.fresh)
    scene = replace(fresh, features=lambda x: trained().features(x))
    return Stage(plan, population, make_ready(plan.backdoors, scene))


def _check_images(spec: Spec | None) -> None:
    if spec is not None and (len(spec.sample_shape) != 3 or spec.sample_shape[0] not in (1, 3)):
        raise UserError(
            f"preview draws images of shape (1 or 3, height, width), "
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
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="images in a row")
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
        picture = draw(title, prepared(plan).rows(options.samples))
        write_atomically(options.to, lambda file: picture.save(file, "PNG"))
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
