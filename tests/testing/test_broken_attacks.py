"""Each check of an attack: one that breaks exactly one promise fails exactly that check."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from broken import failures, verify_only_failure
from torch import Tensor

from fedbench.attack import Attack, AttackView, BackdoorAttack, Omniscient, Poisoning, flat
from fedbench.backdoor import Backdoor
from fedbench.config import rounded_count
from fedbench.data import Spec
from fedbench.testing import check_attack
from fedbench.testing.attacks import ATTACK
from fedbench.testing.contract import Inspection


@dataclass(frozen=True)
class Correct(BackdoorAttack):
    """The correct attack that the broken ones vary. It poisons samples, as its base class does."""


@dataclass(frozen=True)
class Untargeted(Attack):
    """Another correct one. Malicious clients agree on the reverse of their mean update."""

    def collude(self, updates: Tensor, view: AttackView) -> Sequence[Tensor]:
        return [-updates.mean(dim=0)] * len(updates)


@dataclass(frozen=True)
class SeesHonestUpdates(Omniscient):
    def collude(self, updates: Tensor, view: AttackView) -> Tensor:
        return -self.honest_updates(updates, view).mean(dim=0).expand_as(updates)


@dataclass(frozen=True)
class StaysNear(Correct):
    """Projects layer by layer."""

    @torch.no_grad()
    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        for param, where in zip(params, view.layers.values(), strict=True):
            param.lerp_(view.global_params[where].view_as(param), 0.5)


@dataclass(frozen=True)
class SendsTwice(Attack):
    @property
    def needs_clean_update(self) -> bool:
        return True

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        assert view.clean_update is not None
        return update + view.clean_update


@dataclass(frozen=True)
class SendsHugeUpdates(Attack):
    trains: ClassVar[bool] = False

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return torch.full_like(update, 3e38)


@dataclass(frozen=True)
class BehavesHonestly(Attack):
    active: ClassVar[bool] = False


@dataclass(frozen=True)
class NotAnAttack:
    version: ClassVar[int] = 1


class NotFrozen(Correct):
    pass


@dataclass(frozen=True)
class OldVersion(Correct):
    version: ClassVar[int] = 0


@dataclass(frozen=True)
class ForgetsItsBase(Correct):
    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class NamesNoSetting(Correct):
    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError:
            raise ValueError("wrong training settings") from None


@dataclass(frozen=True)
class NoBackdoors(Correct):
    def backdoor_settings(self, default: list[Any]) -> list[Any]:
        return []


@dataclass(frozen=True)
class AcceptsNoBackdoors(Correct):
    def check(self, backdoors: Sequence[Backdoor], spec: Spec) -> None:
        pass


def poisoned(x: Tensor, y: Tensor, poisoning: Poisoning, chosen: Any) -> tuple[Tensor, Tensor]:
    x, y = x.clone(), y.clone()
    x[chosen], y[chosen] = poisoning.backdoors[0].poison(x[chosen], y[chosen], poisoning.rng)
    return x, y


@dataclass(frozen=True)
class Poisons(Correct):
    """Return the samples of a function."""

    how: Callable[[Tensor, Tensor, Poisoning], Any] = lambda x, y, poisoning: (x, y)

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        return self.how(x, y, poisoning)


@dataclass(frozen=True)
class Chooses(Correct):
    """Poison the samples that a function of n, of which to poison k, chooses."""

    which: Callable[[int, int, Poisoning], Any] = lambda n, k, poisoning: poisoning.choose(n)

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        n = len(y)
        chosen = self.which(n, rounded_count(poisoning.pdr, n), poisoning)
        return poisoned(x, y, poisoning, chosen)


@dataclass(frozen=True)
class Minimizes(Correct):
    what: Callable[[Tensor, Sequence[Tensor], AttackView], Any] = lambda loss, params, view: loss

    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        return self.what(loss, params, view)


@dataclass(frozen=True)
class Projects(Correct):
    """Call a function with each parameter, without `torch.no_grad`."""

    each: Callable[[Tensor], Any] = lambda param: None

    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        for param in params:
            self.each(param)


@dataclass(frozen=True)
class MovesTheGlobalModel(Correct):
    def project(self, params: Sequence[Tensor], view: AttackView) -> None:
        view.global_params.copy_(flat(params).detach())


@dataclass(frozen=True)
class Crafts(Correct):
    what: Callable[[Tensor, AttackView], Any] = lambda update, view: update

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        return self.what(update, view)


@dataclass(frozen=True)
class Colludes(Correct):
    what: Callable[[Tensor, AttackView], Any] = lambda updates, view: updates

    def collude(self, updates: Tensor, view: AttackView) -> Tensor | Sequence[Tensor]:
        return self.what(updates, view)


@dataclass(frozen=True)
class DoesNothing(Attack):
    pass


@dataclass(frozen=True)
class RemembersInSelf(Correct):
    def objective(self, loss: Tensor, params: Sequence[Tensor], view: AttackView) -> Tensor:
        seen = getattr(self, "seen", 0) + 1
        object.__setattr__(self, "seen", seen)
        return loss * seen


@dataclass(frozen=True)
class ShrinksTheGlobalModel(Correct):
    """Only if it is large, which is not so in the check of `craft`."""

    def craft(self, update: Tensor, view: AttackView) -> Tensor:
        if len(update) > 1000:
            view.global_params.mul_(0.5)
        return update


def add_one(tensor: Tensor | None, result: Any) -> Any:
    """Modify a tensor of the view in place; return the result."""
    assert tensor is not None
    tensor.add_(1)
    return result


def rebind(param: Tensor) -> None:
    param.data = param.data / 2


def divide_by_zero(param: Tensor) -> None:
    with torch.no_grad():
        param.div_(0)


BROKEN: list[tuple[Any, str, str]] = [  # attack, the check that it fails, part of the reason
    (NotAnAttack(), "plugin_class", "NotAnAttack must be a subclass of Attack"),
    (NotFrozen(), "plugin_class", "@dataclass(frozen=True)"),
    (OldVersion(), "plugin_class", "version must be an int, at least 1, got 0"),
    (ForgetsItsBase(), "training_settings", "epochs=0 must raise ValueError; call super()."),
    (NamesNoSetting(), "training_settings", "must name epochs and 0 in one line, got: wrong"),
    (NoBackdoors(), "backdoors", "must return at least one backdoor, got none"),
    (Correct(backdoors=["pacth"]), "backdoors", "did you mean patch?"),
    (Correct(backdoors=[3]), "backdoors", "3 must be the name of a backdoor"),
    (AcceptsNoBackdoors(), "backdoors", "without backdoors; call super().check"),
    (Poisons(how=lambda x, y, p: None), "poison_inputs", "raised TypeError"),
    (Poisons(how=lambda x, y, p: (x.mul_(1), y)), "poison_inputs", "modified x in place"),
    (Poisons(how=lambda x, y, p: (x, y.fill_(3))), "poison_inputs", "modified y in place"),
    (
        Poisons(how=lambda x, y, p: (x / 255, y)),
        "poison_inputs",
        "must return x as torch.uint8 of shape (7, 1, 8, 8), got torch.float32 of shape (7, 1, 8,",
    ),
    (Poisons(how=lambda x, y, p: (x, y[1:])), "poison_inputs", "got torch.int64 of shape (6,)"),
    (
        Chooses(which=lambda n, k, p: torch.randperm(n)[:k]),
        "poison_seed",
        "poison draws from a global random generator",
    ),
    (
        Chooses(which=lambda n, k, p: np.random.permutation(n)[:k]),
        "poison_seed",
        "poison draws from a global random generator",
    ),
    (
        Chooses(which=lambda n, k, p: random.sample(range(n), k)),
        "poison_seed",
        "poison draws from a global random generator",
    ),
    (
        Chooses(which=lambda n, k, p: np.random.default_rng().permutation(n)[:k]),
        "poison_seed",
        "differs between two calls with equal generators",
    ),
    (Chooses(which=lambda n, k, p: torch.arange(k)), "poison_draw", "same samples for every seed"),
    (
        Chooses(which=lambda n, k, p: torch.randperm(n, generator=p.rng)[: int(p.pdr * n)]),
        "poison_share",
        "pdr=0.5 of 1 samples must poison 1, got 0; poisoning.choose(n) draws them [n=1, pdr=0.5]",
    ),
    (
        Poisons(how=lambda x, y, p: (poisoned(x, y, p, p.choose(len(y)))[0], y)),
        "poison_share",
        "must have the label of the backdoor",
    ),
    (
        Poisons(how=lambda x, y, p: (poisoned(x, y, p, p.choose(len(y)))[0], 0 * y + 3)),
        "poison_share",
        "labels of clean samples must stay",
    ),
    (Minimizes(what=lambda loss, params, v: loss.item()), "objective", "must be a tensor, got 1."),
    (
        Minimizes(what=lambda loss, params, v: torch.tensor(loss.item())),
        "objective",
        "no gradient; compute it with torch from loss and params, without .item()",
    ),
    (Minimizes(what=lambda loss, params, v: loss[None]), "objective", "shape (), got (1,)"),
    (Minimizes(what=lambda loss, params, v: loss.double()), "objective", "got torch.float64"),
    (Minimizes(what=lambda loss, params, v: loss / 0), "objective", "finite, got inf at 1 of 1"),
    (
        Minimizes(
            what=lambda loss, params, v: (
                loss + (flat(params) - v.global_params).square().sum().sqrt()
            )
        ),
        "objective",
        "0.weight must be finite, got nan at 30 of 30 positions [at the global model]",
    ),
    (
        Minimizes(what=lambda loss, params, v: params[0].square().sum()),
        "objective",
        "no gradient for 0.bias",
    ),
    (Minimizes(what=lambda loss, params, v: 0 * loss), "objective", "gradient of 0.weight is zero"),
    (
        Minimizes(what=lambda loss, params, v: add_one(v.global_params, loss)),
        "objective",
        "objective modified global_params in place",
    ),
    (Projects(each=lambda param: param.mul_(0.5)), "project", "raised RuntimeError: a leaf Var"),
    (Projects(each=rebind), "project", "must change parameters in place; use param.copy_(...)"),
    (Projects(each=divide_by_zero), "project", "a projected parameter must be finite"),
    (Projects(each=lambda param: param.requires_grad_(False)), "project", "parameters trainable"),
    (Projects(each=lambda param: param.sum().backward()), "project", "must not leave gradients"),
    (MovesTheGlobalModel(), "project", "project modified global_params in place"),
    (Crafts(what=lambda update, v: None), "craft", "a crafted update must be a tensor, got None"),
    (Crafts(what=lambda update, v: update[1:]), "craft", "must have shape (53,), got (52,)"),
    (Crafts(what=lambda update, v: update.half()), "craft", "got torch.float16"),
    (Crafts(what=lambda update, v: update / 0), "craft", "must be finite, got"),
    (Crafts(what=lambda update, v: update.neg_()), "craft", "craft modified update in place"),
    (
        Crafts(what=lambda update, v: add_one(v.clean_update, update)),
        "craft",
        "craft modified clean_update in place",
    ),
    (
        Crafts(what=lambda update, v: update + torch.randn(len(update))),
        "craft",
        "craft draws from a global random generator",
    ),
    (
        Crafts(what=lambda update, v: update * np.random.default_rng().random()),
        "craft",
        "craft differs between two calls with equal generators",
    ),
    (Colludes(what=lambda updates, v: updates[1:]), "collude", "return 1 updates, got 0 [n_mal"),
    (Colludes(what=lambda updates, v: updates.mean(dim=0)), "collude", "1 updates, got 53"),
    (Colludes(what=lambda updates, v: updates[:, 1:]), "collude", "shape (53,), got (52,)"),
    (Colludes(what=lambda updates, v: updates.half()), "collude", "got torch.float16"),
    (
        Colludes(what=lambda updates, v: v.benign.mean(dim=0).expand_as(updates)),
        "collude",
        "must be finite, got nan at 53 of 53 positions [n_malicious=10, float32]",
    ),
    (Colludes(what=lambda updates, v: updates.neg_()), "collude", "modified updates in place"),
    (
        Colludes(what=lambda updates, v: add_one(v.benign, updates)),
        "collude",
        "collude modified benign in place",
    ),
    (
        Colludes(what=lambda updates, v: updates[torch.randperm(len(updates))]),
        "collude",
        "collude draws from a global random generator",
    ),
    (
        Colludes(what=lambda updates, v: updates * np.random.default_rng().random()),
        "collude",
        "collude differs between two calls with equal generators",
    ),
    (DoesNothing(), "round_loop", "malicious clients send honest updates: does the attack"),
    (Correct(lr=1e38), "round_loop", "refuses 1 of 6 updates: not finite [n_malicious=1]"),
    (RemembersInSelf(), "round_loop", "the same seed gives other updates"),
    (ShrinksTheGlobalModel(), "round_loop", "honest clients send other updates than without"),
    # `clean_update` and `benign` are not requested.
    (Crafts(what=lambda update, v: -v.clean_update), "round_loop", "TypeError: bad operand"),
    (
        Colludes(what=lambda updates, v: updates - v.benign.sum(dim=0)),
        "round_loop",
        "raised AttributeError: 'NoneType' object has no attribute 'sum'",
    ),
]


@pytest.mark.parametrize(
    "attack",
    [
        Correct(),
        Correct(epochs=2, lr=0.1, lr_decay=0.5, lr_decay_at=[0.5], backdoors=["patch", "bars"]),
        Untargeted(),
        SeesHonestUpdates(),
        SeesHonestUpdates(omniscient=False),
        StaysNear(),
        SendsTwice(),
        SendsHugeUpdates(),
        BehavesHonestly(),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_a_correct_attack_passes(attack: Attack) -> None:
    found = {f.check: f.status for f in Inspection(ATTACK, attack).findings()}
    targeted = ("training_settings", "backdoors", "poison_draw", "poison_share")
    skipped = () if isinstance(attack, BackdoorAttack) else targeted
    assert found == dict.fromkeys(found, "ok") | dict.fromkeys(skipped, "skipped")


def test_an_attack_may_be_a_class_a_name_or_settings() -> None:
    for given in (Correct, Correct(), "sign_flip", {"name": "constrain_and_scale", "gamma": 2}):
        check_attack(given)
    with pytest.raises(AssertionError, match=r"attack DoesNothing breaks 1 check:\nfailed +round_"):
        check_attack(DoesNothing)


@pytest.mark.parametrize(
    ("attack", "check", "reason"), BROKEN, ids=[f"{type(a).__name__}-{r}" for a, _, r in BROKEN]
)
def test_a_broken_attack_fails_exactly_one_check(attack: Any, check: str, reason: str) -> None:
    verify_only_failure(Inspection(ATTACK, attack), check, reason)


def test_every_check_has_a_broken_attack() -> None:
    assert {check for _, check, _ in BROKEN} == {*ATTACK.checks}


def test_checks_that_need_a_failed_one_do_not_run() -> None:
    inspection = Inspection(ATTACK, NoBackdoors())
    assert {f.check for f in inspection.findings() if f.status == "not run"} == {"round_loop"}
    assert inspection.finding("round_loop").reason == "fix backdoors first"
    inspection = Inspection(ATTACK, NotAnAttack())
    not_run = {f.check for f in inspection.findings() if f.status == "not run"}
    assert not_run == {*ATTACK.checks} - {"plugin_class"}


def test_a_crash_in_a_round_shows_the_line_of_the_attack() -> None:
    attack = Crafts(what=lambda update, view: -view.clean_update)
    (reason,) = failures(Inspection(ATTACK, attack)).values()
    assert f"{__file__}:" in reason
    assert "attack = Crafts(what=lambda update, view: -view.clean_update)" in reason


def test_an_attack_on_other_data_skips_the_round() -> None:
    found = Inspection(ATTACK, Correct(backdoors=["features"])).finding("round_loop")
    assert found.status == "skipped"
    assert found.reason.startswith("needs other data than images (1, 28, 28): ")


@dataclass(frozen=True)
class FirstSamples(Correct):
    """Draw no samples, by definition."""

    exemptions: ClassVar[Any] = {"poison_draw": "poisons the first samples"}

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        return poisoned(x, y, poisoning, slice(rounded_count(poisoning.pdr, len(y))))


@dataclass(frozen=True)
class FirstAndAnother(FirstSamples):
    """The exemption excuses no other check."""

    def poison(self, x: Tensor, y: Tensor, poisoning: Poisoning) -> tuple[Tensor, Tensor]:
        return poisoned(x, y, poisoning, slice(rounded_count(poisoning.pdr, len(y)) + 1))


def test_an_exemption_is_respected() -> None:
    found = Inspection(ATTACK, FirstSamples()).finding("poison_draw")
    assert (found.status, found.reason) == ("exempt", "poisons the first samples")
    check_attack(FirstSamples())
    assert list(failures(Inspection(ATTACK, FirstAndAnother()))) == ["poison_share"]


@dataclass(frozen=True)
class NeedlesslyExempt(Correct):
    exemptions: ClassVar[Mapping[str, str]] = {"poison_share": "who knows"}


def test_an_exemption_that_is_not_needed_fails() -> None:
    found = failures(Inspection(ATTACK, NeedlesslyExempt()))
    assert found == {"poison_share": "the check passes: remove the exemption (who knows)"}


@pytest.mark.parametrize(
    ("exemptions", "reason"),
    [
        ({"poison_drow": "why"}, "did you mean poison_draw? (known: poison_draw, poison_share)"),
        ({"round_loop": "why"}, "no optional check is called 'round_loop'"),
        ({"poison_draw": ""}, "the exemption from poison_draw must have a reason, got ''"),
        (("poison_draw",), "exemptions must map names of checks to reasons, got ('poison_draw',)"),
    ],
    ids=str,
)
def test_wrong_exemptions_fail(exemptions: Any, reason: str) -> None:
    wrong = dataclass(frozen=True)(type("Wrong", (FirstSamples,), {"exemptions": exemptions}))
    assert reason in failures(Inspection(ATTACK, wrong))["exemptions"]


def test_checks_leave_global_generators_as_they_are() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check_attack(Correct())
    assert torch.equal(torch.get_rng_state(), before)
