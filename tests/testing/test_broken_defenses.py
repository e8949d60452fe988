"""Each check of a defense: a rule that breaks exactly one promise fails exactly that check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from broken import failures, verify_only_failure
from torch import Tensor

from fedbench.defense import Aggregate, Defense, ServerView, mean_of
from fedbench.ops import row_norms
from fedbench.testing import check_defense, example_round
from fedbench.testing.contract import Inspection
from fedbench.testing.defenses import DEFENSE
from fedbench.testing.verify import verify_state


def mean(updates: Tensor) -> Aggregate:
    return mean_of(updates, torch.ones(len(updates), dtype=torch.bool))


@dataclass(frozen=True)
class Mean(Defense):
    """The correct rule that the broken ones vary."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean(updates), state


class NotFrozen(Mean):
    pass


@dataclass(frozen=True)
class OldVersion(Mean):
    version: ClassVar[int] = 0


@dataclass(frozen=True)
class TwoLines(Mean):
    def warning(self, n: int) -> str | None:
        return "one\ntwo"


@dataclass(frozen=True)
class Returns(Mean):
    """Change the result by a function of it."""

    change: Callable[[Aggregate], Any] = lambda result: result

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return self.change(mean(updates)), state


@dataclass(frozen=True)
class Crashes(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean(updates[:, [99]]), state


@dataclass(frozen=True)
class NoState(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> Any:
        return mean(updates)


@dataclass(frozen=True)
class InPlace(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        updates.mul_(1)
        return mean(updates), state


@dataclass(frozen=True)
class ClipsGlobalModel(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        view.global_params.clamp_(-1, 1)
        return mean(updates), state


@dataclass(frozen=True)
class SetAsState(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean(updates), {*view.client_ids.tolist()}


@dataclass(frozen=True)
class GlobalRandomness(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean(updates[torch.randperm(len(updates))]), state


@dataclass(frozen=True)
class NumpyRandomness(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        np.random.random()
        return mean(updates), state


@dataclass(frozen=True)
class RemembersInSelf(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        seen = getattr(self, "seen", 0) + 1
        object.__setattr__(self, "seen", seen)
        return replace(mean(updates), scores=torch.full((len(updates),), float(seen))), state


@dataclass(frozen=True)
class ChangesItsState(Mean):
    def init(self) -> Any:
        return {"rounds": 0}

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        state["rounds"] += 1
        return mean(updates), state


KNOWN: list[Any] = []  # states that KeepsStates returned


@dataclass(frozen=True)
class KeepsStates(Mean):
    """Recognizes its states by identity, which a checkpoint does not preserve."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        known = any(state is other for other in KNOWN)
        KNOWN.append([view.index])
        return replace(mean(updates), scores=torch.full((len(updates),), float(known))), KNOWN[-1]


@dataclass(frozen=True)
class DividesByNorms(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        shares = 1 / row_norms(updates)
        return replace(mean(updates), scores=shares / shares.max()), state


@dataclass(frozen=True)
class Overflows(Mean):
    """Its norms overflow for huge rows; all else is judged in float64."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        norms = row_norms(updates)
        return replace(mean(updates), scores=torch.where(norms > 1e19, math.inf, norms)), state


@dataclass(frozen=True)
class SumOverflows(Mean):
    def init(self) -> Any:
        return {}

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        rows = zip(view.client_ids.tolist(), updates, strict=True)
        sums = {i: row + state.get(i, 0) for i, row in rows}
        return mean(updates), state | sums


@dataclass(frozen=True)
class NeedsTwo(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        spread = updates.double().norm(dim=1).std()  # NaN for one client
        return replace(mean(updates), scores=row_norms(updates) + spread), state


@dataclass(frozen=True)
class RefusesLate(Mean):
    def check(self, n: int) -> None:
        if n < 3:
            raise ValueError(f"needs 3 clients, got {n}")


@dataclass(frozen=True)
class NamesNoNumber(Mean):
    def check(self, n: int) -> None:
        if n < 3:
            raise ValueError("needs more clients")

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        self.check(len(updates))
        return mean(updates), state


@dataclass(frozen=True)
class Shrinks(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        result = mean(updates)
        return replace(result, update=result.update * 0.9), state


@dataclass(frozen=True)
class FollowsTheFirstRow(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        return mean_of(updates, torch.arange(len(updates)) == 0), state


@dataclass(frozen=True)
class RemembersByRow(Mean):
    def init(self) -> Any:
        return []

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        norms = row_norms(updates).clamp_max(1e30)
        old = torch.zeros_like(norms)
        old[: min(len(state), len(norms))] = torch.tensor(state, dtype=old.dtype)[: len(norms)]
        return replace(mean(updates), scores=norms + old), norms.tolist()


@dataclass(frozen=True)
class BreaksTiesByRow(Mean):
    """Follows the first of the clients with the lowest score, which all have."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        scores = torch.zeros(len(updates), dtype=torch.float64)
        return mean_of(updates, torch.arange(len(updates)) == 0, scores), state


@dataclass(frozen=True)
class ScoresInSinglePrecision(Mean):
    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        away = (updates / updates.abs().max().clamp_min(1e-30)).square().sum(dim=1)
        return replace(mean(updates), scores=(away - away.mean()).abs()), state


@dataclass(frozen=True)
class UpdatesInHalfPrecision(Mean):
    """Rounds the update unless all clients agree."""

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        result = mean(updates)
        if updates.dtype == torch.float64 or (updates == updates[0]).all():
            return result, state
        return replace(result, update=result.update * (1 + 3e-6)), state


def nan_weights(result: Aggregate) -> Aggregate:
    return replace(result, weights=result.weights * math.nan, accepted=None)


def nan_threshold(result: Aggregate) -> Aggregate:
    return replace(result, scores=result.weights.double(), threshold=math.nan)


def exceeded_threshold(result: Aggregate) -> Aggregate:
    return replace(result, scores=torch.ones(len(result.weights)).double(), threshold=0.5)


BROKEN: list[tuple[Defense, str, str]] = [  # rule, the check that it fails, part of the reason
    (NotFrozen(), "plugin_class", "@dataclass(frozen=True)"),
    (OldVersion(), "plugin_class", "version must be an int, at least 1, got 0"),
    (TwoLines(), "warning", "must return one line or None"),
    (Crashes(), "result", "raised IndexError"),
    (NoState(), "result", "must return (Aggregate, state), got Aggregate"),
    (Returns(change=lambda r: None), "result", "must return an Aggregate, got None"),
    (Returns(change=nan_weights), "result", "weights must be finite, got nan at 10 of 10"),
    (Returns(change=lambda r: replace(r, update=r.update[1:])), "result", "shape (53,), got (52,)"),
    (
        Returns(change=lambda r: replace(r, weights=r.weights[1:])),
        "result",
        "shape (10,), got (9,)",
    ),
    (Returns(change=lambda r: replace(r, update=r.update.half())), "result", "got torch.float16"),
    (Returns(change=lambda r: replace(r, weights=-r.weights)), "result", "must be 0 or more"),
    (Returns(change=lambda r: replace(r, weights=2 * r.weights)), "result", "must sum to 1"),
    (Returns(change=lambda r: replace(r, accepted=~r.accepted)), "result", "accepted must be true"),
    (Returns(change=lambda r: replace(r, accepted=r.weights)), "result", "must have dtype"),
    (Returns(change=lambda r: replace(r, scores=r.accepted)), "result", "must be floating point"),
    (Returns(change=lambda r: replace(r, details={"a": 1})), "result", "details['a'] must be a"),
    (Returns(change=lambda r: replace(r, threshold=0.5)), "result", "a threshold needs scores"),
    (Returns(change=nan_threshold), "result", "threshold must be a finite number or None, got nan"),
    (Returns(change=exceeded_threshold), "result", "score above threshold 0.5, got [1.0]"),
    (InPlace(), "inputs", "aggregate modified updates in place; clone it first"),
    (ClipsGlobalModel(), "inputs", "modified global_params in place"),
    (SetAsState(), "state", "lists and tuples of these, got set"),
    (GlobalRandomness(), "same_seed", "draws from a global random generator"),
    (NumpyRandomness(), "same_seed", "draws from a global random generator"),
    (RemembersInSelf(), "memory", "remembers something outside its state"),
    (ChangesItsState(), "memory", "modified the state it received in round 0"),
    (KeepsStates(), "checkpoint", "differs after the state was saved and loaded"),
    (DividesByNorms(), "unusual_rows", "scores must be finite"),
    (Overflows(), "huge_rows", "overflow in float32: use fedbench.ops"),
    (SumOverflows(), "later_rounds", "a state must be finite"),
    (
        NeedsTwo(),
        "few_clients",
        "scores must be finite, got nan at 1 of 1 positions [honest, n=1",
    ),
    (RefusesLate(), "few_clients", "check(1) raises ValueError, so aggregate must raise it, too"),
    (NamesNoNumber(), "few_clients", "must name the number of clients, got: needs more clients"),
    (Shrinks(), "unanimity", "all clients sent one update, the result is"),
    (FollowsTheFirstRow(), "client_order", "update of round 0 depends on the order"),
    (RemembersByRow(), "client_order", "key memory by view.client_ids, not by row"),
    (BreaksTiesByRow(), "tied_clients", "treat clients with equal scores equally"),
    (ScoresInSinglePrecision(), "precision", "scores differ between float32 and float64"),
    (UpdatesInHalfPrecision(), "update_precision", "differs between float32 and float64"),
]


def test_a_correct_rule_passes() -> None:
    assert {finding.status for finding in Inspection(DEFENSE, Mean()).findings()} == {"ok"}
    for given in (Mean, Mean(), "fedavg", {"name": "krum", "m": 3}):
        check_defense(given)
    with pytest.raises(AssertionError, match=r"defense Shrinks breaks 1 check:\nfailed +unanimity"):
        check_defense(Shrinks)


@pytest.mark.parametrize(
    ("defense", "check", "reason"), BROKEN, ids=[f"{type(d).__name__}-{r}" for d, _, r in BROKEN]
)
def test_a_broken_rule_fails_exactly_one_check(defense: Defense, check: str, reason: str) -> None:
    verify_only_failure(Inspection(DEFENSE, defense), check, reason)


def test_every_check_has_a_broken_rule() -> None:
    assert {check for _, check, _ in BROKEN} == {*DEFENSE.checks}


def test_a_crash_shows_the_line_of_the_rule() -> None:
    (reason,) = failures(Inspection(DEFENSE, Crashes())).values()
    assert f"{__file__}:" in reason
    assert "return mean(updates[:, [99]]), state" in reason


def test_failing_cases_are_counted_and_can_be_repeated() -> None:
    (reason,) = failures(Inspection(DEFENSE, Overflows())).values()
    assert "[huge_row, float32]\n8 of 8 cases fail, also huge_row, float64" in reason
    updates, view = example_round("huge_row", n=4, dtype=torch.float64)
    outcome, _ = Overflows().aggregate(updates, None, view)
    assert outcome.scores is not None
    assert outcome.scores.isinf().tolist() == [False, True, False, False]


@dataclass(frozen=True)
class Exempt(Shrinks):
    factor: float = 0.9
    names: Any = ("unanimity",)
    reason: str = "shrinks the update"

    @property
    def exemptions(self) -> Mapping[str, str]:
        return dict.fromkeys(self.names, self.reason)

    def aggregate(self, updates: Tensor, state: Any, view: ServerView) -> tuple[Aggregate, Any]:
        result = mean(updates)
        return replace(result, update=result.update * self.factor), state


def test_an_exemption_is_respected() -> None:
    found = Inspection(DEFENSE, Exempt()).finding("unanimity")
    assert (found.status, found.reason) == ("exempt", "shrinks the update")
    check_defense(Exempt())


@dataclass(frozen=True)
class NeedlesslyExempt(Mean):
    exemptions: ClassVar[Mapping[str, str]] = {"unanimity": "who knows"}


def test_an_exemption_that_is_not_needed_fails() -> None:
    found = failures(Inspection(DEFENSE, NeedlesslyExempt()))
    assert found == {"unanimity": "the check passes: remove the exemption (who knows)"}


def test_an_exemption_may_be_needed_with_default_settings_only() -> None:
    assert Inspection(DEFENSE, Exempt(factor=1.0)).finding("unanimity").status == "ok"
    assert Inspection(DEFENSE, Exempt(factor=0.5)).finding("unanimity").status == "exempt"


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (Exempt(names=("unanimty",)), "'unanimty'; did you mean unanimity? (known: client_order, "),
        (Exempt(names=("inputs",)), "no optional check is called 'inputs'"),
        (Exempt(reason=" "), "the exemption from unanimity must have a reason, got ' '"),
    ],
)
def test_wrong_exemptions_fail(plugin: Defense, reason: str) -> None:
    assert reason in failures(Inspection(DEFENSE, plugin))["exemptions"]


@dataclass(frozen=True)
class ExemptFromHugeRows(Overflows):
    exemptions: ClassVar[Mapping[str, str]] = {"huge_rows": "infinite scores are intended"}


def test_without_huge_rows_other_checks_leave_them_out() -> None:
    check_defense(ExemptFromHugeRows())


@pytest.mark.parametrize(
    "state",
    [
        {1, 2},
        {"ids": {1}},
        [frozenset()],
        ({"a": [np.float64(1)]},),
        {"sum": torch.tensor([1.0, math.inf])},
        {"sum": math.nan},
        {(1, 2): 0},
        {"memory": 2j},
    ],
    ids=str,
)
def test_verify_state_finds_what_a_checkpoint_must_not_contain(state: Any) -> None:
    with pytest.raises(AssertionError, match="state must"):
        verify_state(state)
    verify_state({3: (torch.zeros(2), [1, 2.0, None, True, {"a": "b"}])})


def test_checks_leave_global_generators_as_they_are() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check_defense(Mean())
    assert torch.equal(torch.get_rng_state(), before)
    failures(Inspection(DEFENSE, GlobalRandomness()))
    assert torch.equal(torch.get_rng_state(), before)
