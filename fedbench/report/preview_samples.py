"""Rows of the attack preview: clean samples, what BA is measured on, what attackers train on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from fedbench.attack import Poisoning
from fedbench.backdoor import BackdoorSamples, PreparedBackdoor, settings_of
from fedbench.data import Dataset
from fedbench.metrics import IGNORED, EvaluationSet
from fedbench.plan import Plan
from fedbench.report import preview_figure
from fedbench.report.partition_figure import class_names, symbol_names
from fedbench.report.preview_figure import LabeledImage, LabeledSequence, PreviewRow, T
from fedbench.rng import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_COMPARED = 100  # samples on which the poisoning of two clients is compared
Sample = tuple[Tensor, Tensor]  # x and y


@dataclass(eq=False)
class SamplePreview(ABC, Generic[T]):
    """Samples of a run before round 0; T is how a sample is shown."""

    plan: Plan
    dataset: Dataset
    shards: Sequence[Tensor]
    malicious: Sequence[int]
    backdoors: Sequence[PreparedBackdoor]

    @abstractmethod
    def figure(self, title: str, n: int) -> Figure:
        """Draw all rows, with at most n samples each."""

    @abstractmethod
    def _clean(self, x: Tensor, y: Tensor) -> T:
        """Show a clean sample with its label."""

    @abstractmethod
    def _poisoned(self, x: Tensor, y: Tensor, clean: Sample | None = None) -> T:
        """Show a poisoned sample with the attacker's label; `clean` is what it was made from."""

    def rows(self, n: int) -> list[PreviewRow[T]]:
        """Return the rows of the figure, with at most n samples each."""
        places = self._test_places(n)
        trained = [self._training_row(slots, n) for slots in self._poisoning_groups()]
        details = "Test samples."
        if not self.malicious:
            details += " No client attacks."
        elif not trained:
            details += f" {self.plan.config.attack['name']} changes updates, not samples."
        clean = map(self._clean, self.dataset.x_test[places], self.dataset.y_test[places])
        rows = [PreviewRow("clean", details, [*clean])]
        all_settings = self.plan.backdoor_settings
        for i, settings in enumerate(all_settings):
            if settings not in all_settings[:i]:
                named = settings_of(settings)
                values = [f"{key}={value}" for key, value in named.items() if key != "name"]
                details = f"BA is measured on these. {', '.join(values)}".rstrip()
                rows.append(PreviewRow(named["name"], details, self._measured(i, places, n)))
        return [*rows, *trained]

    def _test_places(self, n: int) -> list[int]:
        """Choose n test samples, if possible such that every trigger applies to them."""
        order = self._shuffled_by_class(self.dataset.y_test)
        triggers = [b for b in self.backdoors if not len(self._evaluation_set(b, []).x)]
        shared = (i for i in order if all(len(self._evaluation_set(b, [i]).x) for b in triggers))
        return [*islice(shared, n)] or order[:n]

    def _shuffled_by_class(self, labels: Tensor) -> list[int]:
        """Shuffle sample indices, then interleave the classes: one of each, one of each, ..."""
        seen: Counter[int] = Counter()
        turns, classes = [], labels.tolist() if labels.dim() == 1 else [0] * len(labels)
        for place in torch.randperm(len(classes), generator=self._rng()).tolist():
            turns.append((seen[classes[place]], classes[place], place))
            seen[classes[place]] += 1
        return [place for _, _, place in sorted(turns)]

    def _class_name(self, label: Tensor | int) -> str:
        return self._class_names.get(int(label), str(int(label)))

    @cached_property
    def _class_names(self) -> dict[int, str]:
        return class_names(self.dataset)

    def _rng(self) -> torch.Generator:
        return generator(self.plan.config.seed, "preview")

    def _evaluation_set(self, backdoor: PreparedBackdoor, places: list[int]) -> EvaluationSet:
        """BA's samples made from these test samples; from none, the backdoor's own samples."""
        return backdoor.evaluation_set(self.dataset.x_test[places], self.dataset.y_test[places])

    def _measured(self, i: int, places: list[int], n: int) -> list[T | None]:
        """Samples BA is measured on: the backdoor's own, or triggered test samples."""
        own = self._evaluation_set(self.backdoors[i], [])
        if len(own.x):
            return [*map(self._poisoned, own.x[:n], own.expected[:n])]
        samples: list[T | None] = []
        for place in places:
            made = self._evaluation_set(self.backdoors[i], [place])
            clean = self.dataset.x_test[place], self.dataset.y_test[place]
            applies = len(made.x) > 0  # BA leaves out samples of the target class
            samples.append(self._poisoned(made.x[0], made.expected[0], clean) if applies else None)
        return samples

    @cached_property
    def _replacements(self) -> set[bytes]:
        """Samples that backdoors bring along to replace a client's own."""
        own = (backdoor for backdoor in self.backdoors if isinstance(backdoor, BackdoorSamples))
        return {_bytes(x) for samples in own for x in (*samples.x_train, *samples.x_test)}

    def _poisoning_groups(self) -> list[list[int]]:
        """Group malicious clients by how they poison the same samples; drop those that do not."""
        slots = range(len(self.malicious))
        groups: dict[bytes, list[int]] = {}
        if slots:
            samples = self._held(slots)[:N_COMPARED]
            for slot in slots:
                groups.setdefault(_bytes(*self._poison(samples, slot)), []).append(slot)
            unchanged = _bytes(self.dataset.x_train[samples], self.dataset.y_train[samples])
            groups.pop(unchanged, None)
        return [*groups.values()]

    def _held(self, slots: Sequence[int]) -> Tensor:
        """Training samples of malicious clients, shuffled by class."""
        held = torch.cat([self.shards[self.malicious[slot]] for slot in slots])
        return held[self._shuffled_by_class(self.dataset.y_train[held])]

    def _poison(self, samples: Tensor, slot: int) -> Sample:
        x, y = self.dataset.x_train[samples], self.dataset.y_train[samples]
        poisoning = Poisoning(slot, self.backdoors, 1.0, self.dataset.n_classes, self._rng())
        return self.plan.attack.poison(x, y, poisoning)

    def _training_row(self, slots: Sequence[int], n: int) -> PreviewRow[T]:
        """Poisoned training samples of the malicious clients in these slots."""
        samples = self._held(slots)[:n]
        x, y = self._poison(samples, slots[0])
        clean = zip(self.dataset.x_train[samples], self.dataset.y_train[samples], strict=True)
        who = "all malicious clients"
        if len(slots) < len(self.malicious):
            ids = sorted(self.malicious[slot] for slot in slots)
            who = f"malicious client{'s'[: len(ids) - 1]} {', '.join(map(str, ids))}"
        details = f"Poisoned training samples of {who} (pdr={self.plan.config.pdr:g})."
        return PreviewRow("training", details, [*map(self._poisoned, x, y, clean)])


