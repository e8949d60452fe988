"""The contract of a backdoor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbench.backdoor import BACKDOORS, Backdoor, PreparedBackdoor
from fedbench.data import Dataset
from fedbench.errors import UserError
from fedbench.metrics import IGNORED, EvaluationSet
from fedbench.testing.compare import Unchanged, bits, no_global_randomness
from fedbench.testing.contract import Contract, Inspection, check, raise_if_broken
from fedbench.testing.samples import context_of, examples
from fedbench.testing.verify import verify_class


@dataclass(frozen=True, eq=False)
class OnDatasets:
    """A backdoor and the data sets to try it on."""

    backdoor: Backdoor
    datasets: Sequence[Dataset]

    def __deepcopy__(self, memo: Any) -> OnDatasets:
        return OnDatasets(copy.deepcopy(self.backdoor, memo), self.datasets)

    def refusal(self, dataset: Dataset) -> str | None:
        """Return why the backdoor does not fit the data set, None if it does."""
        try:
            self.backdoor.check(dataset.spec)
            self.backdoor.prepare(context_of(dataset))
        except (ValueError, UserError) as error:
            return str(error)
        return None

    def prepared(self) -> Iterator[tuple[Dataset, PreparedBackdoor]]:
        for dataset in self.datasets:
            if self.refusal(dataset) is None:
                yield dataset, self.backdoor.prepare(context_of(dataset))


@check()
def plugin_class(subject: OnDatasets) -> None:
    """The class is a frozen dataclass and derives from Backdoor."""
    verify_class(subject.backdoor, Backdoor)


@check("plugin_class")
def fit(subject: OnDatasets) -> None:
    """The backdoor fits a data set, and refuses others with a line that says why."""
    refusals = {dataset.name: subject.refusal(dataset) for dataset in subject.datasets}
    for name, line in refusals.items():
        clear = line is None or (line and "\n" not in line)
        assert clear, f"the error on {name} must be one line, got {line!r}"
    why = "; ".join(f"{name}: {line}" for name, line in refusals.items())
    fits = None in refusals.values()
    assert fits, (
        f"the backdoor fits none of the data sets ({why}); give data sets that it fits: "
        "check_backdoor(backdoor, datasets), or `datasets` in a BackdoorContract"
    )
    for _, backdoor in subject.prepared():
        ready = isinstance(backdoor, PreparedBackdoor)
        assert ready, f"prepare must return a PreparedBackdoor, got {type(backdoor).__name__}"


@check("fit")
def poison(subject: OnDatasets) -> None:
    """`poison` returns changed samples and labels, of the same shapes and dtypes."""
    for dataset, backdoor in subject.prepared():
        for n in (0, 1, 5, len(dataset.x_train)):
            x, y = dataset.x_train[:n], dataset.y_train[:n]
            # Clones: a backdoor that modifies its inputs changes the samples, too.
            new_x, new_y = backdoor.poison(x.clone(), y.clone(), torch.Generator().manual_seed(0))
            _verify_alike("x", new_x, x, n, dataset)
            _verify_alike("y", new_y, y, n, dataset)
            changed = bits([new_x, new_y]) != bits([x, y])
            assert changed or n < 5, f"poison returns {n} samples of {dataset.name} unchanged"


def _verify_alike(name: str, new: Tensor, old: Tensor, n: int, dataset: Dataset) -> None:
    same = (new.shape, new.dtype) == (old.shape, old.dtype)
    assert same, (
        f"poison must return {name} of {n} samples of {dataset.name} as {old.dtype} of shape "
        f"{tuple(old.shape)}, got {new.dtype} of shape {tuple(new.shape)}"
    )


@check("fit")
def evaluation(subject: OnDatasets) -> None:
    """`evaluation_set` has samples like those of the data set, with labels to predict."""
    for dataset, backdoor in subject.prepared():
        probe = backdoor.evaluation_set(dataset.x_test.clone(), dataset.y_test.clone())
        is_set = isinstance(probe, EvaluationSet)
        assert is_set, f"evaluation_set must return an EvaluationSet, got {type(probe).__name__}"
        x, expected = probe.x, probe.expected
        alike = x.shape[1:] == dataset.x_test.shape[1:] and x.dtype == dataset.x_test.dtype
        assert alike, (
            f"samples of {dataset.name} to measure BA on must be {dataset.x_test.dtype} of shape "
            f"{dataset.input_shape}, got {x.dtype} of shape {tuple(x.shape[1:])}"
        )
        shape = (len(x), *dataset.y_test.shape[1:])
        same = tuple(expected.shape) == shape
        assert same, f"expected must have shape {shape}, got {tuple(expected.shape)}"
        counted = expected[expected != IGNORED]
        assert len(counted), f"evaluation_set has no label to predict on {dataset.name}"
        known = bool(((counted >= 0) & (counted < dataset.n_classes)).all())
        assert known, f"expected labels must be 0..{dataset.n_classes - 1}, or {IGNORED} to ignore"


@check("poison", "evaluation")
def inputs(subject: OnDatasets) -> None:
    """`poison` and `evaluation_set` leave the samples that they receive unchanged."""
    for dataset, backdoor in subject.prepared():
        x, y = dataset.x_test.clone(), dataset.y_test.clone()
        unchanged = Unchanged(x=x, y=y)
        backdoor.poison(x, y, torch.Generator().manual_seed(0))
        unchanged.verify("poison")
        backdoor.evaluation_set(x, y)
        unchanged.verify("evaluation_set")


@check("inputs")
def same_seed(subject: OnDatasets) -> None:
    """The same seed gives the same samples; global random generators are not used."""
    for dataset, backdoor in subject.prepared():
        with no_global_randomness("prepare"):
            other = subject.backdoor.prepare(context_of(dataset))
        expected = _drawn(backdoor, dataset)
        for calls, again in (("calls", backdoor), ("preparations", other)):
            for method, found in _drawn(again, dataset).items():
                assert found == expected[method], f"{method} differs between two {calls}"


def _drawn(backdoor: PreparedBackdoor, dataset: Dataset) -> dict[str, Any]:
    """Return the samples of each method, to compare bit by bit."""
    with no_global_randomness("poison"):
        rng = torch.Generator().manual_seed(4)
        poisoned = backdoor.poison(dataset.x_train, dataset.y_train, rng)
    with no_global_randomness("evaluation_set"):
        probe = backdoor.evaluation_set(dataset.x_test, dataset.y_test)
    return {"poison": bits([*poisoned]), "evaluation_set": bits([probe.x, probe.expected])}


BACKDOOR: Contract[Backdoor] = Contract(
    BACKDOORS, plugin_class, fit, poison, evaluation, inputs, same_seed
)


def inspect_backdoor(
    backdoor: Any, datasets: Sequence[Dataset] | None = None
) -> Inspection[Backdoor]:
    """Return the inspection of a backdoor on these data sets, or on small examples."""
    return Inspection(BACKDOOR, backdoor, lambda plugin: OnDatasets(plugin, datasets or examples()))


def check_backdoor(
    backdoor: Backdoor | type[Backdoor] | str | dict[str, Any],
    datasets: Sequence[Dataset] | None = None,
) -> None:
    """Run all checks on a backdoor: an instance, a class, a registered name or settings.

    `datasets` are the data sets to try it on; by default small images, feature vectors and
    sequences. Raises one AssertionError that explains every broken check.
    """
    raise_if_broken(inspect_backdoor(backdoor, datasets))
