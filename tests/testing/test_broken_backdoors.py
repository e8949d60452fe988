"""Each check of a backdoor: one that breaks exactly one promise fails exactly that check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from broken import failures, verify_only_failure
from torch import Tensor

from fedbench.backdoor import (
    Backdoor,
    BackdoorContext,
    BackdoorSamples,
    PixelTrigger,
    PreparedBackdoor,
)
from fedbench.data import Dataset, Spec
from fedbench.metrics import IGNORED, EvaluationSet
from fedbench.testing import check_backdoor
from fedbench.testing.backdoors import BACKDOOR, inspect_backdoor
from fedbench.testing.samples import examples, images


@dataclass(frozen=True)
class Corner(PixelTrigger):
    """The correct backdoor that the broken ones vary: two pixels."""

    def pixels(self, height: int, width: int) -> list[tuple[int, int]]:
        return [(0, 0), (0, 1)]


@dataclass(frozen=True)
class Held(Backdoor):
    """Another correct one, with samples of its own: those of a malicious client, for any data."""

    def prepare(self, context: BackdoorContext) -> BackdoorSamples:
        data, (first, *others) = context.dataset, context.malicious_samples[:5]
        labels = data.y_train.roll(1, dims=0)
        train = torch.stack(others)
        test = first[None]
        return BackdoorSamples(data.x_train[train], labels[train], data.x_train[test], labels[test])


@dataclass(frozen=True)
class NotABackdoor:
    version: ClassVar[int] = 1


class NotFrozen(Corner):
    pass


@dataclass(frozen=True)
class OldVersion(Corner):
    version: ClassVar[int] = 0


@dataclass(frozen=True)
class Refuses(Corner):
    """Refuse data, or fail to, in a way of its own."""

    how: Callable[[Spec], Any] = lambda spec: None

    def check(self, spec: Spec) -> None:
        self.how(spec)


def refuse(*message: str) -> Any:
    raise ValueError(*message)


@dataclass(frozen=True)
class Prepares(Corner):
    what: Callable[[PixelTrigger, BackdoorContext], Any] = lambda trigger, context: trigger

    def prepare(self, context: BackdoorContext) -> PreparedBackdoor:
        return self.what(self, context)


@dataclass(frozen=True)
class Poisons(Corner):
    """Return the samples of a function."""

    how: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.how(x, y)


@dataclass(frozen=True)
class Evaluates(Corner):
    """Change the evaluation set by a function of it."""

    change: Callable[[EvaluationSet], Any] = lambda probe: probe

    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        return self.change(super().evaluation_set(x, y))


@dataclass(frozen=True)
class EvaluatesInPlace(Corner):
    def evaluation_set(self, x: Tensor, y: Tensor) -> EvaluationSet:
        x[..., 0, 0] = 255
        return EvaluationSet(x, torch.zeros_like(y))


@dataclass(frozen=True)
class RemembersInSelf(Corner):
    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        seen = getattr(self, "seen", 0) + 1
        object.__setattr__(self, "seen", seen)
        return self.stamp(x), torch.full_like(y, seen % 10)


def inverted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return 255 - x, y


def shuffled(order: Tensor) -> Callable[[EvaluationSet], EvaluationSet]:
    return lambda probe: EvaluationSet(probe.x[order], probe.expected[order])


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[..., 0, 0] = 255
    return x, y.fill_(0)


BROKEN: list[tuple[Any, str, str]] = [  # backdoor, the check that it fails, part of the reason
    (NotABackdoor(), "plugin_class", "NotABackdoor must be a subclass of Backdoor"),
    (NotFrozen(), "plugin_class", "@dataclass(frozen=True)"),
    (OldVersion(), "plugin_class", "version must be an int, at least 1, got 0"),
    (
        Refuses(how=lambda spec: refuse(f"not on {spec.name}")),
        "fit",
        "fits none of the data sets (example images (1, 28, 28): not on example images (1, 28, 28)",
    ),
    (
        Refuses(how=lambda spec: len(spec.sample_shape) == 3 or refuse("one\ntwo")),
        "fit",
        "the error on example features must be one line, got 'one\\ntwo'",
    ),
    (
        Refuses(how=lambda spec: len(spec.sample_shape) == 3 or refuse()),
        "fit",
        "the error on example features must be one line, got ''",
    ),
    (Refuses(how=lambda spec: spec.sample_shape[2]), "fit", "raised IndexError"),
    (Prepares(what=lambda trigger, context: None), "fit", "a PreparedBackdoor, got NoneType"),
    (Prepares(what=lambda trigger, context: context.rng), "fit", "has no attribute 'rng'"),
    (Poisons(), "poison", "returns 5 samples of example images (1, 28, 28) unchanged"),
    (Poisons(how=lambda x, y: None), "poison", "raised TypeError"),
    (Poisons(how=lambda x, y: inverted(x, y - y.max())), "poison", "raised RuntimeError: max()"),
    (
        Poisons(how=lambda x, y: (x / 255, y)),
        "poison",
        "must return x of 0 samples of example images (1, 28, 28) as torch.uint8 of shape "
        "(0, 1, 28, 28), got torch.float32 of shape (0, 1, 28, 28)",
    ),
    (Poisons(how=lambda x, y: inverted(x, y.int())), "poison", "got torch.int32 of shape (0,)"),
    (Poisons(how=lambda x, y: inverted(x[1:], y[1:])), "poison", "got torch.uint8 of shape (0, 1"),
    (
        Evaluates(change=lambda probe: (probe.x, probe.expected)),
        "evaluation",
        "must return an EvaluationSet, got tuple",
    ),
    (
        Evaluates(change=lambda probe: replace(probe, x=probe.x / 255)),
        "evaluation",
        "must be torch.uint8 of shape (1, 28, 28), got torch.float32 of shape (1, 28, 28)",
    ),
    (
        Evaluates(change=lambda probe: replace(probe, x=probe.x.flatten(1))),
        "evaluation",
        "got torch.uint8 of shape (784,)",
    ),
    (
        Evaluates(change=lambda probe: replace(probe, expected=probe.expected[0])),
        "evaluation",
        "expected must have shape (54,), got ()",
    ),
    (
        Evaluates(change=lambda probe: EvaluationSet(probe.x[:0], probe.expected[:0])),
        "evaluation",
        "no label to predict on example images (1, 28, 28)",
    ),
    (
        Evaluates(change=lambda probe: replace(probe, expected=0 * probe.expected + IGNORED)),
        "evaluation",
        "no label to predict",
    ),
    (
        Evaluates(change=lambda probe: replace(probe, expected=probe.expected + 10)),
        "evaluation",
        "expected labels must be 0..9, or -100 to ignore",
    ),
    (Poisons(how=in_place), "inputs", "poison modified x in place; clone it first"),
    (
        Poisons(how=lambda x, y: (255 - x, y.fill_(0))),
        "inputs",
        "poison modified y in place; clone it first",
    ),
    (EvaluatesInPlace(), "inputs", "evaluation_set modified x in place"),
    (
        Poisons(how=lambda x, y: inverted(x, y[torch.randperm(len(y))])),
        "same_seed",
        "poison draws from a global random generator",
    ),
    (
        Poisons(how=lambda x, y: inverted(x, y[np.random.default_rng().permutation(len(y))])),
        "same_seed",
        "poison differs between two calls",
    ),
    (RemembersInSelf(), "same_seed", "poison differs between two calls"),
    (
        Evaluates(change=lambda probe: shuffled(torch.randperm(len(probe.x)))(probe)),
        "same_seed",
        "evaluation_set draws from a global random generator",
    ),
    (
        Evaluates(
            change=lambda probe: shuffled(
                torch.from_numpy(np.random.default_rng().permutation(len(probe.x)))
            )(probe)
        ),
        "same_seed",
        "evaluation_set differs between two calls",
    ),
    (
        Prepares(what=lambda trigger, context: replace(trigger, value=int(torch.randint(255, ())))),
        "same_seed",
        "prepare draws from a global random generator",
    ),
    (
        Prepares(
            what=lambda trigger, context: replace(
                trigger, value=200 + int(np.random.default_rng().integers(50))
            )
        ),
        "same_seed",
        "differs between two preparations",
    ),
]


@pytest.mark.parametrize("backdoor", [Corner(), Held()], ids=lambda b: type(b).__name__)
def test_a_correct_backdoor_passes(backdoor: Backdoor) -> None:
    assert {finding.status for finding in inspect_backdoor(backdoor).findings()} == {"ok"}


def test_a_backdoor_may_be_a_class_a_name_or_settings() -> None:
    for given in (Corner, Corner(), "patch", {"name": "patch", "size": 2}):
        check_backdoor(given)
    with pytest.raises(AssertionError, match=r"backdoor Poisons breaks 1 check:\nfailed +poison "):
        check_backdoor(Poisons)


@pytest.mark.parametrize(
    ("backdoor", "check", "reason"), BROKEN, ids=[f"{type(b).__name__}-{r}" for b, _, r in BROKEN]
)
def test_a_broken_backdoor_fails_exactly_one_check(backdoor: Any, check: str, reason: str) -> None:
    verify_only_failure(inspect_backdoor(backdoor), check, reason)


def test_every_check_has_a_broken_backdoor() -> None:
    assert {check for _, check, _ in BROKEN} == {*BACKDOOR.checks}


def test_checks_that_need_a_failed_one_do_not_run() -> None:
    found = {f.check: f.reason for f in inspect_backdoor(Poisons()).findings() if f.reason}
    assert found.keys() == {"poison", "inputs", "same_seed"}
    assert found["inputs"] == "fix poison first"
    assert found["same_seed"] == "fix inputs first"


@dataclass(frozen=True)
class OnSmallImages(Corner):
    """Fits none of the examples."""

    def check(self, spec: Spec) -> None:
        if spec.sample_shape != (1, 16, 16):
            raise ValueError(f"needs images (1, 16, 16), got {spec.sample_shape}")


def test_data_sets_can_be_given() -> None:
    (reason,) = failures(inspect_backdoor(OnSmallImages())).values()
    assert "example sequences: needs images (1, 16, 16), got (8,)" in reason
    assert "check_backdoor(backdoor, datasets)" in reason
    check_backdoor(OnSmallImages(), [images(1, 16, 16)])
    check_backdoor(OnSmallImages(), [*examples(), images(1, 16, 16)])


@dataclass(frozen=True)
class BrokenOnSmallImages(Corner):
    """Correct on all examples."""

    def poison(self, x: Tensor, y: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        return super().poison(x, y, rng) if x.shape[-1] > 16 else (x, y)


def test_every_data_set_is_tried() -> None:
    check_backdoor(BrokenOnSmallImages())
    found = failures(inspect_backdoor(BrokenOnSmallImages(), [*examples(), images(1, 16, 16)]))
    assert found == {"poison": "poison returns 5 samples of example images (1, 16, 16) unchanged"}


def contents(dataset: Dataset) -> list[Any]:
    tensors = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    return [part for tensor in tensors for part in (tensor._version, tensor.sum().item())]


@pytest.mark.parametrize(
    "backdoor", [Poisons(how=in_place), EvaluatesInPlace()], ids=["poison", "evaluate"]
)
def test_a_broken_backdoor_does_not_spoil_the_data_sets(backdoor: Backdoor) -> None:
    data = images(1, 28, 28)
    before = contents(data)
    assert list(failures(inspect_backdoor(backdoor, [data]))) == ["inputs"]
    assert contents(data) == before


@dataclass(frozen=True)
class Exempt(Corner):
    exemptions: ClassVar[Mapping[str, str]] = {"poison": "changes nothing"}


def test_no_check_of_a_backdoor_is_optional() -> None:
    found = failures(inspect_backdoor(Exempt()))
    assert found == {"exemptions": "no optional check is called 'poison' (known: none)"}


def test_checks_leave_global_generators_as_they_are() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check_backdoor(Corner())
    assert torch.equal(torch.get_rng_state(), before)
