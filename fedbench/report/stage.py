"""What becomes of samples in an attack, sample by sample, as rows of a picture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Generic

import torch
from PIL import Image
from torch import Tensor

from fedbench.attack import Poisoning
from fedbench.backdoor import BackdoorSamples, PreparedBackdoor, settings_of
from fedbench.metrics import IGNORED, EvaluationSet
from fedbench.plan import Plan
from fedbench.report import lines, picture
from fedbench.report.lines import Line
from fedbench.report.partition_figure import names_of
from fedbench.report.picture import Row, T, Tile
from fedbench.rng import generator

if TYPE_CHECKING:  # it imports Lightning, which takes seconds
    from fedbench.engine.population import Population

REFERENCE = 100  # samples by which ways to poison are told apart


class Stage(ABC, Generic[T]):
    """A run's clients and backdoors as they are before round 0; T is how a sample is shown."""

    def __init__(
        self, plan: Plan, population: Population, backdoors: Sequence[PreparedBackdoor]
    ) -> None:
        self.plan, self.population, self.backdoors = plan, population, backdoors
        self.data = population.dataset
        self.malicious = population.malicious if plan.attack.active else []

    @abstractmethod
    def draw(self, title: str, n: int) -> Image.Image:
        """The picture, with at most n samples in a row."""

    @abstractmethod
    def _clean(self, x: Tensor, y: Tensor) -> T:
        """A sample with its label."""

    @abstractmethod
    def _tile(self, x: Tensor, given: Tensor, before: tuple[Tensor, Tensor] | None = None) -> T:
        """A sample that an attacker made, with its label; before: of what, if it was made so."""

    def rows(self, n: int) -> list[Row[T]]:
        """The rows of the picture, at most n samples each."""
        columns = self._columns(n)
        clean = map(self._clean, self.data.x_test[columns], self.data.y_test[columns])
        trained = [self._trained(slots, n) for slots in self._ways()]
        about = "Test samples."
        if not self.malicious:
            about += " No client attacks."
        elif not trained:
            about += f" {self.plan.config.attack['name']} changes updates, not samples."
        rows = [Row("clean", about, [*clean])]
        planted = self.plan.attack.backdoor_settings(self.plan.source.backdoors)
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
        made = [backdoor for backdoor in self.backdoors if not len(self._probe(backdoor, []).x)]
        shared = (i for i in order if all(len(self._probe(backdoor, [i]).x) for backdoor in made))
        return [*islice(shared, n)] or order[:n]

    def _varied(self, labels: Tensor) -> list[int]:
        """The places of all samples in random order, but with the classes in turn, if they have."""
        seen: Counter[int] = Counter()
        turns, values = [], labels.tolist() if labels.dim() == 1 else [0] * len(labels)
        for place in torch.randperm(len(values), generator=self._rng()).tolist():
            turns.append((seen[values[place]], values[place], place))
            seen[values[place]] += 1
        return [place for _, _, place in sorted(turns)]

    def _rng(self) -> torch.Generator:
        return generator(self.plan.config.seed, "preview")

    def _probe(self, backdoor: PreparedBackdoor, places: list[int]) -> EvaluationSet:
        """What BA is measured on of these test samples; of none, the backdoor's own samples."""
        return backdoor.evaluation_set(self.data.x_test[places], self.data.y_test[places])

    def _measured(self, i: int, columns: list[int], n: int) -> list[T | None]:
        """What BA is measured on: the backdoor's own samples, or what it makes of the columns."""
        own = self._probe(self.backdoors[i], [])
        if len(own.x):
            return [self._tile(x, y) for x, y in zip(own.x[:n], own.expected[:n], strict=True)]
        tiles: list[T | None] = []
        for place in columns:
            made = self._probe(self.backdoors[i], [place])
            before = self.data.x_test[place], self.data.y_test[place]
            kept = len(made.x) > 0  # not a sample of the target's class
            tiles.append(self._tile(made.x[0], made.expected[0], before) if kept else None)
        return tiles

    @cached_property
    def _collected(self) -> set[bytes]:
        """Samples that replace others."""
        replacing = (i for i in self.backdoors if isinstance(i, BackdoorSamples))
        return {_bytes(x) for c in replacing for x in (*c.x_train, *c.x_test)}

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
        poisoning = Poisoning(slot, self.backdoors, 1.0, self.data.n_classes, self._rng())
        return self.plan.attack.poison(x, y, poisoning)

    def _trained(self, slots: Sequence[int], n: int) -> Row[T]:
        """What the clients of these slots train on."""
        samples = self._held(slots)[:n]
        x, y = self._poisoned(samples, slots[0])
        before = zip(self.data.x_train[samples], self.data.y_train[samples], strict=True)
        tiles = map(self._tile, x, y, before)
        who = "all malicious clients"
        if len(slots) < len(self.malicious):
            ids = sorted(self.malicious[slot] for slot in slots)
            who = f"malicious client{'s'[: len(ids) - 1]} {', '.join(map(str, ids))}"
        about = f"Poisoned, a share pdr={self.plan.config.pdr:g} of the data of {who}."
        return Row("training", about, [*tiles])


class ImageStage(Stage[Tile]):
    """Images with labels below."""

    def draw(self, title: str, n: int) -> Image.Image:
        return picture.draw(title, self.rows(n))

    def _clean(self, x: Tensor, y: Tensor) -> Tile:
        return x, str(int(y))

    def _tile(self, x: Tensor, given: Tensor, before: tuple[Tensor, Tensor] | None = None) -> Tile:
        """With its true label, if that is known, and the one that it is given."""
        usual = "" if before is None else str(int(before[1]))
        return x, f"{self._labels.get(_bytes(x), usual)} -> {int(given)}".lstrip()

    @cached_property
    def _labels(self) -> dict[bytes, str]:
        """Of images that replace samples: the data set's label for each, if it is from there."""
        data, labels = self.data, dict.fromkeys(self._collected, "")
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)) if labels else ():
            own = ((_bytes(image), label) for image, label in zip(x, y.tolist(), strict=True))
            labels |= {key: str(label) for key, label in own if key in labels}
        return labels


class SequenceStage(Stage[Line]):
    """Sequences by the names of their symbols."""

    def draw(self, title: str, n: int) -> Image.Image:
        return lines.draw(title, self.rows(n))

    def _clean(self, x: Tensor, y: Tensor) -> Line:
        return Line(self._names(x), [False] * len(x), self._label(y), given=False)

    def _tile(self, x: Tensor, given: Tensor, before: tuple[Tensor, Tensor] | None = None) -> Line:
        if before is None or _bytes(x) in self._collected:
            changed = [True] * len(x)
        else:
            changed = (x != before[0]).tolist()
        return Line(self._names(x), changed, self._label(given), given=True)

    def _label(self, y: Tensor) -> str | None:
        """Of the last symbol: in a poisoned sequence the target."""
        return None if int(y[-1]) == IGNORED else self._names(y[-1:])[0]

    def _names(self, symbols: Tensor) -> list[str]:
        return [self._vocabulary.get(i, str(i)) for i in symbols.tolist()]

    @cached_property
    def _vocabulary(self) -> dict[int, str]:
        return names_of(self.data)


def _bytes(*values: Tensor) -> bytes:
    return b"".join(value.cpu().numpy().tobytes() for value in values)