class ImagePreview(SamplePreview[LabeledImage]):
    """Images with their labels."""

    def figure(self, title: str, n: int) -> Figure:
        return preview_figure.image_figure(title, self.rows(n))

    def _clean(self, x: Tensor, y: Tensor) -> LabeledImage:
        return LabeledImage(_drawable(x), self._class_name(y), poisoned=False)

    def _poisoned(self, x: Tensor, y: Tensor, clean: Sample | None = None) -> LabeledImage:
        """Show the true label, if known, and the attacker's."""
        known = "" if clean is None else self._class_name(clean[1])
        true = self._replacement_labels.get(_bytes(x), known)
        label = f"{true} → {self._class_name(y)}".lstrip()
        return LabeledImage(_drawable(x), label, poisoned=True)

    @cached_property
    def _replacement_labels(self) -> dict[bytes, str]:
        """True labels of replacement images; empty for images from outside the data set."""
        data, labels = self.dataset, dict.fromkeys(self._replacements, "")
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)) if labels else ():
            known = ((_bytes(image), label) for image, label in zip(x, y.tolist(), strict=True))
            labels |= {key: self._class_name(label) for key, label in known if key in labels}
        return labels


class SequencePreview(SamplePreview[LabeledSequence]):
    """Sequences with the names of their symbols."""

    def figure(self, title: str, n: int) -> Figure:
        return preview_figure.sequence_figure(title, self.rows(n))

    def _clean(self, x: Tensor, y: Tensor) -> LabeledSequence:
        return LabeledSequence(self._names(x), [False] * len(x), self._label(y), poisoned=False)

    def _poisoned(self, x: Tensor, y: Tensor, clean: Sample | None = None) -> LabeledSequence:
        if clean is None or _bytes(x) in self._replacements:
            changed = [True] * len(x)
        else:
            changed = (x != clean[0]).tolist()
        return LabeledSequence(self._names(x), changed, self._label(y), poisoned=True)

    def _label(self, y: Tensor) -> str | None:
        """The label, or the last of several, which is the target in a poisoned sequence."""
        last = y if y.dim() == 0 else y[-1]
        return None if int(last) == IGNORED else self._class_name(last)

    def _names(self, symbols: Tensor) -> list[str]:
        return [self._vocabulary.get(i, str(i)) for i in symbols.tolist()]

    @cached_property
    def _vocabulary(self) -> dict[int, str]:
        return symbol_names(self.dataset)


def _drawable(image: Tensor) -> Tensor:
    """Return an image with pixels 0..255 as bytes."""
    return image.clamp(0, 255).round().to(torch.uint8)


def _bytes(*values: Tensor) -> bytes:
    return b"".join(value.cpu().numpy().tobytes() for value in values)
